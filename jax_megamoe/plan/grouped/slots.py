"""Products over rows that lie in slots by expert: what DeepGEMM's BF16 kernels have in common.

A is [slots, K], B [E, N, K], D [slots, N], all BF16; ``expert_ends`` int32 [E] has the slot behind
each expert's last row. An expert's slots start at the next multiple of the block's height; the
kernel walks the blocks of experts that have rows, persistently. D behind an expert's last row is
made of whatever A has there, or not written. `scheduler/gemm.cuh` of the sgl source calls this
layout ``MGroupedContiguousWithPsumLayout``.
"""

from dataclasses import dataclass
from typing import Protocol

from jax_megamoe.plan.launch import KernelLaunch, Pointer, TensorMap, Uint32
from jax_megamoe.plan.operand import Operand
from jax_megamoe.plan.tensor_map import BFLOAT16, SWIZZLE_128B, TensorMapSpec

SOURCE = "sgl"
ELEMENT_BYTES = 2
SWIZZLE = 128
"""Bytes of a row of a tile in shared memory."""
BLOCK_K = SWIZZLE // ELEMENT_BYTES
"""Columns of A and B that a stage has."""
GEMM_TYPE = "GemmType::MGroupedContiguousWithPsumLayout"


@dataclass(frozen=True)
class Matrices:
    """One matrix [n, k] for each expert."""

    num_experts: int
    n: int
    k: int


class SlotProduct(Protocol):
    """A kernel: the module of its name."""

    def height(self, matrices: tuple[Matrices, Matrices], rows: int, num_sms: int) -> int:
        """Rows of a block of both products of a layer of `rows` rows, at least 1."""
        ...

    def launch(
        self,
        matrices: Matrices,
        names: tuple[str, str, str],
        *,
        rows: int,
        m: int,
        slots: int,
        num_sms: int,
        early: bool,
    ) -> KernelLaunch:
        """One product.

        Args:
            matrices: what rows are multiplied with.
            names: of A, B and D.
            rows: of all experts together.
            m: rows of a block.
            slots: rows of A and of D.
            num_sms: multiprocessors.
            early: it may start before its predecessor ended, for which it waits before it reads.
        """
        ...


def sizes(matrices: Matrices, slots: int) -> tuple[Pointer | Uint32, ...]:
    """The arguments that both kernels start with."""
    return (
        Pointer("grouped_layout", Operand("expert_ends")),
        Uint32("shape_m", slots),
        Uint32("shape_n", matrices.n),
        Uint32("shape_k", matrices.k),
    )


def tensor_maps(
    matrices: Matrices, names: tuple[str, str, str], slots: int, rows: tuple[int, int, int]
) -> tuple[TensorMap, TensorMap, TensorMap]:
    """Those of A, B and D, whose copies have this many rows each."""
    n, k = matrices.n, matrices.k
    a, b, d = names
    return (
        _map("tensor_map_a", a, (k, slots), rows[0]),
        _map("tensor_map_b", b, (k, n * matrices.num_experts), rows[1]),
        _map("tensor_map_cd", d, (n, slots), rows[2]),
    )


def _map(name: str, operand: str, dims: tuple[int, int], rows: int) -> TensorMap:
    strides, box = (dims[0] * ELEMENT_BYTES,), (BLOCK_K, rows)
    return TensorMap(
        name, TensorMapSpec(Operand(operand), BFLOAT16, dims, strides, box, SWIZZLE_128B)
    )
