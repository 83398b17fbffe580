"""A planned launch as data: what Python computes and C++ replays."""

from dataclasses import dataclass, field

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


KernelArgument = Pointer | Uint32 | Float32 | SymmetricBuffer | TensorMap


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
    """

    steps: tuple[KernelLaunch | Fill, ...]
    buffer: BufferLayout
    num_ranks: int
    block_m: int
    constants: tuple[tuple[str, bytes], ...] = ()
    plan_version: int = field(default=PLAN_VERSION)
