"""The machine from Python: memory, kernels from PTX, launches of several grids together.

`run` executes one kernel on arrays; `Machine` is for more than that.
"""

import ctypes
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from emulator import ptx
from emulator.build import library
from emulator.ptx.encoding import align

TENSOR_TYPES = {
    name: i
    for i, name in enumerate(
        "uint8 uint16 uint32 int32 uint64 int64 float16 float32 float64 bfloat16 float32_ftz "
        "tfloat32 tfloat32_ftz 16u4_align8b 16u4_align16b".split()
    )
}
"""CUtensorMapDataType, as cuda.h numbers it."""
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
"""CUtensorMapSwizzle by its bytes."""


class EmulatorError(Exception):
    """What a kernel did wrong; names rank, CTA, warp and PTX line."""


def aligned(num_bytes: int, alignment: int = 1024, fill: int = 0) -> np.ndarray:
    """`num_bytes` of memory, uint8, at an aligned address."""
    raw = np.full(num_bytes + alignment, fill, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + num_bytes]


@dataclass(frozen=True)
class Launch:
    """One grid.

    Attributes:
        text: PTX of a module.
        parameters: bytes of each kernel parameter.
        grid, block, cluster: sizes, three each; the grid counts CTAs.
        shared_bytes: dynamic shared memory.
        rank: which rank it belongs to, for messages.
        kernel: name, where the module has several.
    """

    text: str
    parameters: Sequence[bytes]
    grid: Sequence[int]
    block: Sequence[int]
    cluster: Sequence[int] = (1, 1, 1)
    shared_bytes: int = 0
    rank: int = 0
    kernel: str | None = None


@dataclass(frozen=True)
class After:
    """A launch among those of one stream, for the check of their overlap (docs/emulator.md).

    Attributes:
        name: for messages.
        early: it has the attribute of programmatic stream serialization, so that it may start
            before the launch ahead of it has ended.
    """

    name: str
    early: bool = False


class Machine:
    """One address space, whose memory are arrays of this process.

    Args:
        settings: see README.md: seed, delay, strict, grid_id, ...
    """

    def __init__(self, **settings: float) -> None:
        self._lib = library()
        self._pointer = ctypes.c_void_p(self._lib.emulator_new())
        self._kept: list[Any] = []
        self._kernels: dict[tuple[str, str | None], tuple[ptx.Kernel, int]] = {}
        self.set(**({"seed": 1} | settings))

    def __del__(self) -> None:
        if hasattr(self, "_pointer"):
            self._lib.emulator_delete(self._pointer)

    def set(self, **settings: float) -> None:
        """Changes settings; KeyError for an unknown one."""
        for name, value in settings.items():
            known = self._lib.emulator_set(self._pointer, name.encode(), ctypes.c_double(value))
            if not known:
                raise KeyError(name)

    def count(self, name: str) -> int:
        """executed, rounds, matrix, launches, uninitialised_shared, _tensor, _global."""
        value = int(self._lib.emulator_get(self._pointer, name.encode()))
        if value < 0:
            raise KeyError(name)
        return value

    @property
    def log(self) -> str:
        """Output of printf, and reads of memory that was never written (one a PTX line)."""
        return self._lib.emulator_log(self._pointer).decode(errors="replace")

    def region(
        self, array: np.ndarray, name: str, *, writable: bool = True, track: bool = False
    ) -> int:
        """Makes an array known to kernels; returns its address.

        Args:
            name: for messages.
            track: remembers which bytes were written, and notes reads of others.
        """
        self._kept.append(array)
        base, size = ctypes.c_uint64(array.ctypes.data), ctypes.c_uint64(array.nbytes)
        named = name.encode()
        self._lib.emulator_region(self._pointer, base, size, named, int(writable), int(track))
        return array.ctypes.data

    def mark_valid(self, address: int, num_bytes: int) -> None:
        """Bytes of a tracked region that hold something before the launch."""
        base, size = ctypes.c_uint64(address), ctypes.c_uint64(num_bytes)
        self._lib.emulator_mark_valid(self._pointer, base, size)

    def first_unwritten(self, array: np.ndarray) -> int:
        """Index of an array's first byte that was never written, or -1."""
        base, size = ctypes.c_uint64(array.ctypes.data), ctypes.c_uint64(array.nbytes)
        return self._lib.emulator_first_invalid(self._pointer, base, size)

    def load(self, text: str, name: str | None = None) -> tuple[ptx.Kernel, int]:
        """A module's kernel and its number; without a name, the only one's."""
        key = (hashlib.sha256(text.encode()).hexdigest(), name)
        if key not in self._kernels:
            kernels = parsed(text)
            if name is None and len(kernels) != 1:
                raise EmulatorError(f"the module has the kernels {', '.join(kernels)}: name one")
            kernel = kernels[name or next(iter(kernels))]
            variables = module_variables(kernel)
            self.region(variables, "module variables")
            number = self._lib.emulator_kernel(self._pointer, *kernel_arguments(kernel, variables))
            self._kept.append(kernel)
            self._kernels[key] = (kernel, number)
        return self._kernels[key]

    def launch(self, launches: Sequence[Launch], after: After | None = None) -> None:
        """Runs grids together, all to their end.

        Args:
            after: how they follow the launches before, for a check of their overlap: all launches
                of a machine have it, or none.

        Raises:
            EmulatorError: a kernel did something wrong; PtxError: unknown PTX.
        """
        self._lib.emulator_clear(self._pointer)
        kernels = []
        for launch in launches:
            kernel, number = self.load(launch.text, launch.kernel)
            sizes = [parameter.size for parameter in kernel.parameters]
            if [len(value) for value in launch.parameters] != sizes:
                got = [len(value) for value in launch.parameters]
                raise EmulatorError(f"parameters of {got} bytes; the kernel has {sizes}")
            if kernel.max_threads and np.prod(launch.block) > kernel.max_threads:
                raise EmulatorError(f"a block of {launch.block}: at most {kernel.max_threads}")
            if any(g % c for g, c in zip(launch.grid, launch.cluster, strict=True)):
                raise EmulatorError(f"a grid of {launch.grid} in clusters of {launch.cluster}")
            block = aligned(align(kernel.parameter_bytes, 128), 128)
            for value, parameter in zip(launch.parameters, kernel.parameters, strict=True):
                at = slice(parameter.offset, parameter.offset + parameter.size)
                block[at] = np.frombuffer(value, np.uint8)
            base = self.region(block, f"parameters of rank {launch.rank}", writable=False)
            three = ctypes.c_uint32 * 3
            self._lib.emulator_grid(
                self._pointer, number, ctypes.c_uint64(base), three(*launch.grid),
                three(*launch.block), three(*launch.cluster), launch.shared_bytes, launch.rank,
            )  # fmt: skip
            kernels.append(kernel)
        refused = after and self._lib.emulator_overlap(
            self._pointer, after.name.encode(), int(after.early)
        )
        if refused or self._lib.emulator_run(self._pointer):
            error = self._lib.emulator_error(self._pointer).decode(errors="replace")
            raise EmulatorError(with_sources(error, kernels[0]))


