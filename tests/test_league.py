"""benchmarks/league.py: its page and table are those of the records, and what it does with them."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jax_megamoe.cli.gpu.result import Ceilings, GpuResult, Timing

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
        # No layer is faster than the GPU: a wrong unit or size would show here. Reading alone is a
        # little faster than a copy, which reads and writes.
        assert 0 < league.recorded.ceilings().share(each) < 1.1


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
    ran = {(n, i): cell for n, row in enumerate(cells) for i, cell in enumerate(row[1:])}
    ran = {place: cell for place, cell in ran.items() if cell != "not run"}
    deep, xla, ragged = (
        league.COLUMNS.index(each)
        for each in (("deep_gemm", "fp8_block"), ("xla", "fp8_block"), ("ragged_dot", "bf16"))
    )
    assert ran == {
        (0, deep): "**20** (0.05)",
        (0, xla): "30 (0.03)",
        (0, ragged): "**10** (0.10)",
        (1, deep): "**40** (0.03)",
        (1, ragged): "50 (0.02)",
    }
    (line,) = lost
    assert line.endswith("| 1 | 1 | deep_gemm fp8_block, 20 | ragged_dot bf16, 10 | 2.00 |")


def test_a_league_run_takes_the_place_of_older_times(
    league: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A made-up file beside the records: its cells are marked, newer than a record's, and a
    higher rate counts."""
    recorded = league.recorded
    for path in recorded.RESULTS.glob("*.json"):
        (tmp_path / path.name).symlink_to(path)
    older = recorded.ceilings()
    place = dict(model="qwen3_30b", num_tokens=8, weight_bytes=3e8, flops=1e9)
    timings = (
        Timing(recipe="fp8_block", implementation="deep_gemm", microseconds=111.0, **place),
        Timing(recipe="fp8_block", implementation="humming", microseconds=99.0, **place),
        Timing(recipe="bf16", implementation="tokamax", microseconds=None, why="none", **place),
    )
    made_up = GpuResult(
        "made up", "NVIDIA H200", {"jax": "9.9", "driver": "1"}, Ceilings(5e12), timings
    )
    other = replace(made_up, device="NVIDIA H100", timings=(replace(timings[0], microseconds=1.0),))
    made_up.write(tmp_path / "league_h200_qwen3_30b.json")
    other.write(tmp_path / "league_h200_z.json")
    monkeypatch.setattr(recorded, "RESULTS", tmp_path)
    found = recorded.timings()
    assert recorded.ceilings() == replace(older, copy_bytes_per_second=5e12)
    text = league.page(found, recorded.ceilings())
    row = next(line for line in text.splitlines() if line.startswith("| 8 |"))
    assert f"| 111{league.ONE_RUN} (0.54) |" in row and f"| 99{league.ONE_RUN} (0.61) |" in row
    assert "- [league_h200_qwen3_30b.json](results/league_h200_qwen3_30b.json): driver 1" in text
    assert "league_h200_z" not in text and "Cells with" in text
    assert '"deep_gemm": 111.0' in league.measured(found)
    assert "unrolled" not in recorded.environments()["league_h200_qwen3_30b.json"]

    versions = made_up.versions | {"layers of a program": "unrolled"}
    replace(made_up, versions=versions).write(tmp_path / "league_h200_qwen3_30b.json")
    assert recorded.environments()["league_h200_qwen3_30b.json"] == (
        "driver 1, jax 9.9, layers unrolled"
    )
