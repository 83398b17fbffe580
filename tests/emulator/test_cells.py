"""A fair sample of the cells: each kernel family over ranks, activations, tiles and orders.

`run_cells.py` runs all of them.
"""

from collections.abc import Iterator

import pytest

from emulator import cells, grid
from emulator.cells import Cell
from emulator.fixtures import needs
from emulator.machine import EmulatorError
from emulator.standing_in import StandIn, standing_in
from jax_megamoe.plan.grouped import tiles

FAMILIES = cells.families()
NAMES = [f"{source} {form}" for form, source in FAMILIES]


@pytest.fixture(scope="module")
def stand_in() -> Iterator[StandIn]:
    needs()
    with standing_in(Cell("mxfp8", "sgl").device) as one:
        yield one


def last_activation(form: str, source: str) -> Cell:
    """The family's cell with the most unusual activation and shared expert."""
    return [cell for cell in cells.accepted() if (cell.form, cell.source) == (form, source)][-1]


@pytest.mark.parametrize(("form", "source"), FAMILIES, ids=NAMES)
def test_family_over_two_ranks_with_padding_holes_and_late_copies(stand_in, form, source):
    needs(source)
    cell = Cell(form, source, ranks=2, tokens=32, mask=True, stats=True, unrouted=0.2,
                delay=0.7, seed=3)  # fmt: skip
    outcome = cells.check(cell, stand_in)
    assert outcome.block_m and outcome.executed > 10_000


@pytest.mark.parametrize(("form", "source"), FAMILIES, ids=NAMES)
def test_familys_last_activation_and_shared_expert(stand_in, form, source):
    needs(source)
    cells.check(last_activation(form, source), stand_in)


@pytest.mark.parametrize(
    "cell",
    [
        # Eight callbacks at once may fill XLA's threads, and each waits for one that copies its
        # operands: eight ranks are run_cells.py's, with more threads.
        Cell("mxfp4", "sgl", ranks=4, tokens=9),
        Cell("mxfp4", "sgl", ranks=4, replicas=4, idle_ranks=(0, 2), stats=True),
        Cell("mxfp4", "sgl", experts=2, tokens=300),
        Cell("fp8_block", "sgl", tokens=130, max_tokens=130),
        Cell("mxfp4", "sgl", tokens=0),
    ],
    ids=str,
)
def test_rank_counts_and_tiles(stand_in, cell):
    needs(cell.source)
    cells.check(cell, stand_in)


@pytest.mark.parametrize(
    "cell",
    [
        Cell("mxfp4", "sgl", activation="gpt_oss", biases=True, mask=True, stats=True),
        Cell("mxfp8", "sgl", activation="gpt_oss", biases=True, ranks=2, tokens=16, unrouted=0.2),
        Cell("bf16", "sgl", activation="clamped", biases=True),
        Cell("mxfp4", "vllm", activation="gpt_oss", biases=True, ranks=2, tokens=16, mask=True),
        Cell("bf16", "vllm", activation="gpt_oss", biases=True, replicas=4, stats=True),
    ],
    ids=str,
)
def test_folded_biases(stand_in, cell):
    """GPT-OSS's layer in small: the kernel sums the biases in its own accumulator."""
    needs(cell.source)
    cells.check(cell, stand_in)


def test_folded_biases_in_a_layer_as_wide_as_gpt_oss(stand_in):
    """The hidden and intermediate size that a block of GPT-OSS has; few experts."""
    needs("sgl")
    sizes = dict(hidden=3072, intermediate=2944, experts=4, top_k=4, tokens=2, num_sms=8)
    cells.check(Cell("mxfp4", "sgl", activation="gpt_oss", biases=True, **sizes), stand_in)


@pytest.mark.parametrize(
    "cell",
    [
        Cell("mxfp4", cells.GROUPED, arch=80, tokens=7, mask=True, stats=True, replicas=8),
        Cell("nvfp4", cells.GROUPED, arch=120),
        Cell("fp8_block", cells.GROUPED, arch=90, ranks=2, unrouted=0.2, stats=True, delay=0.7),
        # 1,040 rows: two blocks sort them.
        Cell("mxfp4", cells.GROUPED, arch=90, tokens=130, top_k=8, unrouted=0.2, stats=True),
        # No rows: the products wait for nothing.
        Cell("mxfp4", cells.GROUPED, arch=90, tokens=130, top_k=8, unrouted=1.0, stats=True),
    ],
    ids=str,
)
def test_grouped_products(stand_in, cell):
    needs(cell.source)
    cells.check(cell, stand_in)


