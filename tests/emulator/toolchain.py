"""PTX of the kernels that a plan launches, by the product's own compilers, cached like cubins."""

import functools
import tempfile
from pathlib import Path
from typing import Any

from filelock import FileLock

from emulator.build import folder
from jax_megamoe.compile import MissingDependency, find_source
from jax_megamoe.compile.cache import digest
from jax_megamoe.compile.codegen import generate
from jax_megamoe.compile.compiler import Nvcc, Nvrtc
from jax_megamoe.plan.kernel import CodeOptions, KernelSpec


def _to_ptx(flags: tuple[str, ...]) -> tuple[str, ...]:
    """Flags of a cubin made those of PTX: a virtual architecture, nothing for the assembler."""
    kept = [flag for flag in flags if not flag.startswith("--ptxas-options")]
    virtual = ("--gpu-architecture=sm_", "--gpu-architecture=compute_")
    return tuple(flag.replace(*virtual).replace("--cubin", "--ptx") for flag in kept)


class PtxNvcc(Nvcc):
    """nvcc up to PTX; `compile` returns it in place of the cubin."""

    def flags(self, arch: str, options: CodeOptions = CodeOptions()) -> tuple[str, ...]:
        return _to_ptx(super().flags(arch, options))


class PtxNvrtc(Nvrtc):
    """NVRTC up to PTX; `compile` returns it in place of the cubin."""

    def flags(self, arch: str, options: CodeOptions = CodeOptions()) -> tuple[str, ...]:
        return _to_ptx(super().flags(arch, options))

    def _read(self, program: Any, what: str) -> bytes:
        return super()._read(program, "PTX" if what == "CUBIN" else what)


@functools.cache
def compiler() -> PtxNvcc | PtxNvrtc:
    """nvcc, else NVRTC.

    Raises:
        MissingDependency: neither is installed; names the pip command.
    """
    try:
        return PtxNvcc()
    except MissingDependency:
        return PtxNvrtc()


@functools.cache
def ptx_of(spec: KernelSpec) -> str:
    """PTX of one kernel.

    Raises:
        MissingDependency: its source or a compiler is not installed.
        CompilationFailed: the compiler refused it, with its log.
    """
    source, made_by = find_source(spec.source), compiler()
    text = generate(spec, source)
    flags = made_by.flags(spec.arch, spec.options)
    key = digest(text, source.version, source.fingerprint, made_by.version, *flags)
    path = folder() / f"{key}.ptx"
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            compiled = made_by.compile(text, spec.arch, source.include_dirs, spec.options)
            _write(path, compiled.cubin.rstrip(b"\0"))
    return path.read_text()


def _write(path: Path, content: bytes) -> None:
    """A file that appears whole."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    Path(file.name).replace(path)
