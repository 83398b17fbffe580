"""The recording driver from Python: building it, reading what it recorded, and kernels for it."""

import contextlib
import ctypes
import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jax_megamoe.runtime import extension

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "tests" / "ffi" / "recording_driver" / "recording_driver.cc"
SYM_BUFFER_BYTES = 592
STRUCTS = {"deep_gemm::EpilogueOperatorArgs": 48}
"""Bytes of the other structs that kernels take by value."""


def build(folder: Path) -> Path:
    """Compiles the library into `folder`; skips the test without a C++ compiler."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("the recording driver needs a C++ compiler (g++)")
    library = folder / "librecording.so"
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", f"-I{ROOT}"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(library)], check=True)
    return library


def parameter_bytes(cpp_type: str) -> int:
    """Size of a kernel parameter of a C++ type, as MegaMoE kernels declare them."""
    if cpp_type.strip().endswith("*"):
        return 8
    if "SymBuffer" in cpp_type:
        return SYM_BUFFER_BYTES
    if re.search(r"TmaDescriptor|CUtensorMap", cpp_type):
        return 128
    return STRUCTS.get(cpp_type, 1 if cpp_type == "bool" else 4)


def fake_cubin(spec: str) -> bytes:
    """A cubin provider for the recording driver: the kernel's name and parameter sizes as text."""
    fields = json.loads(spec)
    sizes = [str(parameter_bytes(each)) for each in fields["parameter_types"]]
    return " ".join([fields["symbol"], *sizes]).encode()


class RecordingDriver:
    """A loaded recording driver. Create one per process."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self._driver = ctypes.CDLL(str(library))
        self._driver.recording_log.restype = ctypes.c_char_p

    def clear(self) -> None:
        """Forgets calls and what was asked for."""
        self._driver.recording_clear()

    def fail(self, function: str, result: int) -> None:
        """Makes `function` return the CUDA error `result`."""
        self._driver.recording_fail(function.encode(), result)

    def peek(self, kernel: str, parameter: int, num_bytes: int) -> None:
        """Makes launches of `kernel` record, as `peeked`, what a pointer parameter points to."""
        self._driver.recording_peek(
            kernel.encode(), ctypes.c_size_t(parameter), ctypes.c_size_t(num_bytes)
        )

    @contextlib.contextmanager
    def held(self, kernel: str) -> Iterator[Callable[[], None]]:
        """Launches of `kernel` do not return inside; the function given waits until one is held."""
        self._driver.recording_hold(kernel.encode())
        try:
            yield self._driver.recording_wait_for_held
        finally:
            self._driver.recording_hold(b"")

    def calls(self, function: str | None = None) -> list[dict[str, Any]]:
        """What was recorded, in order; of one function, if named.

        Every call has `call` and `device` (the current context's). Of a launch, `parameters` are
        hex strings and, for tensor maps, the arguments they were encoded from.
        """
        entries = [json.loads(line) for line in self._driver.recording_log().splitlines()]
        return [each for each in entries if function in (None, each["call"])]

    def launches(self) -> list[dict[str, Any]]:
        """The recorded kernel launches."""
        return self.calls("cuLaunchKernelEx")


@contextlib.contextmanager
def provider(function: Callable[[str], bytes]) -> Iterator[None]:
    """Has `function` make machine code for a while."""
    extension.module().set_cubin_provider(function)
    try:
        yield
    finally:
        extension.module().set_cubin_provider(fake_cubin)


@functools.cache
def start(folder: Path) -> RecordingDriver:
    """Makes the recording driver this process's CUDA driver and the CPU platform launch on it."""
    library = build(folder)
    os.environ["JAX_MEGAMOE_LIBCUDA"] = str(library)
    extension.module().set_cubin_provider(fake_cubin)
    extension.register_cpu()
    return RecordingDriver(library)
