"""PTX text to instruction arrays for the interpreter in ../interpreter."""

from emulator.ptx.encoding import PtxError
from emulator.ptx.module import Kernel, parse

__all__ = ["Kernel", "PtxError", "parse"]
