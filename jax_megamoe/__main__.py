"""`python -m jax_megamoe`."""

import sys

try:
    from jax_megamoe.cli.main import main
except ImportError as error:
    hint = "install the package with its dependencies: pip install jax-megamoe"
    sys.exit(f"python -m jax_megamoe: error: {error}; {hint}")

if __name__ == "__main__":
    sys.exit(main())