_parsed: dict[str, dict[str, ptx.Kernel]] = {}


def parsed(text: str) -> dict[str, ptx.Kernel]:
    """The kernels of a module, parsed once a process."""
    key = hashlib.sha256(text.encode()).hexdigest()
    if key not in _parsed:
        _parsed[key] = ptx.parse(text)
    return _parsed[key]


def module_variables(kernel: ptx.Kernel) -> np.ndarray:
    """Memory with the module's variables, the addresses among them filled in."""
    memory = aligned(max(16, len(kernel.global_bytes)), 256)
    memory[: len(kernel.global_bytes)] = np.frombuffer(kernel.global_bytes, np.uint8)
    for at, name in kernel.global_references:
        address = memory.ctypes.data + kernel.globals[name]
        memory[at : at + 8].view(np.uint64)[0] = address
    return memory


def kernel_arguments(kernel: ptx.Kernel, variables: np.ndarray) -> tuple[Any, ...]:
    """What the library's functions take of a kernel."""

    def pointer(array: np.ndarray) -> ctypes.c_void_p:
        return array.ctypes.data_as(ctypes.c_void_p)

    return (
        pointer(kernel.instructions), pointer(kernel.pool), pointer(kernel.constants),
        len(kernel.constants), kernel.num_registers, kernel.local_bytes, kernel.dynamic_at,
        ctypes.c_uint64(variables.ctypes.data),
    )  # fmt: skip


def with_sources(message: str, kernel: ptx.Kernel) -> str:
    """Adds to each PTX line of a message its text and, if compiled with -lineinfo, its source."""
    places = dict(
        zip(reversed(kernel.instructions["line"].tolist()), reversed(kernel.locations), strict=True)
    )

    def describe(found: re.Match[str]) -> str:
        line = int(found[1])
        place = places.get(line)
        text = kernel.text[line - 1].strip()[:100] if 0 < line <= len(kernel.text) else ""
        where = ""
        if place:
            where = f" ({kernel.files.get(place[0], '?').rpartition('/')[2]}:{place[1]})"
        return f"PTX line {line}{where} `{text}`"

    return re.sub(r"PTX line (\d+)", describe, message)


