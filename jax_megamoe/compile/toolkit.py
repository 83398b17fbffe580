"""CUDA's headers and nvcc: in NVIDIA's wheels, else under CUDA_HOME, else by the nvcc on PATH."""

import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jax_megamoe._checks import message
from jax_megamoe.compile.errors import CUDA_EXTRA, MissingDependency

MINIMUM_CUDA = (13, 0)
"""Oldest CUDA that is supported: `jax[cuda13]`'s. (The targets sm_100f and sm_103a exist from
12.9 on.)"""

# A header that each wheel brings, as evidence that it is there.
_HEADERS = {
    "cuda_bf16.h": "nvidia-cuda-runtime",
    "crt/host_defines.h": "nvidia-cuda-crt",
    "nv/target": "nvidia-cuda-cccl",
    "cuda/std/cstdint": "nvidia-cuda-cccl",
}
NVCC = Path("bin/nvcc")
_PROGRAMS = {NVCC: "nvidia-cuda-nvcc", Path("nvvm/bin/cicc"): "nvidia-nvvm"}
_DEFAULT_ROOT = Path("/usr/local/cuda")


@dataclass(frozen=True)
class Toolkit:
    """One CUDA toolkit with all headers that DeepGEMM includes.

    Attributes:
        root: its folder, for example ``site-packages/nvidia/cu13``.
        include_dirs: CUDA's headers and CCCL's, in search order.
        headers: versions of both, ``"CUDA 13000, CCCL 3000001"``: part of a cache key.
    """

    root: Path
    include_dirs: tuple[Path, ...]
    headers: str

    @property
    def nvcc(self) -> Path:
        """The compiler driver; it is there only if the toolkit was searched with `nvcc=True`."""
        return self.root / NVCC


def find_toolkit(*, nvcc: bool = False) -> Toolkit:
    """The first complete toolkit of at least `MINIMUM_CUDA`; with `nvcc`, one that has that too.

    Raises:
        MissingDependency: none; says what each candidate lacks, and the pip command.
    """
    faults: list[str] = []
    for root in _roots():
        include_dirs = tuple(
            folder
            for include in (root / "include", *sorted(root.glob("targets/*/include")))
            for folder in (include, include / "cccl")
            if folder.is_dir()
        )
        fault = _fault(include_dirs) or (_missing_programs(root) if nvcc else "")
        if not fault:
            return Toolkit(root, include_dirs, _header_versions(include_dirs))
        faults.append(f"{root} {fault}")
    parts = "headers and nvcc" if nvcc else "headers"
    expected = f"{parts} of CUDA {_dotted(MINIMUM_CUDA)} or newer"
    got = "; ".join(faults) or "no NVIDIA wheels, CUDA_HOME or nvcc on PATH"
    raise MissingDependency(message("CUDA toolkit", expected, got, CUDA_EXTRA))


def _roots() -> Iterator[Path]:
    """Folders that may hold a toolkit, best first, each once."""
    seen: set[Path] = set()
    for root in (*_wheel_roots(), *_system_roots()):
        if root.is_dir() and (resolved := root.resolve()) not in seen:
            seen.add(resolved)
            yield root


def _wheel_roots() -> list[Path]:
    """``nvidia/cu13`` and its successors; the wheels share the namespace package `nvidia`."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec.submodule_search_locations if spec else None) or ()
    found = [path for folder in folders for path in Path(folder).glob("cu[0-9]*")]
    return sorted(found, key=lambda path: path.name, reverse=True)


def _system_roots() -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if value := os.environ.get(variable):
            yield Path(value)
    if nvcc := shutil.which("nvcc"):
        yield Path(nvcc).resolve().parent.parent
    yield _DEFAULT_ROOT


def _fault(include_dirs: tuple[Path, ...]) -> str:
    """What is wrong with a toolkit's headers; empty if nothing."""
    missing = {wheel: h for h, wheel in _HEADERS.items() if not _locate(include_dirs, h)}
    if missing:
        return " and ".join(f"lacks {h} ({wheel})" for wheel, h in missing.items())
    number = _macro(include_dirs, "cuda.h", "CUDA_VERSION")
    version = (number // 1000, number % 1000 // 10)
    return f"is CUDA {_dotted(version)}" if version < MINIMUM_CUDA else ""


def _missing_programs(root: Path) -> str:
    missing = {program: w for program, w in _PROGRAMS.items() if not (root / program).is_file()}
    return " and ".join(f"lacks {program} ({wheel})" for program, wheel in missing.items())


def _header_versions(include_dirs: tuple[Path, ...]) -> str:
    cuda = _macro(include_dirs, "cuda.h", "CUDA_VERSION")
    cccl = _macro(include_dirs, "cuda/std/__cccl/version.h", "CCCL_VERSION")
    return f"CUDA {cuda}, CCCL {cccl}"


def _locate(include_dirs: tuple[Path, ...], header: str) -> Path | None:
    return next((d / header for d in include_dirs if (d / header).is_file()), None)


def _macro(include_dirs: tuple[Path, ...], header: str, name: str) -> int:
    """The integer that a header defines `name` as; 0 where it does not."""
    path = _locate(include_dirs, header)
    found = re.search(rf"#\s*define\s+{name}\s+(\d+)", path.read_text()) if path else None
    return int(found[1]) if found else 0


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
