"""NVRTC and NVCC behind one protocol, C++ text in, cubin out; NVIDIA's wheels are enough."""

import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jax_megamoe._checks import described, message
from jax_megamoe.compile.errors import CUDA_EXTRA, MissingDependency
from jax_megamoe.compile.sources import TENSOR_MAP_HEADER
from jax_megamoe.compile.toolkit import MINIMUM_CUDA, Toolkit, find_toolkit
from jax_megamoe.plan.kernel import CodeOptions

_ANSWER_SECONDS = 60.0  # for nvcc to say its version, on a slow network file system too

# The flags of DeepGEMM's own host code (`nvcc_flags` in tests/golden/launches_*.jsonl.gz), without
# those that only concern host code.
_FLAGS = ("-std=c++20", "--ptxas-options=-v")
_QUIET = "39,161,174,177,186,940"


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of a kernel: registers a thread, bytes of stack frame and spills."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


@dataclass(frozen=True)
class Compiled:
    """A cubin, what the compiler said, what ptxas counted, and the seconds it took."""

    cubin: bytes
    log: str
    resources: Resources
    seconds: float


class CompilationFailed(Exception):
    """A compiler refused a text; its log is the argument."""


class Compiler(Protocol):
    """Turns C++ text into a cubin.

    Attributes:
        name: ``"nvrtc"`` or ``"nvcc"``.
        version: of the compiler and of CUDA's headers, for cache keys and messages.
    """

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def flags(self, arch: str, options: CodeOptions = CodeOptions()) -> tuple[str, ...]:
        """The flags that decide the code, without folders: part of a cache key."""
        ...

    def compile(
        self,
        text: str,
        arch: str,
        include_dirs: Sequence[Path],
        options: CodeOptions = CodeOptions(),
    ) -> Compiled:
        """Compiles `text` for `arch` (such as ``"sm_100f"``); `include_dirs` precede CUDA's.

        Safe to call from several threads.

        Raises:
            CompilationFailed: with the compiler's log.
        """
        ...


def ptxas_resources(log: str) -> Resources:
    """The counts in ``ptxas -v`` output, the largest over its functions; 0 for none."""
    frame = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    frames = [tuple(map(int, found)) for found in re.findall(frame, log)]
    stack, stores, loads = map(max, zip((0, 0, 0), *frames, strict=True))
    return Resources(max(registers, default=0), stack, stores, loads)


class Nvrtc:
    """NVRTC through cuda-bindings: no host compiler, no temporary files.

    NVRTC has no C++ standard library, and in it CUTLASS declares a tensor map aligned to 64 bytes
    where cuda.h says 128, which would move kernel parameters; virtual headers supply both.

    Raises:
        MissingDependency: on construction, without cuda-bindings, NVRTC or CUDA's headers.
    """

    name = "nvrtc"

    def __init__(self) -> None:
        try:
            self._nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
            major, minor = self._call("nvrtcVersion")
        except (ImportError, RuntimeError) as error:
            # cuda-bindings' loader raises a RuntimeError where libnvrtc is not found, with a line
            # for each place that it looked in.
            expected = "cuda-bindings and nvidia-cuda-nvrtc"
            raise MissingDependency(
                message("nvrtc", expected, str(error).split(":", maxsplit=1)[0], CUDA_EXTRA)
            ) from error
        if (major, minor) < MINIMUM_CUDA:
            expected = "NVRTC {}.{} or newer".format(*MINIMUM_CUDA)
            raise MissingDependency(message("nvrtc", expected, f"{major}.{minor}", CUDA_EXTRA))
        self._toolkit = find_toolkit()
        self.version = f"{major}.{minor}{_patch('nvidia-cuda-nvrtc')}, {self._toolkit.headers}"

    def flags(self, arch: str, options: CodeOptions = CodeOptions()) -> tuple[str, ...]:
        return (
            f"--gpu-architecture={arch}",
            *_FLAGS,
            *_option_flags(options),
            "-default-device",
            "--device-int128",
            f"--diag-suppress={_QUIET},1105",
        )

    def compile(
        self,
        text: str,
        arch: str,
        include_dirs: Sequence[Path],
        options: CodeOptions = CodeOptions(),
    ) -> Compiled:
        start = time.perf_counter()
        headers = {**_STANDARD_HEADERS, **_aligned_tensor_map(include_dirs)}
        folders = (*include_dirs, *self._toolkit.include_dirs)
        flags = [*self.flags(arch, options), *(f"-I{folder}" for folder in folders)]
        program = self._call(
            "nvrtcCreateProgram",
            (_PRELUDE + text).encode(),
            b"kernel.cu",
            len(headers),
            [content.encode() for content in headers.values()],
            [name.encode() for name in headers],
        )
        try:
            encoded = [os.fsencode(option) for option in flags]  # a folder's name is any bytes
            (status,) = self._nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status != self._nvrtc.nvrtcResult.NVRTC_SUCCESS:
                raise CompilationFailed(log.strip() or str(status))
            cubin = self._read(program, "CUBIN")
        finally:
            self._call("nvrtcDestroyProgram", program)
        return Compiled(cubin, log, ptxas_resources(log), time.perf_counter() - start)

    def _read(self, program: Any, what: str) -> bytes:
        content = bytes(self._call(f"nvrtcGet{what}Size", program))
        self._call(f"nvrtcGet{what}", program, content)
        return content

    def _call(self, function: str, *arguments: Any) -> Any:
        """The results of an NVRTC call: none, one or a tuple."""
        status, *results = getattr(self._nvrtc, function)(*arguments)
        if status != self._nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompilationFailed(f"{function}: {status}")
        return results[0] if len(results) == 1 else tuple(results)


