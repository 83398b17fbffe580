"""Each fault put into a launch is noticed."""

import cases

import jax_megamoe as mm
from emulator.cells import Cell
from emulator.fixtures import needs
from emulator.standing_in import Captured, standing_in

CELL = Cell("mxfp8", "sgl", experts=4, max_tokens=64)


def captured(cell: Cell) -> Captured:
    needs(cell.source)
    config = cell.config()
    arguments = (*cases.tokens(config, cell.tokens), cases.weights(config))
    with standing_in(cell.device) as stand_in:
        (rank,) = stand_in.capture(
            lambda: mm.mega_moe(*arguments, config=config, implementation="deep_gemm")
        )
    return rank
