"""benchmarks/league.py: its page and table are those of the records, and what it does with them."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from jax_megamoe.cli.gpu.result import Ceilings, Timing

ROOT = Path(__file__).parents[1]
AGAIN = "PYTHONPATH=.:benchmarks python benchmarks/league.py"


@pytest.fixture
def league(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("league")


def test_what_is_written_is_up_to_date(league: Any) -> None:
    timings = league.recorded.timings()
    assert league.page(timings, league.recorded.ceilings()) == league.PAGE.read_text(), AGAIN
    assert league.measured(timings) == league.TABLE.read_text(), AGAIN
    assert league.PICTURE.read_bytes()[:4] == b"\x89PNG"


def test_every_cell_has_a_record(league: Any) -> None:
    for each in league.recorded.timings():
        assert (ROOT / "benchmarks/results" / each.source).exists()
        assert each.microseconds > 0 and each.weight_bytes > 0 and each.flops > 0
        # No layer is faster than the GPU: a wrong unit or size would show here.
        assert 0 < league.recorded.ceilings().share(each) < 1


def test_best_and_lost_are_bold(league: Any) -> None:
    def timing(implementation: str, recipe: str, num_tokens: int, taken: float) -> Timing:
        place = ("qwen3_30b", recipe, implementation, num_tokens)
        return Timing(*place, taken, weight_bytes=1e6, flops=1e6)

    timings = [
        timing("deep_gemm", "fp8_block", 1, 20),
        timing("xla", "fp8_block", 1, 30),
        timing("ragged_dot", "bf16", 1, 10),
        timing("deep_gemm", "fp8_block", 8, 40),
        timing("ragged_dot", "bf16", 8, 50),
    ]
    lines, lost = league.table("qwen3_30b", 1, timings, Ceilings(1e12, 1e12, 2e12))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:4]]
    assert cells[0] == ["1", "**20** (0.05)", *["not run"] * 4, "30 (0.03)", *["not run"] * 5,
                        "**10** (0.10)"]  # fmt: skip
    assert cells[1][1] == "**40** (0.03)" and cells[1][-1] == "50 (0.02)"
    (line,) = lost
    assert line.endswith("| 1 | 1 | deep_gemm fp8_block, 20 | ragged_dot bf16, 10 | 2.00 |")
