"""`python -m jax_megamoe`."""

import sys

from jax_megamoe.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
