"""README and the quickstart run; every link of every page inside the repository leads somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import docs_pages
import pytest
from docs_pages import PAGES, ROOT

README = (ROOT / "README.md").read_text()


def run(source: str, folder: Path) -> str:
    """What a Python program prints, with warnings as errors."""
    program = [sys.executable, "-W", "error", "-c", source]
    done = subprocess.run(
        program, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def relative_errors(printed: str) -> list[float]:
    return [float(number) for number in re.findall(r"relative error ([\d.]+)", printed)]


def test_the_first_snippet_runs(tmp_path: Path) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.S)
    printed = run(snippet, tmp_path)
    assert printed.startswith("(128, 512) bfloat16")
    (error,) = relative_errors(printed)
    assert 0.02 < error < 0.08


@pytest.mark.parametrize("num_devices", [1, 4])
def test_quickstart_runs(tmp_path: Path, num_devices: int) -> None:
    devices = f"import jax; jax.config.update('jax_num_cpu_devices', {num_devices})\n"
    printed = run(devices + (ROOT / "examples/quickstart.py").read_text(), tmp_path)
    assert f"{num_devices} ranks: (128, 512) bfloat16" in printed
    errors = relative_errors(printed)
    assert len(errors) == 2
    assert all(0.02 < error < 0.08 for error in errors)


def test_one_line_sets_up_and_runs_each() -> None:
    for last in ("-m jax_megamoe demo", "-m pytest -n 2"):
        (line,) = re.findall(rf"^python3 -m venv .*{re.escape(last)}$", README, re.M)
        assert ".venv/bin/pip install -e" in line


@pytest.mark.parametrize("page", PAGES, ids=docs_pages.name)
def test_links_inside_the_repository(page: Path) -> None:
    assert not docs_pages.broken_links(page)


def test_a_link_to_no_file_or_heading_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](page.md#one) [b](#two) [c](no.md) `[d](no.md)` [e](https://f.g)\n")
    assert docs_pages.broken_links(page) == ["#two", "no.md"]