@pytest.fixture
def forms(monkeypatch) -> list[tuple[tuple[int, ...], int, bool]]:
    """Block, blocks a multiprocessor and whether a wave is cut, of the tiles that are planned."""
    planned: list[tuple[tuple[int, ...], int, bool]] = []
    choose = tiles.measured

    def measured(*arguments):
        found = choose(*arguments)
        planned.append((found.block, found.ctas, found.stream_k))
        return found

    monkeypatch.setattr(tiles, "measured", measured)
    return planned


def test_forms_of_tiles_on_hopper(stand_in, forms):
    """Narrow tiles of a product of few rows, and a wave that is cut along K."""
    needs("humming")
    wanted = ((8, 128, 128), 2, False), ((8, 256, 128), 2, True)
    for cell, form in zip(grid.forms_of_tiles(), wanted, strict=True):
        forms.clear()
        cells.check(cell, stand_in)
        assert form in forms


def test_few_rows_of_bf16_on_hopper(stand_in, forms):
    """Deep tiles that are cut along K, and tiles of which three run on a multiprocessor."""
    needs("humming")
    deep, wide, split = (
        ((8, 128, 256), 1, True),
        ((8, 256, 128), 1, True),
        ((8, 128, 128), 3, False),
    )
    for cell, wanted in zip(grid.few_rows(), ({deep}, {wide, deep}, {split, deep}), strict=False):
        forms.clear()
        cells.check(cell, stand_in)
        assert set(forms) == wanted


@pytest.mark.parametrize(
    "cell",
    [
        Cell("bf16", cells.GROUPED, arch=90, tokens=7, mask=True, stats=True, replicas=8),
        Cell("bf16", cells.GROUPED, arch=90, tokens=64, experts=4, unrouted=0.2, idle_experts=(2,),
             biases=True, delay=0.7),
        Cell("bf16", cells.GROUPED, arch=100, tokens=64, experts=4, unrouted=0.2, stats=True,
             idle_experts=(2,), biases=True, delay=0.7, fast_math=False),
        Cell("bf16", cells.GROUPED, arch=90, tokens=130, top_k=8, unrouted=0.2, stats=True,
             mask=True),
        Cell("bf16", cells.GROUPED, arch=90, tokens=130, top_k=8, unrouted=1.0, stats=True),
    ],
    ids=str,
)  # fmt: skip
def test_grouped_products_of_bf16_weights(stand_in, cell):
    """DeepGEMM's, where the others are Humming's."""
    needs("sgl")
    cells.check(cell, stand_in)


def test_calls_of_several_sizes_on_one_buffer_as_a_graphs_replays(stand_in):
    needs("sgl")
    outcomes = cells.reuse(Cell("mxfp4", "sgl", ranks=2, grid_id=77), stand_in)
    assert [outcome.error for outcome in outcomes] == [0.0] * 5


REFUSED = {  # accepted once, with wrong numbers
    "K blocks of 256 in vllm's NVFP4": (
        Cell("nvfp4", "vllm", intermediate=384),
        "intermediate_size",
    ),
    "32 choices without a shared expert": (Cell("mxfp8", "sgl", experts=64, top_k=32), "top_k"),
    "rows in half-row buffers": (Cell("mxfp8", "sgl", hidden=8704, max_tokens=6144), "hidden_size"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_fault_that_the_emulator_found_is_refused(what):
    cell, argument = REFUSED[what]
    assert argument in cell.refusal()


@pytest.mark.parametrize("offset", [0, 2])
def test_reserved_sms_may_be_any_of_the_device(stand_in, offset):
    needs("sgl")
    cell = Cell("mxfp8", "sgl", reserved_sms=2, num_sms=8, smid_offset=offset)
    cells.check(cell, stand_in)


def test_wrong_kernel_is_a_failure_with_its_cell(stand_in, monkeypatch):
    needs("sgl")
    cell = Cell("mxfp4", "sgl")
    monkeypatch.setattr(cells, "limit", lambda *_: cells.tolerances.Agreement(-1.0, -1.0))
    with pytest.raises(cells.CellFailure, match="sgl mxfp4: Outcome"):
        cells.check(cell, stand_in)
    with pytest.raises(EmulatorError, match="limit of 1000 instructions reached"):
        stand_in.run(lambda: cells.call(cell, "deep_gemm"), settings={"max_instructions": 1000})
