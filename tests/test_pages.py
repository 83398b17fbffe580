"""benchmarks/pages.py: its pages are those of the records, and what it does with several."""

import copy
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
AGAIN = "PYTHONPATH=.:benchmarks python benchmarks/pages.py"
NAME = "qwen3_30b_mxfp4_block"


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("pages")


@pytest.fixture
def model() -> dict[str, Any]:
    """A recorded model, as of a run that did not say its command."""
    models = json.loads((RESULTS / "decoder_h200.json").read_text())["models"]
    found = copy.deepcopy(models[NAME])
    del found["command"]
    return found


def write(folder: Path, name: str, **models: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps({"models": models}))


@pytest.mark.parametrize("name", ["decoder_h200.md", "gpt_oss_h200.md", "portable_h200.md"])
def test_what_is_written_is_up_to_date(name: str, pages: Any) -> None:
    assert pages.PAGES[name]() == (RESULTS / name).read_text(), AGAIN


def test_pages_have_names(pages: Any) -> None:
    assert [*pages.PAGES] == ["decoder_h200.md", "gpt_oss_h200.md", "portable_h200.md"]


def test_models_of_two_records(pages: Any, model: dict[str, Any], tmp_path: Path) -> None:
    """One table, and the command of each."""
    write(tmp_path, "decoder_h200.json", one=model, two=model)
    write(tmp_path, "decoder_h200_more.json", three=model | {"command": "python it.py"})
    page = pages.decoder(tmp_path)
    assert page.count("| model | batch |") == 1
    rows = [line.split(" | ")[:3] for line in page.splitlines()[-12:]]
    times = ("1", "3.35"), ("8", "6.07"), ("64", "9.78"), ("256", "15.67")
    assert rows == [[f"| {name}", *each] for name in ("one", "two", "three") for each in times]
    commands = [line.strip() for line in page.splitlines() if line.startswith("    ")]
    assert commands == [*(f"{pages.DECODER} --models {each}" for each in ("one", "two")),
                        "python it.py"]  # fmt: skip


def test_models_of_other_conditions(pages: Any, model: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, "decoder_h200.json", one=model, two=model | {"context": 4096}, three=model)
    title, *sections = pages.decoder(tmp_path).split("    PYTHONPATH")
    assert title == "# Decode steps of whole models on an H200\n\n"
    # Both commands of the first section start so.
    assert "--models one" in sections[0] and "a cache of 1,024 positions" in sections[1]
    assert "--models two" in sections[2] and "a cache of 4,096 positions" in sections[2]


def test_a_model_of_two_records_is_refused(
    pages: Any, model: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path, "decoder_h200.json", one=model)
    write(tmp_path, "decoder_h200_more.json", one=model)
    said = "decoder_h200_more.json: expected one in one record, got it in two"
    with pytest.raises(ValueError, match=said):
        pages.decoder(tmp_path)


def test_rows_without_parts(pages: Any, model: dict[str, Any], tmp_path: Path) -> None:
    stopped, missing, omitted, prompt = (dict(model["rows"][i]) for i in (0, 1, 2, -1))
    for row in (stopped, missing):
        del row["parts_ms"], row["parts_from"], row["ms_without_graphs"]
        row["of_limit"] = {"step": 0.5}
    missing["parts_missing"] = "not asked for, see --profile"
    omitted |= {
        "parts_from": "programs without them",
        "parts_ms": {"experts": 5.0, "attention": 3.0, "rest": 2.0},
    }
    write(tmp_path, "decoder_h200.json", one=model | {"rows": [stopped, missing, omitted, prompt]})
    page = pages.decoder(tmp_path)
    assert "Parts with † are differences between programs" in page
    assert page.splitlines()[-3:] == [
        "| one | 1 | 3.35 |  | 298 | 0.83 | 0.50 | stopped before |  |  |  |",
        "| one | 8 | 6.07 |  | 1319 | 2.24 | 0.50 | not asked for, see --profile |  |  |  |",
        "| one | 64 | 9.78 | 10.80 | 6547 | 5.68 | 0.58 "
        "| 5.00† (0.73) |  | 3.00† (0.60) | 2.00† (0.26) |",
    ]
