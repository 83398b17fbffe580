"""The scripts that need a GPU import, and name what exists, on a machine that has none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (
    ROOT,
    ROOT / "examples",
    ROOT / "tests",
    ROOT / "tests/gpu",
    ROOT / "benchmarks",
    ROOT / "benchmarks/gpu",
)
SCRIPTS = tuple(
    path
    for folder in (ROOT / "benchmarks/gpu", ROOT / "tests/gpu")
    for path in sorted(folder.glob("*.py"))
    if not path.name.startswith(("test_", "dry_run"))
)


def dry_run(tmp_path: Path, *scripts: Path) -> str:
    """What dry_run.py prints of some scripts."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (*FOLDERS, tmp_path))),
        "OUT": str(tmp_path),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, ROOT / "tests/gpu/dry_run.py", *scripts]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert not done.stderr, done.stderr[-3000:]
    return done.stdout.strip()


def test_scripts_import_and_name_what_exists(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings: pip install '.[cuda13]'")
    assert len(SCRIPTS) > 25
    assert dry_run(tmp_path, *SCRIPTS) == ""


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("from jax_megamoe import random_things", "does not import: ImportError"),
        ("import jax_megamoe as mm\ndef f(): mm.things()", "line 2: mm.things does not exist"),
        ("import argparse\ndef main():\n    raise OSError('no')", "--help raised OSError: no"),
    ],
)
def test_faults_are_found(text: str, fault: str, tmp_path: Path) -> None:
    script = tmp_path / "faulty.py"
    script.write_text(text)
    assert fault in dry_run(tmp_path, script)
