"""sources.py: kernel sources are found by metadata, never imported."""

import importlib
import re
import shutil
import sys
from pathlib import Path

import pytest
from fake_toolchain import write_headers
from wheels import pin, write_wheel

import jax_megamoe
from jax_megamoe.compile import fetch, sources
from jax_megamoe.compile.errors import MissingDependency
from jax_megamoe.compile.pins import DISTRIBUTIONS
from jax_megamoe.compile.sources import find_source

pytestmark = pytest.mark.usefixtures("clean")

INSTALLED = {
    "sgl": ("sgl-deep-gemm", "deep_gemm", "include"),
    "vllm": ("vllm", "vllm", "third_party/deep_gemm/include"),
    "flashinfer": ("flashinfer-python", "flashinfer", "data/include"),
    "humming": ("humming-kernels", "humming", "include"),
}


@pytest.fixture
def site(monkeypatch, tmp_path):
    """An otherwise empty sys.path with one folder, in which `install` puts a distribution."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder)])
    for _, module, _ in INSTALLED.values():
        monkeypatch.delitem(sys.modules, module, raising=False)
    importlib.invalidate_caches()
    return folder


def install(site, name, version="1.2.3", *, metadata=True):
    distribution, module, include = INSTALLED[name]
    (site / module).mkdir()
    (site / module / "__init__.py").write_text("raise RuntimeError('imported')\n")
    if metadata:
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
    return write_headers(site / module / include, name)


@pytest.mark.parametrize("name", ["sgl", "vllm"])
def test_installed_source_is_found_without_import(site, name):
    include_dir = install(site, name)
    found = find_source(name)
    assert (found.name, found.version, found.include_dir) == (name, "1.2.3", include_dir)
    assert INSTALLED[name][1] not in sys.modules


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("sgl", r"pip install 'jax-megamoe\[cuda13\]', or python -m jax_megamoe sources fetch sgl"),
        (
            "vllm",
            "python -m jax_megamoe sources fetch vllm, or pip install --no-deps vllm==0.33.0",
        ),
    ],
)
def test_missing_source_names_the_commands(site, name, command):
    distribution = INSTALLED[name][0]
    text = f"expected the distribution {distribution}, got none installed; {command}"
    with pytest.raises(MissingDependency, match=text):
        find_source(name)


def fetched(monkeypatch, tmp_path, name):
    """Puts a tree into the cache as fetching would; returns its include folder."""
    path = write_wheel(tmp_path / "index", DISTRIBUTIONS[name])
    pin(monkeypatch, name, path)
    (tmp_path / "cache/sources").mkdir(parents=True)
    fetch._place(fetch._unpack(DISTRIBUTIONS[name], path), fetch._tree(name))
    return fetch._tree(name) / DISTRIBUTIONS[name].headers


@pytest.mark.parametrize("name", ["sgl", "vllm"])
def test_fetched_source_is_found_where_none_is_installed(site, monkeypatch, tmp_path, name):
    include_dir = fetched(monkeypatch, tmp_path, name)
    found = find_source(name)
    assert (found.version, found.include_dir) == (DISTRIBUTIONS[name].version, include_dir)


def test_installed_source_wins_over_a_fetched_one(site, monkeypatch, tmp_path):
    fetched(monkeypatch, tmp_path, "vllm")
    include_dir = install(site, "vllm")
    found = find_source("vllm")
    assert (found.version, found.include_dir) == ("1.2.3", include_dir)


def test_fetched_source_wins_over_an_installation_without_headers(site, monkeypatch, tmp_path):
    shutil.rmtree(install(site, "vllm"))
    with pytest.raises(MissingDependency, match=r"expected deep_gemm/impls in .*no such file"):
        find_source("vllm")
    include_dir = fetched(monkeypatch, tmp_path, "vllm")
    assert find_source("vllm").include_dir == include_dir


def test_fetched_source_wins_over_a_module_of_another_distribution(site, monkeypatch, tmp_path):
    install(site, "vllm", metadata=False)
    include_dir = fetched(monkeypatch, tmp_path, "vllm")
    assert find_source("vllm").include_dir == include_dir


def test_this_package_is_a_source_without_an_installation(site):
    found = find_source("jax_megamoe")
    assert (found.name, found.version, found.namespace) == (
        "jax_megamoe",
        "checkout",
        "jax_megamoe",
    )
    assert found.include_dir == Path(jax_megamoe.__file__).parent / "launch" / "kernels"
    assert (found.include_dir / "staging.cuh").is_file()


def test_module_of_another_distribution_is_refused(site):
    install(site, "sgl", metadata=False)
    with pytest.raises(MissingDependency, match="got a module deep_gemm of another distribution"):
        find_source("sgl")


def test_unknown_name():
    known = (
        r"expected one of \['sgl', 'vllm', 'flashinfer', 'humming', 'jax_megamoe'\], got 'other'"
    )
    with pytest.raises(ValueError, match=known):
        find_source("other")


@pytest.mark.parametrize("root", ["", "deep_gemm", "third_party/deep_gemm"])
def test_variable_names_a_wheel_a_package_or_a_checkout(monkeypatch, tmp_path, root):
    name = "vllm" if "third_party" in root else "sgl"
    include_dir = write_headers(tmp_path / root / "include")
    monkeypatch.setenv(f"JAX_MEGAMOE_{name.upper()}_ROOT", str(tmp_path))
    found = find_source(name)
    assert (found.version, found.include_dir) == ("checkout", include_dir)
    (include_dir.parent / "VERSION").write_text("0.2.5")
    assert find_source(name).version == "0.2.5"


def test_variable_wins_over_an_installed_source(site, monkeypatch, tmp_path):
    install(site, "sgl")
    include_dir = write_headers(tmp_path / "checkout" / "include")
    monkeypatch.setenv("JAX_MEGAMOE_SGL_ROOT", str(tmp_path / "checkout"))
    assert find_source("sgl").include_dir == include_dir


def test_variable_that_names_no_source(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_MEGAMOE_SGL_ROOT", str(tmp_path))
    text = f"JAX_MEGAMOE_SGL_ROOT: expected a folder with deep_gemm/include.*got {tmp_path}; unset"
    with pytest.raises(MissingDependency, match=text):
        find_source("sgl")


def test_checkout_without_cutlass(monkeypatch, tmp_path):
    include_dir = write_headers(tmp_path / "include")
    (include_dir / "cute/arch/copy_sm90_desc.hpp").unlink()
    monkeypatch.setenv("JAX_MEGAMOE_SGL_ROOT", str(tmp_path))
    with pytest.raises(
        MissingDependency, match=r"cute/arch/copy_sm90_desc\.hpp in .*CUTLASS submodule"
    ):
        find_source("sgl")


def test_fingerprint_follows_content_and_names(monkeypatch, tmp_path):
    def fingerprint(label, edit=lambda include_dir: None):
        include_dir = write_headers(tmp_path / label / "include")
        edit(include_dir)
        monkeypatch.setenv("JAX_MEGAMOE_SGL_ROOT", str(tmp_path / label))
        return find_source("sgl").fingerprint

    def rename(include_dir):
        kernel = include_dir / "deep_gemm/impls/kernel.cuh"
        kernel.rename(kernel.with_name("other.cuh"))

    def reverse(name):
        def edit(include_dir):
            header = include_dir / name
            header.write_text(header.read_text()[::-1])

        return edit

    first = fingerprint("a")
    assert fingerprint("b") == first
    changed = {
        fingerprint("c", reverse("deep_gemm/impls/kernel.cuh")),
        fingerprint("d", reverse("cutlass/version.h")),
        fingerprint("e", rename),
    }
    assert len(changed | {first}) == 4
    assert fingerprint("f", reverse("cute/arch/copy_sm90_desc.hpp")) == first


class TestFlashInfer:
    """Its own kernels, sgl's CUTLASS, the pinned version alone."""

    def test_installed(self, site):
        cutlass, headers = install(site, "sgl"), install(site, "flashinfer", "0.7.4")
        found = find_source("flashinfer")
        assert (found.version, found.include_dir) == ("0.7.4", headers)
        assert found.include_dirs == (headers, cutlass)
        assert found.namespace == "flashinfer::megamoe"
        assert "flashinfer" not in sys.modules

    def test_fetched(self, site, monkeypatch, tmp_path):
        install(site, "sgl")
        headers = fetched(monkeypatch, tmp_path, "flashinfer")
        assert find_source("flashinfer").include_dir == headers

    @pytest.mark.parametrize("installed", [None, "0.7.5"])
    def test_another_version_is_not_used(self, site, monkeypatch, tmp_path, installed):
        install(site, "sgl")
        if installed:
            install(site, "flashinfer", installed)
        text = (
            "kernel source: expected the distribution flashinfer-python 0.7.4, got "
            f"{installed or 'none installed'}; python -m jax_megamoe sources fetch flashinfer, or "
            "pip install --no-deps flashinfer-python==0.7.4"
        )
        with pytest.raises(MissingDependency, match=re.escape(text)):
            find_source("flashinfer")
        headers = fetched(monkeypatch, tmp_path, "flashinfer")
        assert find_source("flashinfer").include_dir == headers

    def test_needs_cutlass(self, site):
        install(site, "flashinfer", "0.7.4")
        with pytest.raises(MissingDependency, match="expected the distribution sgl-deep-gemm"):
            find_source("flashinfer")

    def test_fingerprint_follows_both(self, monkeypatch, tmp_path):
        cutlass = write_headers(tmp_path / "sgl/include")
        headers = write_headers(tmp_path / "flashinfer/include", "flashinfer")
        monkeypatch.setenv("JAX_MEGAMOE_SGL_ROOT", str(tmp_path / "sgl"))
        monkeypatch.setenv("JAX_MEGAMOE_FLASHINFER_ROOT", str(tmp_path / "flashinfer"))
        prints = [find_source("flashinfer").fingerprint]
        for path in (headers / "flashinfer/megamoe/kernel.cuh", cutlass / "cutlass/version.h"):
            path.write_text("changed")
            sources._digest.cache_clear()
            prints.append(find_source("flashinfer").fingerprint)
        assert len(set(prints)) == 3


