"""What the emulator's tests need of a machine; tests without it skip, naming what is missing."""

import pytest

from emulator.build import NoCompiler, library_path
from emulator.toolchain import compiler
from jax_megamoe.compile import MissingDependency, find_source


def needs(*sources: str) -> None:
    """Skips a test without a C++ compiler, a CUDA compiler or one of these kernel sources."""
    try:
        library_path()
        if sources:
            compiler()
        for source in sources:
            find_source(source)
    except (NoCompiler, MissingDependency) as missing:
        pytest.skip(str(missing))
