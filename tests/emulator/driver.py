"""The whole product over a libcuda whose launches run on the emulator.

Nothing of the launch is replaced in Python: `mega_moe` goes through jit, shard_map and the compiled
module to the driver's functions. In place of the GPU machine stand: what a CPU device is, the
machine code (a name that the driver knows), and the memory of symmetric buffers. The driver is
chosen once a process, so this cannot share one with the recording driver.
"""

import ctypes
import dataclasses
import hashlib
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from emulator import build
from emulator.machine import aligned, kernel_arguments, module_variables, parsed
from emulator.planned import GARBAGE
from emulator.toolchain import ptx_of
from jax_megamoe import compile as compiler
from jax_megamoe import symmetric_memory
from jax_megamoe.launch import deep_gemm, grouped, runnable
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.symmetric_buffer import SIGNAL_BYTES
from jax_megamoe.runtime import extension


class EmulatingDriver:
    """The driver of this process.

    Attributes:
        device: what every CPU device stands for.
        buffers: arrays of each rank of each group, by key.
    """

    def __init__(self, device: DeviceSpec) -> None:
        os.environ["JAX_MEGAMOE_LIBCUDA"] = str(build.library_path())
        self.device = device
        self.buffers: dict[str, list[list[np.ndarray]]] = {}
        self._kept: list[Any] = []
        self._lib = build.library()
        self._lib.emulator_driver_machine.restype = ctypes.c_void_p
        self._machine = ctypes.c_void_p(self._lib.emulator_driver_machine())
        extension.module().set_cubin_provider(self._cubin)
        extension.register_cpu()
        for module in (deep_gemm, grouped, runnable):
            module.spec_of = self._device_spec
        compiler.build = lambda spec: b""
        symmetric_memory.allocate = self._allocate
        symmetric_memory.keys = lambda start="": [k for k in self.buffers if k.startswith(start)]

    def set(self, **settings: float) -> None:
        """Settings of the machine, for launches from now on."""
        for name, value in settings.items():
            if name == "seed":
                self._lib.emulator_driver_seed(ctypes.c_uint64(int(value)))
            elif not self._lib.emulator_set(self._machine, name.encode(), ctypes.c_double(value)):
                raise KeyError(name)

    def count(self, name: str) -> int:
        """A count of the machine: launches, executed, ..."""
        return int(self._lib.emulator_get(self._machine, name.encode()))

    def _device_spec(self, _: jax.Device, reserved_sms: int = 0, __: str = "") -> DeviceSpec:
        left = self.device.num_sms - reserved_sms
        return dataclasses.replace(self.device, num_sms=left, reserved_sms=reserved_sms)

    def _cubin(self, spec: str) -> bytes:
        """Registers a kernel with the driver; its name stands for its machine code."""
        text = ptx_of(extension.decode_kernel(spec))
        name = b"kernel_" + hashlib.sha256(text.encode()).hexdigest()[:16].encode()
        (kernel,) = parsed(text).values()
        variables = module_variables(kernel)
        index = self._lib.emulator_kernel(self._machine, *kernel_arguments(kernel, variables))
        offsets = np.array([p.offset for p in kernel.parameters], np.uint64)
        sizes = np.array([p.size for p in kernel.parameters], np.uint64)
        arrays = [a.ctypes.data_as(ctypes.c_void_p) for a in (offsets, sizes)]
        self._lib.emulator_driver_kernel(name, index, *arrays, len(sizes))
        self._kept.append((kernel, variables))
        return name + b"\0"

    def _allocate(
        self, key: str, num_bytes: int, groups: Sequence[Sequence[jax.Device]], **_: Any
    ) -> None:
        """Buffers in host memory: zeros where the product's are zero, else garbage."""
        if key in self.buffers:
            return
        self.buffers[key] = []
        for group in groups:
            arrays = [aligned(num_bytes, 1024, GARBAGE) for _ in group]
            for array in arrays:
                array[: SIGNAL_BYTES if self.device.arch >= 100 else num_bytes] = 0
            bases = [array.ctypes.data for array in arrays]
            for rank, device in enumerate(group):
                extension.module().register_symmetric_buffer(
                    key, device.id, bases[rank], bases, rank, num_bytes
                )
            self.buffers[key].append(arrays)
