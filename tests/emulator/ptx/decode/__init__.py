"""Decoders, a file for each class of instructions; interpreter/instructions/ executes them.

Section numbers are those of the PTX ISA 9.0. A decoder takes every qualifier and operand that it
knows; `Statement.done` refuses what is left.
"""

from emulator.ptx.decode import (  # noqa: F401
    async_copy,
    barrier,
    bulk_copy,
    compare,
    control,
    conversion,
    floating,
    integer,
    logic,
    matrix,
    mbarrier,
    memory,
    movement,
    tcgen05,
    tensor_copy,
    warp,
    wgmma,
)
