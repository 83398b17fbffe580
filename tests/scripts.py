"""Modules from files that no package holds: examples and scripts."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def load_script(path: Path) -> ModuleType:
    """The module of a file, under the file's name, as a script next to it would import it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def load_gpu_script(monkeypatch: pytest.MonkeyPatch, out: Path, *names: str) -> ModuleType:
    """The last of these scripts of benchmarks/gpu, those that it imports made anew; $OUT is `out`.
    Skips the test without CUDA's bindings."""
    pytest.importorskip("cuda.bindings", reason="cuda-bindings: pip install '.[cuda13]'")
    monkeypatch.setenv("OUT", str(out))
    for folder in ("tests/gpu", "benchmarks/gpu"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    for name in ("checks", *names[:-1]):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return load_script(ROOT / f"benchmarks/gpu/{names[-1]}.py")
