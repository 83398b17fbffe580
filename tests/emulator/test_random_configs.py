"""Random configs: what `check_supported` accepts, the kernels get right; the rest is refused.

The examples are the same in every run; `pytest --hypothesis-seed=N` tries others.
"""

from typing import Any

import hypothesis
from cells_table import ACTIVATIONS
from hypothesis import strategies as st

from emulator import cells
from emulator.cells import Cell
from emulator.fixtures import needs
from emulator.standing_in import standing_in

LARGEST = 6e6
"""Weights of a layer, elements: the emulator's and nvcc's time."""


@st.composite
def small_cells(draw: Any) -> Cell:
    """Calls of every family, of sizes that may or may not be accepted."""
    form, source = draw(st.sampled_from(cells.families()))
    ranks = draw(st.sampled_from([1, 1, 2, 4]))
    experts = ranks * draw(st.sampled_from([1, 2, 3, 5]))
    hidden = draw(st.sampled_from([256, 512, 768, 1024, 1280, 1536]))
    intermediate = draw(st.sampled_from([128, 256, 384, 512, 640, 896]))
    hypothesis.assume(experts * hidden * intermediate <= LARGEST)
    return Cell(
        form,
        source,
        activation=draw(st.sampled_from(sorted(ACTIVATIONS))),
        shared=draw(st.sampled_from(["", "", "mxfp8", "bf16"])),
        ranks=ranks,
        tokens=draw(st.sampled_from([1, 5, 16, 31, 77])),
        experts=experts,
        top_k=draw(st.integers(1, min(experts, 8))),
        hidden=hidden,
        intermediate=intermediate,
        max_tokens=draw(st.sampled_from([80, 256, 2000])),
        num_sms=draw(st.sampled_from([4, 6, 8, 10])),
        unrouted=draw(st.sampled_from([0.0, 0.2, 0.8])),
        mask=draw(st.booleans()),
        stats=draw(st.booleans()),
        delay=draw(st.sampled_from([0.0, 0.5, 0.9])),
        seed=draw(st.integers(1, 1000)),
    )


def accepted(cell: Cell) -> bool:
    try:
        cell.config()
    except (NotImplementedError, ValueError):
        return False
    return not cell.refusal()


@hypothesis.settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(cell=small_cells().filter(accepted))
def test_accepted_config_is_right(cell):
    needs(cell.source)
    with standing_in(cell.device) as stand_in:
        cells.check(cell, stand_in)
