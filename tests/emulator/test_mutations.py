"""Each fault put into a launch is noticed."""

import functools
import re

import cases
import numpy as np
import pytest

import jax_megamoe as mm
from emulator import mutations
from emulator.cells import GROUPED, Cell, in_its_layout
from emulator.fixtures import needs
from emulator.machine import EmulatorError
from emulator.mutations import MUTATIONS, ONE_WEIGHT, OVERLAPS, SORTED
from emulator.standing_in import Captured, standing_in

BY_THE_EMULATOR = {  # what it says, where the output might have been right by luck
    "l1_weights of rank 2": "tensor map of rank 2 used with 4 coordinates",
    "16 bytes less shared memory": "shared access of",
    "no cluster": "CTA",
    "domains of two SMs": r"rank 0 sm_locality_domains\+2",
    "l1_acts box a row short": "deadlock",
}


@functools.cache
def captured(form: str) -> Captured:
    cell = Cell(form, "sgl", experts=4, max_tokens=64)
    needs(cell.source)
    config = cell.config()
    arguments = (*cases.tokens(config, cell.tokens), cases.weights(config))
    with standing_in(cell.device) as stand_in:
        (rank,) = stand_in.capture(
            lambda: mm.mega_moe(*arguments, config=config, implementation="deep_gemm")
        )
    return rank


@functools.cache
def sorted_by_two_blocks(form: str = "bf16") -> Captured:
    """1,536 rows: a block sorts 1,024."""
    needs("sgl" if form == "bf16" else GROUPED)
    cell = Cell(form, GROUPED, arch=90, tokens=192, top_k=8)
    config = cell.config()
    weights = in_its_layout(cell, cases.weights(config))
    arguments = (*cases.tokens(config, cell.tokens), weights)
    with standing_in(cell.device) as stand_in:
        (rank,) = stand_in.capture(
            lambda: mm.mega_moe(*arguments, config=config, implementation="grouped")
        )
    return rank


@functools.cache
def right(form: str) -> np.ndarray:
    return mutations.run(captured(form))


@pytest.mark.parametrize("name", [name for name in MUTATIONS if name != ONE_WEIGHT])
def test_fault_is_noticed(name):
    seen = mutations.noticed(captured("mxfp8"), MUTATIONS[name], right("mxfp8"))
    assert seen, f"{name} passes unseen"
    if name in BY_THE_EMULATOR:
        assert re.search(BY_THE_EMULATOR[name], seen), seen


def test_one_weight_byte_changes_bits_of_mxfp4():
    kept = captured("mxfp4")
    got = mutations.run(MUTATIONS[ONE_WEIGHT](kept))
    assert (got != right("mxfp4")).any()


@pytest.fixture(scope="module")
def right_rows():
    return mutations.run(sorted_by_two_blocks())


@pytest.mark.parametrize("name", SORTED)
def test_fault_in_sorting_by_two_blocks_is_noticed(right_rows, name):
    seen = mutations.noticed(sorted_by_two_blocks(), SORTED[name], right_rows)
    assert seen, f"{name} passes unseen"


@pytest.mark.parametrize("name", OVERLAPS)
def test_launch_that_does_not_wait_is_noticed(name):
    form, mutation, message = OVERLAPS[name]
    with pytest.raises(EmulatorError) as caught:
        mutations.run(mutation(sorted_by_two_blocks(form)))
    assert re.sub(r"\+\d+", "", str(caught.value)).removeprefix("overlap: ").startswith(message)


def test_unchanged_call_is_right():
    assert mutations.noticed(captured("mxfp8"), lambda each: each, right("mxfp8")) == ""
