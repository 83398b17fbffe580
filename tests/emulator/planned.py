"""Launch plans on the machine: all ranks in one address space, each array a region of its name.

What an operand is to a kernel decides what it may do: constants, weights and tokens are read only,
results must be written whole, and a symmetric buffer holds garbage where the product does not clear
it.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from emulator.machine import After, EmulatorError, Launch, Machine, aligned, encode_tensor_map
from emulator.toolchain import ptx_of
from jax_megamoe.plan.launch import (
    Bool,
    Fill,
    Float32,
    KernelArgument,
    KernelLaunch,
    LaunchPlan,
    Pointer,
    Struct,
    SymmetricBuffer,
    TensorMap,
    Uint32,
    field_offsets,
    parameter_block,
    parameter_layout,
)
from jax_megamoe.plan.operand import SYMMETRIC_BUFFER, Operand
from jax_megamoe.plan.symmetric_buffer import BufferLayout

MAX_RANKS = 72
GARBAGE = 0xA5

Results = Mapping[str, tuple[Sequence[int], Any]]
"""Shape and dtype by name; one that is also an operand is updated in place."""


def cleared_bytes(layout: BufferLayout) -> int:
    """What must be zero at a buffer's start before the first launch: all before the tokens."""
    if "signals" in layout:
        return layout["signals"].num_bytes
    return layout["x"].offset if "x" in layout else 0  # grouped products have none


class Buffers:
    """The symmetric buffers of a group, kept between calls as the product keeps them."""

    def __init__(self, layout: BufferLayout, num_ranks: int) -> None:
        self.cleared = cleared_bytes(layout)
        self.arrays = [aligned(max(16, layout.num_bytes), 1024, GARBAGE) for _ in range(num_ranks)]
        for array in self.arrays:
            array[: self.cleared] = 0

    def poison(self) -> None:
        """Puts garbage where a call must write before it reads."""
        for array in self.arrays:
            array[self.cleared :] = GARBAGE


@dataclass
class Run:
    """What became of a run.

    Attributes:
        results: of each rank, by name.
        machine: for its counts and log.
        buffers: of the group, for a next call.
        executed: instructions by kernel.
    """

    results: list[dict[str, np.ndarray]]
    machine: Machine
    buffers: Buffers
    executed: dict[str, int] = field(default_factory=dict)


