"""A planned launch as data: what Python computes and C++ replays."""

from dataclasses import dataclass, field

from jax_megamoe.plan.arithmetic import align
from jax_megamoe.plan.kernel import KernelSpec, LaunchConfig
from jax_megamoe.plan.operand import Operand
from jax_megamoe.plan.symmetric_buffer import BufferLayout
from jax_megamoe.plan.tensor_map import TensorMapSpec

PLAN_VERSION = 1
"""Raised whenever the fields or their meaning change; C++ refuses a plan of another version."""


@dataclass(frozen=True)
class Pointer:
    """A device address; None passes a null pointer."""

    name: str
    operand: Operand | None


@dataclass(frozen=True)
class Uint32:
    """A 32-bit unsigned integer, by value."""

    name: str
    value: int


@dataclass(frozen=True)
class Bool:
    """A C++ bool, one byte, by value."""

    name: str
    value: bool


@dataclass(frozen=True)
class Float32:
    """A 32-bit float, by value."""

    name: str
    value: float


@dataclass(frozen=True)
class SymmetricBuffer:
    """DeepGEMM's SymBuffer struct, 592 bytes: own base, 72 offsets of peers from it, own rank.

    Base, peers and rank are the process's own and are filled in at launch.
    """

    name: str


@dataclass(frozen=True)
class TensorMap:
    """A 128-byte tensor map, by value."""

    name: str
    spec: TensorMapSpec


Scalar = Pointer | Bool | Uint32 | Float32


@dataclass(frozen=True)
class Struct:
    """A C++ struct by value: at most 32 fields in order, each where C++ puts one of its type."""

    name: str
    fields: tuple[Scalar, ...]


KernelArgument = Scalar | SymmetricBuffer | TensorMap | Struct


def optional(name: str, operand: str, present: bool) -> Pointer:
    """A pointer to the start of `operand`, or null."""
    return Pointer(name, Operand(operand) if present else None)


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel with its launch shape and arguments, in parameter order."""

    kernel: KernelSpec
    config: LaunchConfig
    arguments: tuple[KernelArgument, ...]


@dataclass(frozen=True)
class Fill:
    """Zero `num_bytes` at `operand` in stream order (a memset node)."""

    operand: Operand
    num_bytes: int


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that happens on the stream for one call, in order, and the buffer it happens in.

    Attributes:
        steps: launches and fills, in stream order.
        buffer: layout of the symmetric buffer.
        num_ranks: expert-parallel ranks.
        block_m: tile height the kernel runs this number of tokens with.
        constants: named read-only bytes that arguments point to (the SM locality table).
        unstaged: regions of the buffer that the last launch reads and no step writes: the caller
            fills them, in stream order, before the first step.
        scratch: (name, shape, dtype) of arrays that one step writes and a later one reads: results
            of the call that nobody else needs.
    """

    steps: tuple[KernelLaunch | Fill, ...]
    buffer: BufferLayout
    num_ranks: int
    block_m: int
    constants: tuple[tuple[str, bytes], ...] = ()
    unstaged: tuple[str, ...] = ()
    scratch: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    plan_version: int = field(default=PLAN_VERSION)

    @property
    def launches(self) -> tuple[KernelLaunch, ...]:
        """The steps without fills."""
        return tuple(step for step in self.steps if isinstance(step, KernelLaunch))


_TENSOR_MAP_BYTES, _SYM_BUFFER_BYTES = 128, 592
_BASES = {8: 0x160, 9: 0x210}
_BLACKWELL_BASE = 0x380


def parameter_block(launch: KernelLaunch) -> tuple[tuple[int, int], ...]:
    """(offset, bytes) of each kernel parameter in one packed block.

    Alignment is C's, but tensor maps are 128-aligned in the constant bank, where the block itself
    starts at 0x380 (SM100 and SM120), 0x210 (SM90) or 0x160 (SM80 and SM89).
    """
    number = int("".join(filter(str.isdigit, launch.kernel.arch)))
    base = _BASES.get(number // 10, _BLACKWELL_BASE)
    placed: list[tuple[int, int]] = []
    end = 0
    for argument in launch.arguments:
        size, alignment = parameter_layout(argument)
        start = align(base + end, alignment) - base
        placed.append((start, size))
        end = start + size
    return tuple(placed)


def field_offsets(struct: Struct) -> tuple[int, ...]:
    """Bytes from a struct's start to each of its fields."""
    offsets: list[int] = []
    end = 0
    for each in struct.fields:
        size, alignment = parameter_layout(each)
        offsets.append(align(end, alignment))
        end = offsets[-1] + size
    return tuple(offsets)


def parameter_layout(argument: KernelArgument) -> tuple[int, int]:
    """Bytes and alignment of an argument's C++ type."""
    match argument:
        case TensorMap():
            return _TENSOR_MAP_BYTES, 128
        case SymmetricBuffer():
            return _SYM_BUFFER_BYTES, 8
        case Pointer():
            return 8, 8
        case Bool():
            return 1, 1
        case Uint32() | Float32():
            return 4, 4
        case Struct(fields=fields):
            layouts = [parameter_layout(each) for each in fields]
            alignment = max(each for _, each in layouts)
            return align(field_offsets(argument)[-1] + layouts[-1][0], alignment), alignment
