"""fetch.py: wheels are checked, trees appear whole, and nothing stays of what went wrong.

No test has a network: pip's index is a folder of small wheels. Some need pip itself and skip
without it.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fake_toolchain import write_headers
from wheels import kept, pin, use_as_index, write_wheel

from jax_megamoe.compile import fetch, sources
from jax_megamoe.compile.errors import MissingDependency
from jax_megamoe.compile.fetch import fetch_source, fetched_source
from jax_megamoe.compile.pins import DISTRIBUTIONS
from jax_megamoe.compile.sources import find_source

pytestmark = pytest.mark.usefixtures("clean")
needs_pip = pytest.mark.skipif(
    importlib.util.find_spec("pip") is None, reason="pip is not installed for this Python"
)

FAKE_PIP = """#!/bin/sh
# As `python -m pip download REQUIREMENT --dest FOLDER ...` would: copies the wheels beside it.
echo call >> "{calls}"
{before}
cp "{folder}"/*.whl "$6"
"""


@pytest.fixture
def index(monkeypatch, tmp_path):
    """The folder that pip takes wheels from, with a wheel of each source, vllm's being pinned."""
    folder = tmp_path / "index"
    pin(monkeypatch, "vllm", write_wheel(folder, DISTRIBUTIONS["vllm"]))
    use_as_index(monkeypatch, folder)
    return folder


@pytest.fixture
def cache(tmp_path):
    """The cache folder, which does not exist yet."""
    return tmp_path / "cache"


def use_fake_pip(monkeypatch, tmp_path, index, before=""):
    """Puts a script in Python's place; returns the file in which its calls are counted."""
    calls, program = tmp_path / "calls", tmp_path / "python"
    program.write_text(FAKE_PIP.format(calls=calls, before=before, folder=index))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return calls


def left(cache: Path) -> list[Path]:
    return list(cache.rglob("*"))


@needs_pip
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_headers_licences_and_metadata_are_kept(monkeypatch, tmp_path, index, cache, name):
    pinned = DISTRIBUTIONS[name]
    wheel = pin(monkeypatch, name, write_wheel(index, pinned))
    progress = []
    done = fetch_source(name, on_progress=lambda got, total: progress.append((got, total)))
    tree = cache / "sources" / f"{name}-{pinned.version}"
    assert done == (pinned.version, tree, False)
    assert [path.name for path in tree.parent.iterdir()] == [tree.name]
    files = {p.relative_to(tree).as_posix() for p in tree.rglob("*") if p.is_file()}
    assert files == {*kept(pinned), "manifest.json"}
    manifest = json.loads((tree / "manifest.json").read_text())
    assert set(manifest["files"]) == kept(pinned)
    assert progress[-1] == (wheel.num_bytes, wheel.num_bytes)
    assert all(0 <= got <= total == wheel.num_bytes for got, total in progress)
    monkeypatch.setattr(sources, "_version", lambda distribution: None)  # as if none were installed
    if pinned.cutlass:
        write_headers(tmp_path / "cutlass/include", pinned.cutlass)
        monkeypatch.setenv(DISTRIBUTIONS[pinned.cutlass].variable, str(tmp_path / "cutlass"))
    found = find_source(name)
    assert (found.version, found.include_dir) == (pinned.version, tree / pinned.headers)


def test_second_fetch_finds_the_first(monkeypatch, tmp_path, index):
    calls = use_fake_pip(monkeypatch, tmp_path, index)
    first = fetch_source("vllm")
    assert not first.already
    assert fetch_source("vllm", DISTRIBUTIONS["vllm"].version) == first._replace(already=True)
    assert calls.read_text() == "call\n"


@needs_pip
def test_another_hash_is_refused(monkeypatch, index, cache):
    (path,) = index.iterdir()
    wheel = pin(monkeypatch, "vllm", path)
    path.write_bytes(path.read_bytes() + b"more")
    text = (
        rf"^{re.escape(path.name)}: expected SHA-256 {wheel.sha256} \({wheel.num_bytes} bytes\), "
        rf"got [0-9a-f]{{64}} \({wheel.num_bytes + 4} bytes\); it is not used; see which index"
    )
    with pytest.raises(MissingDependency, match=text):
        fetch_source("vllm")
    assert not left(cache)


@pytest.mark.parametrize("pip", [pytest.param("real", marks=needs_pip), "fake"])
def test_truncated_wheel_is_refused(monkeypatch, tmp_path, index, cache, pip):
    (path,) = index.iterdir()
    path.write_bytes(path.read_bytes()[:1000])
    text = r"kernel source vllm: expected the wheel of vllm==0\.33\.0 for manylinux_2_28_x86_64"
    if pip == "fake":
        use_fake_pip(monkeypatch, tmp_path, index)
        text = r"vllm-0\.33\.0-.*: expected SHA-256 .*got .* \(1000 bytes\)"
    with pytest.raises(MissingDependency, match=text):
        fetch_source("vllm")
    assert not left(cache)


@needs_pip
def test_no_wheel_to_be_had(index, cache):
    shutil.rmtree(index)
    text = (
        r"expected the wheel of vllm==0\.33\.0 for manylinux_2_28_x86_64 from pip download, got "
        r"status 1: .*No matching distribution found for vllm==0\.33\.0; it needs pip .* and the "
        r"package index or, without network, PIP_NO_INDEX=1 and PIP_FIND_LINKS=a folder with the "
        r"wheel; or set JAX_MEGAMOE_VLLM_ROOT to an unpacked one"
    )
    with pytest.raises(MissingDependency, match=text):
        fetch_source("vllm")
    assert not left(cache)


def test_python_without_pip(monkeypatch, tmp_path, index, cache):
    use_fake_pip(monkeypatch, tmp_path, index, before="echo No module named pip; exit 1")
    with pytest.raises(MissingDependency, match="got status 1: No module named pip; it needs pip"):
        fetch_source("vllm")
    assert not left(cache)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("jax_megamoe",),
            r"expected one of \['sgl', 'vllm', 'flashinfer', 'humming'\], got 'jax_megamoe'",
        ),
        (("vllm", "0.32.0"), r"version of vllm: expected one of \['0\.33\.0'\], got '0\.32\.0'"),
        (("sgl", ">0"), r"version of sgl: expected one of \['0\.2\.5'\], got '>0'"),
    ],
)
def test_unknown_sources_and_versions(cache, arguments, text):
    with pytest.raises(ValueError, match=text):
        fetch_source(*arguments)
    assert not left(cache)


def remove(path):
    path.unlink()


def shorten(path):
    path.write_bytes(path.read_bytes()[:-3])


def add(path):
    path.parent.mkdir(exist_ok=True)
    path.write_text("#pragma once")


def link(path):
    """Another place for the file, which has the same contents today."""
    moved = path.rename(next(p for p in path.parents if p.name == "sources").with_name("moved"))
    path.symlink_to(moved)


@pytest.mark.parametrize(
    ("file", "damage", "fault"),
    [
        ("vllm/third_party/deep_gemm/include/cutlass/version.h", remove, "no {}"),
        (
            "vllm/third_party/deep_gemm/include/deep_gemm/impls/kernel.cuh",
            shorten,
            "other contents of {}",
        ),
        ("vllm-0.33.0.dist-info/licenses/LICENSE", remove, "no {}"),
        ("vllm/third_party/deep_gemm/include/deep_gemm/new.cuh", add, "an added {}"),
        ("vllm/third_party/deep_gemm/include/another/new.cuh", add, "an added {}"),
        ("vllm/third_party/deep_gemm/include/cutlass/version.h", link, "other contents of {}"),
        ("manifest.json", remove, "no intact {}"),
        ("manifest.json", shorten, "no intact {}"),
        ("manifest.json", lambda path: path.write_text("[1]"), "no intact {}"),
    ],
)
def test_damaged_tree_is_refused_until_it_is_fetched_again(
    monkeypatch, tmp_path, index, file, damage, fault
):
    calls = use_fake_pip(monkeypatch, tmp_path, index)
    tree = fetch_source("vllm").folder
    damage(tree / file)
    text = (
        f"kernel source vllm: expected the files of manifest.json in {tree}, "
        f"got {fault.format(file)}; `python -m jax_megamoe sources fetch vllm` replaces it"
    )
    for _ in range(2):
        with pytest.raises(MissingDependency, match=re.escape(text)):
            find_source("vllm")
    assert not fetch_source("vllm").already
    assert find_source("vllm").include_dir.is_relative_to(tree)
    assert [path.name for path in tree.parent.iterdir()] == [tree.name]
    assert calls.read_text() == "call\n" * 2


def test_interrupted_download_stops_pip_and_leaves_nothing(monkeypatch, tmp_path, index, cache):
    before = f"echo $$ > {tmp_path}/pid; touch $6/part.whl; exec sleep 600"
    use_fake_pip(monkeypatch, tmp_path, index, before)

    def interrupt(got, total):
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_source("vllm", on_progress=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert not left(cache)


def test_remains_of_a_killed_process_go_with_the_next_fetch(monkeypatch, tmp_path, index, cache):
    use_fake_pip(monkeypatch, tmp_path, index)
    remains = cache / "sources" / ".vllm-0.33.0.abcd"
    remains.mkdir(parents=True)
    (remains / "part.whl").write_bytes(b"part")
    (cache / "sources" / ".vllm-0.33.0.lock").touch()
    tree = fetch_source("vllm").folder
    assert [path.name for path in tree.parent.iterdir()] == [tree.name]


def test_cache_that_cannot_be_written(monkeypatch, tmp_path, index, cache):
    use_fake_pip(monkeypatch, tmp_path, index)
    cache.write_text("a file")
    text = (
        rf"{cache}/sources: expected a folder for 0 MB, got .*; set JAX_MEGAMOE_CACHE to a folder"
    )
    with pytest.raises(MissingDependency, match=text):
        fetch_source("vllm")
    assert cache.read_text() == "a file"


def test_without_a_home_nothing_was_fetched(monkeypatch):
    def no_home():
        raise RuntimeError("no home")

    monkeypatch.delenv("JAX_MEGAMOE_CACHE")
    monkeypatch.setattr(Path, "home", no_home)
    assert fetched_source("vllm") is None


PROCESS = """
import sys
from pathlib import Path
import pytest
import wheels
from jax_megamoe.compile.fetch import fetch_source
wheels.pin(pytest.MonkeyPatch(), "vllm", Path(sys.argv[1]))
sys.executable = sys.argv[2]
print(fetch_source("vllm").already)
"""


def test_processes_download_once(monkeypatch, tmp_path, index):
    python = sys.executable
    calls = use_fake_pip(monkeypatch, tmp_path, index, before="sleep 1")
    (path,) = index.iterdir()
    folders = (Path(__file__).parent, Path(fetch.__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    processes = [
        subprocess.Popen(
            [python, "-c", PROCESS, path, sys.executable],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    printed = sorted(process.communicate(timeout=100)[0] for process in processes)
    assert printed == ["False\n", "True\n", "True\n"]
    assert calls.read_text() == "call\n"


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_pins_are_whole(name):
    pinned = DISTRIBUTIONS[name]
    assert set(pinned.wheels) == {"x86_64", "aarch64"}
    for machine, wheel in pinned.wheels.items():
        assert wheel.platform == "any" or wheel.platform.endswith(machine)
        assert re.fullmatch("[0-9a-f]{64}", wheel.sha256)
    assert f"python -m jax_megamoe sources fetch {name}" in pinned.install