class TestHumming:
    """Headers that need no CUTLASS and have no namespace, in the pinned version alone."""

    def test_installed(self, site):
        headers = install(site, "humming", "0.1.20")
        found = find_source("humming")
        assert (found.version, found.include_dirs) == ("0.1.20", (headers,))
        assert found.namespace == ""
        assert "humming" not in sys.modules

    def test_fetched_wins_over_another_version(self, site, monkeypatch, tmp_path):
        install(site, "humming", "0.1.21")
        text = "expected the distribution humming-kernels 0.1.20, got 0.1.21; python -m jax_megamoe"
        with pytest.raises(MissingDependency, match=re.escape(text)):
            find_source("humming")
        headers = fetched(monkeypatch, tmp_path, "humming")
        assert find_source("humming").include_dir == headers

    def test_variable_names_an_unpacked_wheel(self, monkeypatch, tmp_path):
        headers = write_headers(tmp_path / "humming/include", "humming")
        monkeypatch.setenv("JAX_MEGAMOE_HUMMING_ROOT", str(tmp_path))
        assert find_source("humming").include_dir == headers

    def test_fingerprint_follows_every_header(self, monkeypatch, tmp_path):
        headers = write_headers(tmp_path / "humming/include", "humming")
        monkeypatch.setenv("JAX_MEGAMOE_HUMMING_ROOT", str(tmp_path))
        before = find_source("humming").fingerprint
        (headers / "humming/scheduler.cuh").write_text("changed")
        sources._digest.cache_clear()
        assert find_source("humming").fingerprint != before
