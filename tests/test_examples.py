"""Every example and notebook runs, shows what it is there to show, and fails where that fails."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tolerances

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))

SHOWN = {
    "convert_checkpoint.py": [
        r"^checkpoint: 6\.3 MB in bfloat16$",
        r"^mxfp8: 3\.2 MB, bit for bit what the checkpoint gives, relative error 0\.06\d$",
        r"^mxfp4: 1\.7 MB, bit for bit what the checkpoint gives, relative error 0\.2\d\d$",
    ],
    "multi_process.py": [
        r"^process 0: 64 tokens, read [0-7]\.\d of the checkpoint's 12\.6 MB$",
        r"^process 1: 64 tokens, read [0-7]\.\d of the checkpoint's 12\.6 MB$",
        r"^2 processes agree .* with one of 8 devices: \(128, 256\)$",
    ],
    "generate.py": [
        r"^8 sequences of 16 tokens over 8 devices$",
        r"^first:( \d+){16}$",
        r"^the same one by one on one device: True$",
    ],
    "serve_layer.py": [
        r"^64 steps, compiles: 1$",
        r"^real tokens by step: 2 5 6 7 11 12 .* 2 1 0 0 0$",
        r"^row 0, steps 7 to 22:( \d+){16}$",
        r"^NaN in rows without a sequence: no bit differs$",
        r"^routed experts: 6\.5 MB, 0\.81 MB on each of 8 devices$",
    ],
    "watch_load.py": [
        r"^192 steps, traces: 1$",
        r"^busiest over mean device, at rest: 1\.5\d then 2\.\d\d$",
        r"^busiest over mean device, rebalanced: 1\.1\d then 1\.[12]\d$",
        r"^rebalanced before the steps 8 56",
        r"^outputs: no bit differs$",
    ],
}
"""Lines that each example prints; test_docs has the quickstart."""

BROKEN = {
    "error beyond its bound": (
        "convert_checkpoint.py",
        ("if not error < 0.25:", "if not error < 0.01:"),
        "mxfp8: expected a relative error below 0.25",
    ),
    "a process that fails": (
        "multi_process.py",
        ("    y, read = run_layer", "    1 / (1 - process)\n    y, read = run_layer"),
        "ZeroDivisionError",
    ),
}
"""An example, a change that makes it fail, what it then says."""

EXECUTE = """
import sys
import nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
where = {"metadata": {"path": sys.argv[3]}}
nbclient.NotebookClient(notebook, timeout=600, resources=where).execute()
nbformat.write(notebook, sys.argv[2])
"""
"""A program that executes the notebook at its first argument and writes it to its second."""


def run(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs Python in `folder`, where temporary files and what Jupyter keeps go too."""
    places = ("TMPDIR", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR")
    environment = os.environ | {name: str(folder / name) for name in places}
    (folder / "TMPDIR").mkdir()
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def test_every_example_is_run() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {*SHOWN, "quickstart.py", "attention.py"}, "attention.py is generate.py's"


@pytest.mark.parametrize("name", SHOWN)
def test_example(name: str, tmp_path: Path) -> None:
    done = run(tmp_path, "-W", "error", EXAMPLES / name)
    assert done.returncode == 0, done.stderr
    missing = [line for line in SHOWN[name] if not re.search(line, done.stdout, re.M)]
    assert not missing, done.stdout
    assert not list((tmp_path / "TMPDIR").iterdir())
    pictures = {"watch_load.py": "watch_load.png"}
    if name in pictures:
        assert (tmp_path / pictures[name]).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_example_fails(case: str, tmp_path: Path) -> None:
    name, change, said = BROKEN[case]
    source = (EXAMPLES / name).read_text()
    assert source.count(change[0]) == 1
    program = tmp_path / name
    program.write_text(source.replace(*change))
    done = run(tmp_path, program)
    assert done.returncode == 1
    assert said in done.stderr
    assert not list((tmp_path / "TMPDIR").iterdir())


def code_cells(notebook: Path) -> list[dict[str, Any]]:
    cells = json.loads(notebook.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def printed(notebook: Path) -> str:
    outputs = [output for cell in code_cells(notebook) for output in cell["outputs"]]
    return "".join("".join(output.get("text", "")) for output in outputs)


def words_and_numbers(text: str) -> tuple[list[str], np.ndarray]:
    """The text between numbers, without spaces, and the numbers."""
    number = r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.])"
    words = [re.sub(r"\s", "", part) for part in re.split(number, text)]
    return words, np.array([float(each) for each in re.findall(number, text)])


def test_there_are_notebooks() -> None:
    names = [path.stem for path in NOTEBOOKS]
    assert names == ["einsum_comparison", "expert_load", "formats"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_kept_as_executed(notebook: Path) -> None:
    assert notebook.stat().st_size < 300_000
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    kinds = {(output["output_type"], output.get("name", "")) for output in outputs}
    assert kinds == {("stream", "stdout"), ("display_data", "")}
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_executes(notebook: Path, tmp_path: Path) -> None:
    for needed in ("nbclient", "nbformat", "ipykernel"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"needs {needed}: pip install '.[test]'")
    again = tmp_path / notebook.name
    done = run(tmp_path, "-c", EXECUTE, notebook, again, tmp_path)
    assert done.returncode == 0, done.stderr
    kept_words, kept_numbers = words_and_numbers(printed(notebook))
    words, numbers = words_and_numbers(printed(again))
    assert words == kept_words
    assert len(numbers) > 50
    np.testing.assert_allclose(numbers, kept_numbers, **tolerances.NOTEBOOKS._asdict())
