"""The manual in docs/: what it shows runs, what it quotes exists, and the site builds strictly."""

import importlib.util
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

import docs_pages
import pytest
from docs_pages import DOCS, MANUAL, PAGES, ROOT

from jax_megamoe.cli import main as cli

SHORTEST_QUOTE = 12
"""Letters and signs that a quoted error has at least, so that it can be told from others."""

WITH_CODE = [page for page in MANUAL if "```python" in page.read_text()]


@pytest.mark.parametrize("page", WITH_CODE, ids=docs_pages.name)
def test_python_blocks_run_as_one_program(page: Path, tmp_path: Path) -> None:
    code = [(info, body) for info, body in docs_pages.blocks(page) if info.startswith("python")]
    assert {info for info, _ in code} == {"python"}, "a block that is not run must say so here"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    place = {"COORDINATOR": address, "PROCESSES": "1", "PROCESS": "0"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(body for _, body in code)],
        cwd=tmp_path,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | place,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_in_the_api_once() -> None:
    documented = docs_pages.documented_names()
    assert sorted(documented) == sorted(docs_pages.public_names())


def test_quoted_errors_exist_in_the_sources() -> None:
    quoted = docs_pages.quoted_errors(DOCS / "troubleshooting.md")
    assert len(quoted) > 40
    texts = docs_pages.source_texts()
    for error in quoted:
        length = sum(map(len, docs_pages.fragments(error)))
        assert length >= SHORTEST_QUOTE, f"too little of {error!r} to search for"
        assert not docs_pages.unknown_parts(error, texts), error
    invented = "x: expected what nobody wrote, got …"
    assert docs_pages.unknown_parts(invented, texts) == ["what nobody wrote"]


def parse(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the command line parsed and nothing run; SystemExit if it is refused."""

    def parsed_only(command: Callable[[ArgumentParser], cli.Run]) -> Callable[..., cli.Run]:
        def add(parser: ArgumentParser) -> cli.Run:
            command(parser)
            return lambda _: 0

        add.__name__, add.__doc__ = command.__name__, command.__doc__
        return add

    monkeypatch.setattr(cli, "COMMANDS", tuple(parsed_only(each) for each in cli.COMMANDS))
    assert cli.main(arguments) == 0


QUOTED = sorted({line for page in PAGES for line in docs_pages.commands(page)})


@pytest.mark.parametrize("line", QUOTED)
def test_quoted_commands_parse(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = shlex.split(line)
    if len(arguments) == 1 and not arguments[0].startswith("-"):  # a command's name alone
        assert arguments[0] in [command.__name__ for command in cli.COMMANDS]
    elif "--help" not in arguments:
        parse(arguments, monkeypatch)


def test_a_wrong_command_does_not_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        parse(["doctor", "--no-such-option"], monkeypatch)


def test_memory_table_is_what_its_script_prints() -> None:
    table = runpy.run_path(str(DOCS / "memory_table.py"))["table"]()
    assert table in (DOCS / "memory.md").read_text(), "run docs/memory_table.py"


def test_folding_table_is_what_its_script_prints() -> None:
    table = runpy.run_path(str(DOCS / "folding_table.py"))["table"]()
    assert table in (DOCS / "usage.md").read_text(), "run docs/folding_table.py"


def figures(page: Path) -> list[set[str]]:
    """The words of each table row of a page that has a number with a point in it."""
    lines = docs_pages.prose(page).splitlines()
    return [
        set(re.findall(r"[\w.]+", line))
        for line in lines
        if line.startswith("|") and re.search(r"\d\.\d", line)
    ]


def test_figures_are_copied_from_the_linked_results() -> None:
    page = DOCS / "performance.md"
    linked = [page.parent / link for link in docs_pages.links(page) if "/results/" in link]
    measured = [row for path in linked for row in figures(path)]
    quoted = figures(page)
    assert len(quoted) >= 10
    assert not [row for row in quoted if not any(row <= found for found in measured)]


def test_site_builds_strictly_and_asks_nobody(tmp_path: Path) -> None:
    for module in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            pytest.skip(f"needs {module}: pip install '.[docs]'")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        build, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert "excluded from the built site" not in done.stderr
    built = {path.relative_to(tmp_path).with_suffix(".md") for path in tmp_path.rglob("*.html")}
    assert {page.relative_to(DOCS) for page in MANUAL} <= built
    for path in tmp_path.rglob("*.html"):
        text = path.read_text()
        assert "<p>|" not in text, f"{path.name} has a table that is none"
        loads = re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?https?:[^>]*", text)
        assert not loads, f"{path.name} loads {loads}"
