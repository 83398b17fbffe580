"""The pages that tests/cells_table.py writes are up to date, and what they say of some cells."""

import cells_table
import pytest
from cells_table import Cell

import jax_megamoe as mm


@pytest.fixture(scope="module")
def statuses() -> dict[Cell, dict[str, str]]:
    return cells_table.table()


def test_the_pages_are_up_to_date(statuses: dict[Cell, dict[str, str]]) -> None:
    command = "run `PYTHONPATH=.:tests:tests/plan python tests/cells_table.py`"
    page = (cells_table.ROOT / cells_table.PAGE).read_text()
    assert page == cells_table.page(statuses), command
    text = (cells_table.ROOT / "README.md").read_text()
    assert text == cells_table.readme(text, cells_table.summary(statuses)), command
    for file in cells_table.RUN_ON_H200.values():
        assert (cells_table.ROOT / "benchmarks/results" / file).is_file()


def test_every_cell_has_a_kernel(statuses: dict[Cell, dict[str, str]]) -> None:
    """Every format with every activation and shared expert, except what no kernel computes."""
    assert len(statuses) == 62
    without = [
        cell
        for cell, by_source in statuses.items()
        if all(said.startswith("refused") for said in by_source.values())
    ]
    assert without == [
        Cell(recipe, activation, "")
        for recipe in ("fp8_block", "mxfp4_block", "nvfp4_block")
        for activation in ("GPT-OSS's swiglu", "swiglu of any alpha and beta")
    ] + [Cell("mxfp4_bf16", activation, "") for activation in cells_table.ACTIVATIONS]


def test_cells(statuses: dict[Cell, dict[str, str]]) -> None:
    said = dict(statuses[Cell("fp8_block", "swiglu", "")])
    sgl = said.pop("sgl")
    assert sgl.startswith("run on H200; ")
    assert sgl.endswith("launch checked (101 records)")
    assert said == {
        "vllm": "refused: source: expected sgl for fp8_block, got vllm",
        "flashinfer": "refused: source: expected sgl for fp8_block, got flashinfer",
    }
    unfused = statuses[Cell("nvfp4", "swiglu", "mxfp8")]
    assert unfused["sgl"].endswith("fuses it: python -m jax_megamoe sources fetch vllm")
    assert unfused["vllm"].startswith("executed by the emulator (")
    assert unfused["vllm"].endswith("); launch checked (6 records)")
    assert not any(
        each.startswith("run on H200")
        for cell, by_source in statuses.items()
        for each in by_source.values()
        if cell.form not in ("fp8_block", "mxfp4_block", "nvfp4_block")
    )
    assert statuses[Cell("mxfp4_block", "clamped swiglu", "")]["flashinfer"].startswith(
        "run on H200"
    )
    assert "run on H200" not in statuses[Cell("mxfp4_block", "swiglu", "")]["flashinfer"]


def test_kinds_of_activations() -> None:
    for name, activation in cells_table.ACTIVATIONS.items():
        assert cells_table.kind_of(activation) == name
    assert cells_table.kind_of(mm.Activation("swiglu", alpha=1.702, beta=1.0)) == "GPT-OSS's swiglu"
    clamped = mm.Activation("swiglu", clamp=1.0, alpha=2.0)
    assert cells_table.kind_of(clamped) == "swiglu of any alpha and beta"


def test_grouped_on_gpus(statuses: dict[Cell, dict[str, str]]) -> None:
    """What README says of the grouped products, by the words of its other columns."""
    rows = [line.split(" | ") for line in cells_table.summary(statuses).splitlines()[2:]]
    said = {row[0].strip("|` "): row[3] for row in rows}
    assert said["nvfp4_block"] == "no kernel"
    assert all(each.startswith("run on H200<br>") for n, each in said.items() if n != "nvfp4_block")
    assert "<br>executed by the emulator for 9.0, 10.0 (error up to " in said["bf16"]
    assert said["fp8_block"].endswith(")<br>launch checked for 10.0")
    assert "mxfp4 x fp8_block" in cells_table.grouped_on_h200()