class Rank:
    """One rank's operands and results in memory."""

    def __init__(
        self, machine: Machine, index: int, plan: LaunchPlan, operands: Mapping[str, Any],
        results: Results, buffer: np.ndarray,
    ) -> None:  # fmt: skip
        self.index, self.plan, self.buffer = index, plan, buffer
        self.arrays: dict[str, np.ndarray] = {}
        self.addresses = {SYMMETRIC_BUFFER: buffer.ctypes.data}
        self._results = {
            name: (tuple(shape), np.dtype(dtype)) for name, (shape, dtype) in results.items()
        }
        constants = {name: np.frombuffer(data, np.uint8) for name, data in plan.constants}
        for name, array in {**operands, **constants}.items():
            data = np.frombuffer(np.ascontiguousarray(np.asarray(array)).tobytes(), np.uint8)
            memory = aligned(max(16, data.size), 256)[: max(1, data.size)]
            memory[: data.size] = data
            self._add(machine, name, memory, writable=name in results)
        for name, (shape, dtype) in self._results.items():
            if name not in self.arrays:
                size = max(1, int(np.prod(shape)) * dtype.itemsize)
                memory = aligned(max(16, size), 256, GARBAGE)[:size]
                self._add(machine, name, memory, track=True)

    def _add(self, machine: Machine, name: str, memory: np.ndarray, **how: bool) -> None:
        self.arrays[name] = memory
        self.addresses[name] = machine.region(memory, f"rank {self.index} {name}", **how)

    def collect(self, machine: Machine) -> dict[str, np.ndarray]:
        """The results.

        Raises:
            EmulatorError: a byte of one that is no scratch was never written.
        """
        scratch = {name for name, *_ in self.plan.scratch}
        out = {}
        for name, (shape, dtype) in self._results.items():
            size = int(np.prod(shape)) * dtype.itemsize
            whole = size and name not in scratch
            unwritten = machine.first_unwritten(self.arrays[name]) if whole else -1
            if unwritten >= 0:
                text = f"rank {self.index}: byte {unwritten} of result {name} was never written"
                raise EmulatorError(text)
            out[name] = self.arrays[name][:size].view(dtype).reshape(shape)
        return out

    def _at(self, operand: Operand) -> int:
        return self.addresses[operand.name] + operand.offset

    def clear(self, fill: Fill) -> None:
        """Carries out a fill."""
        start = self._at(fill.operand) - self.buffer.ctypes.data
        self.buffer[start : start + fill.num_bytes] = 0

    def launch(self, step: KernelLaunch, bases: Sequence[int], text: str) -> Launch:
        """A step as the machine takes it."""
        parameters = [self._parameter(argument, bases) for argument in step.arguments]
        assert [len(each) for each in parameters] == [size for _, size in parameter_block(step)]
        config = step.config
        return Launch(text, parameters, config.grid, config.block, config.cluster, config.smem,
                      self.index)  # fmt: skip

    def _parameter(self, argument: KernelArgument, bases: Sequence[int]) -> bytes:
        match argument:
            case Pointer(operand=None):
                return bytes(8)
            case Pointer(operand=Operand() as operand):
                return struct.pack("<Q", self._at(operand))
            case Bool() | Uint32() | Float32():
                form = {Bool: "<?", Uint32: "<I", Float32: "<f"}[type(argument)]
                return struct.pack(form, argument.value)
            case SymmetricBuffer():
                own = bases[self.index]
                offsets = [base - own for base in bases] + [0] * (MAX_RANKS - len(bases))
                return struct.pack("<Q72qI4x", own, *offsets, self.index)
            case TensorMap(spec=spec):
                return encode_tensor_map(
                    self._at(spec.base), spec.dtype, spec.dims, spec.strides, spec.box,
                    spec.swizzle, spec.interleave, spec.oob_fill,
                )  # fmt: skip
            case Struct(fields=fields):
                packed = bytearray(parameter_layout(argument)[0])
                for each, offset in zip(fields, field_offsets(argument), strict=True):
                    value = self._parameter(each, bases)
                    packed[offset : offset + len(value)] = value
                return bytes(packed)
        raise TypeError(argument)


def run(
    plans: Sequence[LaunchPlan], operands: Sequence[Mapping[str, Any]],
    results: Sequence[Results], *, buffers: Buffers | None = None,
    settings: Mapping[str, float] | None = None,
) -> Run:  # fmt: skip
    """Runs the plans of all ranks together, one step after the other.

    Args:
        plans, operands, results: of each rank.
        buffers: of an earlier call; None: fresh ones.
        settings: of the machine.

    Raises:
        EmulatorError: a kernel did something wrong, or left a result unwritten.
    """
    machine = Machine(**(settings or {}))
    buffers = buffers or Buffers(plans[0].buffer, len(plans))
    for i, array in enumerate(buffers.arrays):
        machine.region(array, f"rank {i} symmetric buffer", track=True)
        machine.mark_valid(array.ctypes.data, buffers.cleared)
    bases = [array.ctypes.data for array in buffers.arrays]
    ranks = [
        Rank(machine, i, *each)
        for i, each in enumerate(zip(plans, operands, results, buffers.arrays, strict=True))
    ]
    done = Run([], machine, buffers)
    overlaps = any(launch.config.programmatic_serialization for launch in plans[0].launches)
    filled = False
    for steps in zip(*(plan.steps for plan in plans), strict=True):
        launches = []
        for rank, step in zip(ranks, steps, strict=True):
            if isinstance(step, Fill):
                rank.clear(step)
            else:
                launches.append(rank.launch(step, bases, ptx_of(step.kernel)))
        if launches:
            before = machine.count("executed")
            kernel, early = steps[0].kernel, steps[0].config.programmatic_serialization
            # A fill is no kernel: it starts when all before it has ended, and all behind it after.
            after = After(kernel.symbol, early and not filled) if overlaps else None
            machine.launch(launches, after)
            done.executed[kernel.symbol] = machine.count("executed") - before
        filled = not launches
    done.results = [rank.collect(machine) for rank in ranks]
    return done
