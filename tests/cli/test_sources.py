"""The `sources` command: what it prints of sources, and which sources run which layers."""

import io

import pytest
from rich.console import Console

from jax_megamoe.cli import sources
from jax_megamoe.cli.sources import Cell, cells, preferences, print_fetched, print_sources
from jax_megamoe.compile import MissingDependency
from jax_megamoe.compile.fetch import Fetched
from jax_megamoe.compile.sources import KernelSource


@pytest.fixture
def console() -> Console:
    """A wide console that is not a terminal; `words` reads it."""
    return Console(file=io.StringIO(), width=200)


def words(console: Console) -> list[str]:
    """The printed rows, without borders."""
    assert isinstance(console.file, io.StringIO)
    rows = console.file.getvalue().translate(str.maketrans("│┃", "  ")).splitlines()
    return [" ".join(row.split()) for row in rows]


def test_every_kind_of_layer() -> None:
    runs = {
        (c.weight_format, c.shared_format, c.activation): (c.preferred, c.able) for c in cells()
    }
    both, vllm, none = ("sgl", ("sgl", "vllm")), ("vllm", ("vllm",)), (None, ())
    for form in ("mxfp4", "mxfp8"):
        for shared in (None, "mxfp8"):
            for activation in ("swiglu", "GPT-OSS's swiglu", "situ"):
                assert runs.pop((form, shared, activation)) == both
            assert runs.pop((form, shared, "any alpha, beta")) == vllm
    for shared in (None, "bf16"):
        assert runs.pop(("bf16", shared, "swiglu")) == both
        for activation in ("GPT-OSS's swiglu", "any alpha, beta"):
            assert runs.pop(("bf16", shared, activation)) == vllm
    assert runs.pop(("fp8_block", None, "swiglu")) == ("sgl", ("sgl",))
    for activation in ("GPT-OSS's swiglu", "any alpha, beta"):
        assert runs.pop(("fp8_block", None, activation)) == none
    for activation in ("swiglu", "GPT-OSS's swiglu"):
        assert runs.pop(("nvfp4", None, activation)) == both
    assert runs.pop(("nvfp4", None, "any alpha, beta")) == vllm
    for shared in ("mxfp8", "bf16"):
        for activation in ("swiglu", "GPT-OSS's swiglu", "any alpha, beta"):
            assert runs.pop(("nvfp4", shared, activation)) == vllm
    for recipe in ("mxfp4_block", "nvfp4_block"):
        assert runs.pop((recipe, None, "swiglu")) == ("flashinfer", ("flashinfer",))
        for activation in ("GPT-OSS's swiglu", "any alpha, beta"):
            assert runs.pop((recipe, None, activation)) == (None, ())
    for activation in ("swiglu", "GPT-OSS's swiglu", "any alpha, beta", "situ"):
        assert runs.pop(("mxfp4_bf16", None, activation)) == none
    assert not runs


def test_preferences_join_what_is_alike(console: Console) -> None:
    kinds = [
        Cell("one", None, "swiglu", "sgl", ("sgl", "vllm")),
        Cell("one", None, "situ", "sgl", ("sgl", "vllm")),
        Cell("one", None, "any", "vllm", ("vllm",)),
        Cell("one", "bf16", "swiglu", "sgl", ("sgl", "vllm")),
        Cell("one", "bf16", "situ", "sgl", ("sgl", "vllm")),
        Cell("one", "bf16", "any", "vllm", ("vllm",)),
        Cell("two", None, "swiglu", "sgl", ("sgl",)),
        Cell("two", "mxfp8", "swiglu", None, ()),
    ]
    console.print(preferences(kinds))
    assert words(console)[4:-1] == [
        "one none, bf16 swiglu; situ sgl, vllm",
        "one none, bf16 any vllm",
        "two none all sgl",
        "two mxfp8 all none",
    ]


def test_list(console: Console, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    def find(name: str) -> KernelSource:
        if name == "vllm":
            raise MissingDependency("[vllm]: expected this, got that; run a command")
        return KernelSource(name, "0.2.5", tmp_path, "")

    monkeypatch.setattr(sources, "find_source", find)
    print_sources(console)
    rows = words(console)
    formats = "mxfp4 (mxfp8), mxfp8 (mxfp8), nvfp4, bf16 (bf16), fp8_block"
    assert f"sgl 0.2.5 {tmp_path} {formats}" in rows
    start = "vllm - [vllm]: expected this, got that; run a command mxfp4 (mxfp8), mxfp8 (mxfp8)"
    assert any(row.startswith(start) for row in rows)
    assert "mxfp4 none, mxfp8 any alpha, beta vllm" in rows


@pytest.mark.parametrize(("already", "status"), [(False, "fetched"), (True, "was already there")])
def test_fetch_says_where(
    console: Console, monkeypatch: pytest.MonkeyPatch, tmp_path, already: bool, status: str
) -> None:
    def fetch(name, version, on_progress):
        assert (name, version) == ("vllm", None)
        on_progress(1, 2)
        return Fetched("0.33.0", tmp_path, already)

    monkeypatch.setattr(sources, "fetch_source", fetch)
    print_fetched(console, "vllm", None)
    assert words(console) == [f"vllm 0.33.0 {status}: {tmp_path}"]


def test_terminals_see_a_bar(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    def fetch(name, version, on_progress):
        on_progress(3_000_000, 336_000_000)
        console.file.flush()
        return Fetched("0.33.0", tmp_path, False)

    monkeypatch.setattr(sources, "fetch_source", fetch)
    console = Console(file=io.StringIO(), width=200, force_terminal=True, color_system=None)
    print_fetched(console, "vllm", None)
    assert "fetching vllm" in console.file.getvalue()
    assert f"vllm 0.33.0 fetched: {tmp_path}" in console.file.getvalue()
