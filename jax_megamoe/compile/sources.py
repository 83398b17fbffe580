"""Kernel sources: headers of others' kernels, installed or fetched, found without importing the
packages that ship them, and this package's own kernels.

Importing `deep_gemm`, `vllm` or `flashinfer` would load torch; `importlib` finds their folders and
the distribution's metadata gives the version.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from jax_megamoe._checks import message, one_of
from jax_megamoe.compile.errors import MissingDependency
from jax_megamoe.compile.fetch import fetched_source
from jax_megamoe.compile.pins import DISTRIBUTIONS, Distribution

BUILT_IN = "jax_megamoe"
"""The source that is part of this package."""

TENSOR_MAP_HEADER = "cute/arch/copy_sm90_desc.hpp"
"""CUTE's header that declares a tensor map."""

_CUTLASS_VERSION = "cutlass/version.h"
_CUTLASS_HEADERS = (TENSOR_MAP_HEADER, _CUTLASS_VERSION)


@dataclass(frozen=True)
class KernelSource:
    """A folder of headers as found on this machine.

    Attributes:
        name: a key of `DISTRIBUTIONS`, or ``"jax_megamoe"``.
        version: the distribution's, or a checkout's VERSION file, or ``"checkout"``.
        include_dir: folder that holds the kernels' folder and, unless another source's is used,
            ``cute/`` and ``cutlass/``; of this package's kernels, the headers themselves.
        fingerprint: SHA-256 over the kernels' headers and CUTLASS's version header, or over this
            package's, hexadecimal.
        cutlass_dir: folder that holds ``cute/`` and ``cutlass/``, where include_dir does not.
    """

    name: str
    version: str
    include_dir: Path
    fingerprint: str
    cutlass_dir: Path | None = None

    @property
    def namespace(self) -> str:
        """C++ namespace of its kernels."""
        return BUILT_IN if self.name == BUILT_IN else DISTRIBUTIONS[self.name].namespace

    @property
    def include_dirs(self) -> tuple[Path, ...]:
        """Folders of headers, in search order."""
        return (self.include_dir, *((self.cutlass_dir,) if self.cutlass_dir else ()))


SOURCE_NAMES = (*DISTRIBUTIONS, BUILT_IN)
"""The names that `KernelSpec.source` may have."""


def find_source(name: str) -> KernelSource:
    """The kernel source `name`: its environment variable's, else as installed, else as fetched.

    ``JAX_MEGAMOE_SGL_ROOT``, ``JAX_MEGAMOE_VLLM_ROOT`` and ``JAX_MEGAMOE_FLASHINFER_ROOT`` may name
    an unpacked wheel, the package's own folder or a checkout. Headers are read once a process and
    folder, for the fingerprint.

    Raises:
        ValueError: an unknown name.
        MissingDependency: none of them, or a folder without the headers, or a fetched tree that is
            not whole, or no CUTLASS for it; names the command that brings it.
    """
    one_of("source", name, SOURCE_NAMES)
    if name == BUILT_IN:
        folder = Path(__file__).parents[1] / "launch" / "kernels"
        return KernelSource(name, _version("jax-megamoe") or "checkout", folder, _digest(folder))
    where = DISTRIBUTIONS[name]
    root = os.environ.get(where.variable)
    version, include_dir = _unpacked(where, Path(root)) if root else _found(name, where)
    if where.cutlass == "":
        _check_headers(where, include_dir, where.kernels + "/impls", *_CUTLASS_HEADERS)
        digest = _digest(include_dir, where.kernels, _CUTLASS_VERSION)
        return KernelSource(name, version, include_dir, digest)
    _check_headers(where, include_dir, where.kernels)
    if where.cutlass is None:
        return KernelSource(name, version, include_dir, _digest(include_dir, where.kernels))
    cutlass = find_source(where.cutlass).include_dir
    digest = _digest(include_dir, where.kernels) + _digest(cutlass, _CUTLASS_VERSION)
    return KernelSource(name, version, include_dir, digest, cutlass)


def has_source(name: str) -> bool:
    """Whether `find_source` finds it.

    Raises:
        ValueError: an unknown name.
    """
    try:
        find_source(name)
    except MissingDependency:
        return False
    return True


def _found(name: str, where: Distribution) -> tuple[str, Path]:
    """Version and include folder: the installed distribution's if it has headers, else fetched."""
    spec = importlib.util.find_spec(where.module)
    folder = next(iter((spec.submodule_search_locations if spec else None) or ()), None)
    version = _version(where.name)
    installed = (version, Path(folder) / where.folder) if version and folder else None
    if where.exact and version != where.version:
        folder = installed = None
    if installed is None or not (installed[1] / where.kernels).is_dir():
        if tree := fetched_source(name):
            return tree.version, tree.folder / where.headers
    if installed is None:
        got = f"a module {where.module} of another distribution" if folder else "none installed"
        expected = f"the distribution {where.name}"
        if where.exact:
            expected, got = f"{expected} {where.version}", version or got
        raise MissingDependency(message("kernel source", expected, got, where.install))
    return installed


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _unpacked(where: Distribution, root: Path) -> tuple[str, Path]:
    for include in (Path("include"), Path(where.folder), Path(where.headers)):
        if (root / include / where.kernels).is_dir():
            break
    else:
        expected = f"a folder with {where.headers} or include in it"
        raise MissingDependency(
            message(where.variable, expected, str(root), f"unset it and {where.install}")
        )
    for folder in (root / include.parent, root):
        if (folder / "VERSION").is_file():
            return (folder / "VERSION").read_text().strip(), root / include
    return "checkout", root / include


def _check_headers(where: Distribution, include_dir: Path, *headers: str) -> None:
    for header in headers:
        if not (include_dir / header).exists():
            hint = f"a checkout needs its CUTLASS submodule linked there; else {where.install}"
            raise MissingDependency(
                message("kernel source", f"{header} in {include_dir}", "no such file", hint)
            )


@functools.cache
def _digest(folder: Path, *parts: str) -> str:
    """SHA-256 over names and contents of the files in a folder, or in parts of it."""
    digest = hashlib.sha256()
    for part in map(folder.joinpath, parts or ("",)):
        found = sorted(path for path in part.rglob("*") if path.is_file()) or [part]
        for path in found:
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()
