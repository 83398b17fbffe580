"""Imports the scripts that need a GPU, and calls for their help; test_scripts.py runs it on a CPU.

    PYTHONPATH=.:examples:tests:tests/gpu:benchmarks/gpu python tests/gpu/dry_run.py SCRIPT ...

Prints a line for each fault: a module that does not import, a name that an imported module does
not have, a command line that does not parse. PyTorch is replaced by an empty module where it is
not installed.
"""

import ast
import contextlib
import importlib.util
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

if "torch" not in sys.modules and importlib.util.find_spec("torch") is None:
    absent: Any = ModuleType("torch")
    absent.dtype = object
    sys.modules["torch"] = absent


def missing_names(module: ModuleType, tree: ast.Module) -> Iterator[str]:
    """``module.name`` of modules imported at the top that do not have the name."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        holder = getattr(module, node.value.id, None)
        real = isinstance(holder, ModuleType) and holder.__name__ != "torch"
        if real and not hasattr(holder, node.attr):
            yield f"line {node.lineno}: {node.value.id}.{node.attr} does not exist"


def faults(path: Path) -> Iterator[str]:
    """What is wrong with a script."""
    text = path.read_text()
    try:
        module = importlib.import_module(path.stem)
    except Exception as error:
        yield f"does not import: {type(error).__name__}: {error}"
        return
    yield from missing_names(module, ast.parse(text))
    if not hasattr(module, "main") or "argparse" not in text:
        return
    sys.argv, said = [str(path), "--help"], io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            module.main()
    except SystemExit as ended:
        if ended.code or not said.getvalue().startswith("usage: "):
            yield f"--help ended with {ended.code}: {said.getvalue()[:200]}"
    except Exception as error:
        yield f"--help raised {type(error).__name__}: {error}"


def main() -> None:
    """Checks the scripts that are named."""
    found = [f"{name}: {fault}" for name in sys.argv[1:] for fault in faults(Path(name))]
    print("\n".join(found))
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