@dataclass(frozen=True)
class TensorMap:
    """A tensor map as a kernel's argument.

    Attributes:
        array: index of the argument whose memory it describes.
        type: a name of `TENSOR_TYPES`.
        dims, box: elements, innermost first; strides: bytes, from the second dimension on.
        swizzle: bytes, 0, 32, 64 or 128.
        fill: 1: NaN outside the tensor instead of 0.
    """

    array: int
    type: str
    dims: Sequence[int]
    strides: Sequence[int]
    box: Sequence[int]
    swizzle: int = 0
    fill: int = 0


class _Arguments(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int), ("rank", ctypes.c_uint32), ("address", ctypes.c_uint64),
        ("dims", ctypes.POINTER(ctypes.c_uint64)), ("strides", ctypes.POINTER(ctypes.c_uint64)),
        ("box", ctypes.POINTER(ctypes.c_uint32)),
        ("element_strides", ctypes.POINTER(ctypes.c_uint32)),
        ("interleave", ctypes.c_int), ("swizzle", ctypes.c_int), ("fill", ctypes.c_int),
    ]  # fmt: skip


def encode_tensor_map(
    address: int, type: int, dims: Sequence[int], strides: Sequence[int], box: Sequence[int],
    swizzle: int, interleave: int = 0, fill: int = 0,
) -> bytes:  # fmt: skip
    """The 128 bytes of a tensor map; numbers as cuTensorMapEncodeTiled takes them.

    Raises:
        EmulatorError: the driver would refuse it.
    """
    rank = len(dims)
    wide, narrow = ctypes.c_uint64 * 5, ctypes.c_uint32 * 5
    arguments = _Arguments(
        type, rank, address, wide(*dims), wide(*strides), narrow(*box), narrow(*[1] * rank),
        interleave, swizzle, fill,
    )  # fmt: skip
    encoded, message = ctypes.create_string_buffer(128), ctypes.create_string_buffer(256)
    if library().emulator_encode(ctypes.byref(arguments), encoded, message, 256):
        text = message.value.decode()
        raise EmulatorError(f"{text}: {type=} {dims=} {strides=} {box=} {swizzle=}")
    return encoded.raw


def run(
    text: str, args: Sequence[Any], *, grid: int | Sequence[int] = 1,
    block: int | Sequence[int] = 32, cluster: int | Sequence[int] = 1, smem: int = 0,
    kernel: str | None = None, settings: dict[str, float] | None = None, track: bool = False,
) -> list[np.ndarray]:  # fmt: skip
    """Runs one kernel on copies of arrays and returns those, in order, as it left them.

    Args:
        text: PTX.
        args: a kernel parameter each: an array (its address is passed), a NumPy scalar, bytes, or a
            `TensorMap` over one of the arrays.
        grid, block, cluster: sizes of one to three dimensions.
        smem: bytes of dynamic shared memory.
        kernel: its name, where the module has several.
        settings: of the `Machine`.
        track: arrays start as never written; reads before a write are noted.

    Raises:
        PtxError: the text has something unknown. EmulatorError: the kernel did something wrong.
    """
    machine = Machine(**(settings or {}))
    memory: dict[int, np.ndarray] = {}
    for i, argument in enumerate(args):
        if isinstance(argument, np.ndarray):
            memory[i] = aligned(max(16, argument.nbytes))
            memory[i][: argument.nbytes] = np.ascontiguousarray(argument).view(np.uint8).reshape(-1)
            machine.region(memory[i], f"argument {i}", track=track)
    parameters = []
    for i, argument in enumerate(args):
        if i in memory:
            parameters.append(memory[i].ctypes.data.to_bytes(8, "little"))
        elif isinstance(argument, TensorMap):
            address, type = memory[argument.array].ctypes.data, TENSOR_TYPES[argument.type]
            parameters.append(
                encode_tensor_map(address, type, argument.dims, argument.strides, argument.box,
                                  SWIZZLES[argument.swizzle], fill=argument.fill)
            )  # fmt: skip
        else:
            parameters.append(argument if isinstance(argument, bytes) else argument.tobytes())
    launch = Launch(text, parameters, _three(grid), _three(block), _three(cluster), smem, 0, kernel)
    machine.launch([launch])
    return [
        memory[i][: each.nbytes].view(each.dtype).reshape(each.shape)
        for i, each in enumerate(args)
        if isinstance(each, np.ndarray)
    ]


def _three(size: int | Sequence[int]) -> tuple[int, ...]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return (*sizes, *(1,) * (3 - len(sizes)))
