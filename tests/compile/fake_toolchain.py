"""Stand-ins for what compiling needs: source trees, toolkits, a compiler, and small cubins."""

import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from jax_megamoe.compile.compiler import CompilationFailed, Compiled, Resources
from jax_megamoe.plan.kernel import CodeOptions, KernelSpec

SPEC = KernelSpec(
    source="sgl",
    arch="sm_90a",
    header="deep_gemm/impls/kernel.cuh",
    symbol="kernel",
    template_args=("64", "true"),
    parameter_types=("void*", "uint32_t"),
)


_CUTLASS = ("cute/arch/copy_sm90_desc.hpp", "cutlass/version.h")
HEADERS_OF = {
    "sgl": ("deep_gemm/impls/kernel.cuh", *_CUTLASS),
    "vllm": ("deep_gemm/impls/kernel.cuh", *_CUTLASS),
    "flashinfer": ("flashinfer/megamoe/kernel.cuh",),
    "humming": ("humming/scheduler.cuh", "humming/kernel/humming.cuh"),
}
"""Files of an include folder, by kernel source."""

HEADERS = {
    "cuda.h": "#define CUDA_VERSION 13000\n",
    "cuda_bf16.h": "",
    "crt/host_defines.h": "",
    "cccl/nv/target": "",
    "cccl/cuda/std/cstdint": "",
    "cccl/cuda/std/__cccl/version.h": "#define CCCL_VERSION 3000001\n",
}


def write_headers(include_dir: Path, source: str = "sgl") -> Path:
    """The least that counts as the include folder of a kernel source."""
    for name in HEADERS_OF[source]:
        path = include_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"// {name}\n")
    return include_dir


def write_toolkit(
    root: Path, version: int = 13000, without: tuple[str, ...] = (), nvcc: bool = False
):
    """A toolkit's folder with CUDA's headers and, if asked for, an nvcc; returns `root`."""
    for name, text in HEADERS.items():
        if name not in without:
            path = root / "include" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("13000", str(version)))
    for program in ("bin/nvcc", "nvvm/bin/cicc") if nvcc else ():
        (root / program).parent.mkdir(parents=True, exist_ok=True)
        (root / program).write_text("#!/bin/sh\n")
        (root / program).chmod(0o755)
    return root


def cubin(kernels: dict[str, list[tuple[int, int]]], *, base: int = 0x210) -> bytes:
    """An ELF file with, for each kernel, parameters at (offset, size) as ptxas describes them."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in kernels)
    symbols, info = bytes(24), b""
    contents: list[tuple[str, bytes]] = [("", b"")]
    for index, (name, parameters) in enumerate(kernels.items(), start=1):
        symbols += struct.pack("<IBBHQQ", names.index(name.encode()), 0x12, 0x10, 5, 0, 0)
        info += struct.pack("<BBHII", 4, 0x2F, 8, index, 100 + index)
        attributes = struct.pack("<BBH", 3, 0x1B, 255)
        for ordinal, (offset, size) in reversed(list(enumerate(parameters))):
            packed = size << 18 | 0x1F000
            attributes += struct.pack("<BBHIHHI", 4, 0x17, 12, 0, ordinal, offset, packed)
        end = max(offset + size for offset, size in parameters)
        attributes += struct.pack("<BBHIHH", 4, 0x0A, 8, 99, base, end)
        contents.append((f".nv.info.{name}", attributes))
    contents += [(".nv.info", info), (".symtab", symbols), (".strtab", names)]
    return _elf([*contents, (".shstrtab", b"")])


def _elf(contents: list[tuple[str, bytes]]) -> bytes:
    """Sections by name, the last of them to be filled with the names."""
    names = b"".join(name.encode() + b"\0" for name, _ in contents)
    contents = [*contents[:-1], (contents[-1][0], names)]
    body, headers, at, name_at = b"", b"", 64, 0
    for name, content in contents:
        headers += struct.pack("<IIQQQQIIQQ", name_at, 1, 0, 0, at, len(content), 0, 0, 1, 0)
        name_at += len(name) + 1
        at += len(content)
        body += content
    ident = b"\x7fELF\x02\x01\x01A\x08".ljust(16, b"\0")
    count = len(contents)
    header = struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, at, 0, 64, 0, 0, 64, count, count - 1)
    return ident + header + body + headers


class FakeCompiler:
    """Answers with a cubin that fits SPEC, and counts its calls in a file that processes share."""

    def __init__(
        self,
        calls: Path,
        *,
        name: str = "nvrtc",
        version: str = "13.0",
        flags: tuple[str, ...] = ("-O3",),
        output: bytes | None = None,
        seconds: float = 0.0,
        refuses: str = "",
    ) -> None:
        self.name = name
        self.version = version
        self._flags = flags
        self._calls = calls
        self._output = cubin({"kernel": [(0, 8), (8, 4)]}) if output is None else output
        self._seconds = seconds
        self._refuses = refuses
        self._lock = threading.Lock()

    @property
    def num_calls(self) -> int:
        return len(self._calls.read_text().splitlines()) if self._calls.exists() else 0

    def flags(self, arch: str, options: CodeOptions = CodeOptions()) -> tuple[str, ...]:
        return (f"-arch={arch}", f"{options}", *self._flags)

    def compile(
        self,
        text: str,
        arch: str,
        include_dirs: Sequence[Path],
        options: CodeOptions = CodeOptions(),
    ) -> Compiled:
        with self._lock, self._calls.open("a") as calls:
            calls.write(f"{arch} {options} {include_dirs}\n")
        time.sleep(self._seconds)
        if self._refuses and self._refuses in text:
            raise CompilationFailed("first line\n" + "x" * 5000 + "\nlast line: error")
        return Compiled(self._output, "log", Resources(168, 16, 8, 4), 1.5)
