"""Kernels of this package compiled by a host compiler and run on arrays in host memory."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from jax_megamoe.compile import find_source
from jax_megamoe.plan.kernel import KernelSpec
from jax_megamoe.plan.launch import KernelLaunch, Pointer, Uint32
from jax_megamoe.plan.operand import SYMMETRIC_BUFFER

HEADERS = Path(__file__).parent / "host"


class HostKernels:
    """A library of kernels; skips the test without a C++ compiler."""

    def __init__(self, specs: Sequence[KernelSpec], folder: Path) -> None:
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            pytest.skip("kernels on the host need a C++ compiler (g++)")
        self._index = {spec: index for index, spec in enumerate(dict.fromkeys(specs))}
        unit, library = folder / "kernels.cc", folder / "libkernels.so"
        headers = dict.fromkeys(spec.header for spec in self._index)
        head = [*(f"#include <{header}>" for header in headers), "using namespace jax_megamoe;"]
        unit.write_text("\n".join([*head, *map(_function, self._index, self._index.values())]))
        flags = [
            "-std=c++20",
            "-O1",
            "-ffp-contract=off",
            "-Wall",
            "-Werror",
            "-Wno-unknown-pragmas",
            "-fPIC",
            "-shared",
        ]
        folders = [HEADERS, find_source("jax_megamoe").include_dir]
        includes = [f"-I{each}" for each in folders]
        subprocess.run([compiler, *flags, *includes, str(unit), "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library))

    def launch(
        self,
        launch: KernelLaunch,
        arrays: Mapping[str, np.ndarray],
        buffer: np.ndarray | None = None,
        start: int = 0,
    ) -> None:
        """Runs a launch.

        Args:
            arrays: operands by name.
            buffer: the symmetric buffer from byte `start` on; None: the launch names none.
        """
        values: list[ctypes.c_uint64 | ctypes.c_uint32 | ctypes.c_float] = []
        for argument in launch.arguments:
            if isinstance(argument, Pointer):
                values.append(ctypes.c_uint64(_address(argument, arrays, buffer, start)))
            elif isinstance(argument, Uint32):
                values.append(ctypes.c_uint32(argument.value))
            else:
                values.append(ctypes.c_float(argument.value))
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        run = self._library[f"run_{self._index[launch.kernel]}"]
        run(pointers, launch.config.grid[0], launch.config.block[0])


def _address(
    pointer: Pointer, arrays: Mapping[str, np.ndarray], buffer: np.ndarray | None, start: int
) -> int:
    if pointer.operand is None:
        return 0
    if pointer.operand.name == SYMMETRIC_BUFFER:
        assert buffer is not None
        return buffer.ctypes.data + pointer.operand.offset - start
    return arrays[pointer.operand.name].ctypes.data + pointer.operand.offset


def _function(spec: KernelSpec, index: int) -> str:
    kernel = f"{spec.symbol}<{', '.join(spec.template_args)}>"
    arguments = ", ".join(
        f"*static_cast<{cpp_type}*>(p[{i}])"
        for i, cpp_type in enumerate(f"std::type_identity_t<{t}>" for t in spec.parameter_types)
    )
    return f"""\
extern "C" void run_{index}(void** p, uint32_t num_blocks, uint32_t num_threads) {{
  host_cuda::Launch(num_blocks, num_threads, [=] {{ {kernel}({arguments}); }});
}}
"""
