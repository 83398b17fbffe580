"""Small wheels of the kernel sources, and a folder of them that pip takes for its index."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from fake_toolchain import HEADERS_OF

from jax_megamoe.compile import fetch
from jax_megamoe.compile.pins import DISTRIBUTIONS, Distribution, Wheel


def pinned_name(pinned: Distribution) -> str:
    """The kernel source that a distribution brings."""
    return next(name for name, each in DISTRIBUTIONS.items() if each.name == pinned.name)


def kept(pinned: Distribution) -> set[str]:
    """The files of `write_wheel` that fetching keeps."""
    info = f"{pinned.name.replace('-', '_')}-{pinned.version}.dist-info"
    return {
        *(f"{pinned.headers}/{name}" for name in HEADERS_OF[pinned_name(pinned)]),
        f"{info}/METADATA",
        f"{info}/licenses/LICENSE",
    }


def write_wheel(folder: Path, pinned: Distribution, platform: str = "manylinux_2_28_x86_64"):
    """A wheel in `folder` with headers, a licence, code and a large module; returns its path."""
    stem = f"{pinned.name.replace('-', '_')}-{pinned.version}"
    metadata = f"Metadata-Version: 2.1\nName: {pinned.name}\nVersion: {pinned.version}\n"
    path = folder / f"{stem}-py3-none-{platform}.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name in sorted(kept(pinned)):
            archive.writestr(name, metadata if name.endswith("METADATA") else f"// {name}\n")
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        archive.writestr(f"{pinned.module}/__init__.py", "raise RuntimeError('imported')\n")
        archive.writestr(f"{pinned.module}/_C.so", bytes(1 << 16))
        if pinned.kept:
            archive.writestr(f"{pinned.headers}/other/unused.cuh", "// another kernel\n")
        archive.writestr(f"{pinned.module}/third_party/other/LICENSE", "another's\n")
    return path


def pin(monkeypatch: pytest.MonkeyPatch, name: str, path: Path) -> Wheel:
    """Pins the wheel at `path` as the one of a source, on every machine."""
    content = path.read_bytes()
    platform = path.stem.split("-")[-1]
    wheel = Wheel(platform, len(content), hashlib.sha256(content).hexdigest())
    pinned = replace(DISTRIBUTIONS[name], wheels={"x86_64": wheel})
    monkeypatch.setattr(fetch, "DISTRIBUTIONS", MappingProxyType({**DISTRIBUTIONS, name: pinned}))
    return wheel


def use_as_index(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Has pip look for wheels in `folder` and nowhere else."""
    for variable, value in {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder),
    }.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
