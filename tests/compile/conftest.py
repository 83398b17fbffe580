"""Fixtures that give a test a machine of its own: cache, kernel source, CUDA toolkit."""

import importlib
import sys

import pytest
from fake_toolchain import write_headers

from jax_megamoe.compile import builder, toolkit

VARIABLES = (
    "JAX_MEGAMOE_SGL_ROOT",
    "JAX_MEGAMOE_VLLM_ROOT",
    "JAX_MEGAMOE_FLASHINFER_ROOT",
    "JAX_MEGAMOE_COMPILER",
    "JAX_MEGAMOE_COMPILE",
    "XDG_CACHE_HOME",
    "CUDA_HOME",
    "CUDA_PATH",
)


@pytest.fixture
def forget(monkeypatch):
    """Call it to be as a new process: no kernel in memory, no compiler or cache opened."""

    def start_afresh():
        monkeypatch.setattr(builder, "_memo", {})
        builder._make_compiler.cache_clear()
        builder._open_cache.cache_clear()

    return start_afresh


@pytest.fixture
def clean(monkeypatch, tmp_path, forget):
    """None of our variables or CUDA's is set but the cache's, whose folder does not exist yet."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("JAX_MEGAMOE_CACHE", str(tmp_path / "cache"))
    forget()
    yield
    forget()


@pytest.fixture
def source(clean, monkeypatch, tmp_path):
    """The include folder of a fake checkout, version 9.9.9, that the name "sgl" finds."""
    include_dir = write_headers(tmp_path / "checkout" / "include")
    (tmp_path / "checkout" / "VERSION").write_text("9.9.9\n")
    monkeypatch.setenv("JAX_MEGAMOE_SGL_ROOT", str(tmp_path / "checkout"))
    return include_dir


@pytest.fixture
def machine(clean, monkeypatch, tmp_path):
    """A machine without CUDA: an empty sys.path and PATH, nothing in the usual place."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setattr(sys, "path", [str(site)])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(toolkit, "_DEFAULT_ROOT", tmp_path / "usr-local-cuda")
    importlib.invalidate_caches()
    return tmp_path