class Nvcc:
    """The nvcc of a toolkit, as a subprocess; it needs a host compiler (g++) on PATH.

    Raises:
        MissingDependency: on construction, without a complete toolkit or g++, or where nvcc does
            not run.
    """

    name = "nvcc"

    def __init__(self) -> None:
        self._toolkit: Toolkit = find_toolkit(nvcc=True)
        if not shutil.which("g++"):
            raise MissingDependency(
                message("nvcc", "a host compiler g++ on PATH", "none", "install g++ or use nvrtc")
            )
        try:
            printed = _run([self._toolkit.nvcc, "--version"], timeout=_ANSWER_SECONDS)
        except (CompilationFailed, OSError, subprocess.SubprocessError) as error:
            program = str(self._toolkit.nvcc)
            expected = f"{program} --version to answer"
            raise MissingDependency(message("nvcc", expected, described(error))) from error
        release = re.search(r"V(\d+\.\d+\.\d+)", printed)
        self.version = f"{release[1] if release else printed}, {self._toolkit.headers}"

    def flags(self, arch: str, options: CodeOptions = CodeOptions()) -> tuple[str, ...]:
        return (
            "--cubin",
            f"--gpu-architecture={arch}",
            "-O3",
            *_FLAGS,
            *_option_flags(options),
            "--expt-relaxed-constexpr",
            "--expt-extended-lambda",
            f"--diag-suppress={_QUIET}",
        )

    def compile(
        self,
        text: str,
        arch: str,
        include_dirs: Sequence[Path],
        options: CodeOptions = CodeOptions(),
    ) -> Compiled:
        start = time.perf_counter()
        folders = (*include_dirs, *self._toolkit.include_dirs)
        includes = [f"-I{folder}" for folder in folders]
        with tempfile.TemporaryDirectory(prefix="jax_megamoe_") as folder:
            unit, output = Path(folder, "kernel.cu"), Path(folder, "kernel.cubin")
            unit.write_text(text)
            command = [unit, "-o", output, *self.flags(arch, options), *includes]
            log = _run([self._toolkit.nvcc, *command])
            cubin = output.read_bytes()
        return Compiled(cubin, log, ptxas_resources(log), time.perf_counter() - start)


def _run(command: Sequence[str | Path], *, timeout: float | None = None) -> str:
    """What a program prints, which need not be UTF-8: it quotes paths.

    Raises:
        CompilationFailed: it failed, with what it printed.
        OSError, subprocess.TimeoutExpired: it cannot be run, or takes longer than `timeout` (s).
    """
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="backslashreplace",
        timeout=timeout,
        check=False,
    )
    log = done.stdout + done.stderr
    if done.returncode:
        raise CompilationFailed(log.strip() or f"nvcc exited with {done.returncode}")
    return log


COMPILERS = {"nvrtc": Nvrtc, "nvcc": Nvcc}
"""The compilers by name, in the order of preference."""


def _patch(distribution: str) -> str:
    """A distribution's version in parentheses, which is finer than what NVRTC says of itself."""
    try:
        return f" ({importlib.metadata.version(distribution)})"
    except importlib.metadata.PackageNotFoundError:
        return ""


def _standard_header(name: str) -> str:
    lines = ["#pragma once", f"#include <cuda/std/{name}>", "namespace std {"]
    lines += ["using namespace cuda::std;", "}"]
    if name == "cstddef":
        # libcu++'s is no constant expression; this intrinsic is one (NVRTC 13.0 and 13.5).
        lines += ["#undef offsetof", "#define offsetof(t, m) ((size_t)__INTADDR__(&((t*)0)->m))"]
    return "\n".join((*lines, ""))


_STANDARD_HEADERS = {
    name: _standard_header(name)
    for name in ("cmath", "cstddef", "cstdint", "type_traits", "utility")
}

# What nvcc includes by itself: offsetof, and the device runtime's grid dependency calls.
_PRELUDE = "#include <cstddef>\n#include <cuda_device_runtime_api.h>\n"

_TENSOR_MAP = "struct alignas(128) { char bytes[128]; }"


def _option_flags(options: CodeOptions) -> tuple[str, ...]:
    level = f"--ptxas-options=--register-usage-level={options.register_level}"
    return (level, "--use_fast_math") if options.fast_math else (level,)


def _aligned_tensor_map(include_dirs: Sequence[Path]) -> dict[str, str]:
    """CUTE's descriptor header, if there is one, its stand-in for CUtensorMap aligned as in
    cuda.h."""
    headers = (folder / TENSOR_MAP_HEADER for folder in include_dirs)
    header = next((header for header in headers if header.is_file()), None)
    if header is None:
        return {}
    text = header.read_text()
    return {TENSOR_MAP_HEADER: text.replace("struct alignas(64) { char bytes[128]; }", _TENSOR_MAP)}
