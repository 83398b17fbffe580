"""Triton kernels around Humming's products: rows in the order of experts, and the weighted sum.

Humming's wheel has neither: vLLM's are in its compiled module. Only Humming's process imports this.
"""

from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

_CHUNK = 2048


@triton.jit
def _count(ids, counts, n, CHUNK: tl.constexpr):
    """Each program counts the slots of its expert."""
    expert = tl.program_id(0)
    total = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, n, CHUNK):
        at = start + tl.arange(0, CHUNK)
        total += (tl.load(ids + at, mask=at < n, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(total, axis=0))


@triton.jit
def _place(  # noqa: PLR0913, PLR0917 (a kernel's operands)
    ids, counts, slots, blocks, used, n, experts,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Each program writes the rows of its expert, filled up to whole blocks with n."""
    expert = tl.program_id(0)
    every = tl.arange(0, EXPERTS)
    rows = tl.load(counts + every, mask=every < experts, other=0)
    filled = (rows + BLOCK - 1) // BLOCK * BLOCK
    first = tl.sum(tl.where(every < expert, filled, 0), axis=0)
    own = tl.sum(tl.where(every == expert, rows, 0), axis=0)
    if expert == 0:
        tl.store(used, tl.sum(filled, axis=0))
    whole = (own + BLOCK - 1) // BLOCK
    for start in range(0, whole, CHUNK):
        at = start + tl.arange(0, CHUNK)
        there = blocks + first // BLOCK + at
        tl.store(there, tl.zeros((CHUNK,), tl.int32) + expert, mask=at < whole)
    last = own + tl.arange(0, WIDE)
    tl.store(slots + first + last, tl.zeros((WIDE,), tl.int32) + n, mask=last < whole * BLOCK)
    before = 0
    for start in range(0, n, CHUNK):
        at = start + tl.arange(0, CHUNK)
        mine = (tl.load(ids + at, mask=at < n, other=-1) == expert).to(tl.int32)
        rank = before + tl.cumsum(mine, axis=0) - mine
        tl.store(slots + first + rank, at, mask=mine == 1)
        before += tl.sum(mine, axis=0)


@triton.jit
def _sum(rows, factors, out, width, TOP_K: tl.constexpr, COLUMNS: tl.constexpr):
    """Each program adds up some columns of a token's slots."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros((COLUMNS,), tl.float32)
    for slot in tl.static_range(TOP_K):
        row = token * TOP_K + slot
        value = tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.float32)
        total += value * tl.load(factors + row)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


class Aligned:
    """Slots in the order of their experts, each expert's filled up to whole blocks.

    Attributes:
        slots: int32, the slot of each row, or the number of slots for a row that is none.
        blocks: int32, the expert of each block.
        used: int32 [1], rows of all whole blocks.
    """

    def __init__(self, num_slots: int, experts: int, block: int) -> None:
        most = num_slots + min(num_slots, experts) * (block - 1)
        self._sizes = num_slots, experts, block
        self.slots = _numbers(-(-most // block) * block)
        self.blocks = _numbers(-(-most // block))
        self.used = _numbers(1)

    def place(self, ids: Any, counts: Any) -> None:
        """Fills the arrays from ids int32 [T, K] and what `count` counted."""
        n, experts, block = self._sizes
        wide = triton.next_power_of_2(experts)
        chunk = min(_CHUNK, max(32, triton.next_power_of_2(n)))
        launch: Any = _place
        launch[(experts,)](
            ids, counts, self.slots, self.blocks, self.used, n, experts,
            BLOCK=block, WIDE=triton.next_power_of_2(block), EXPERTS=wide, CHUNK=chunk,
        )  # fmt: skip


def _numbers(size: int) -> Any:
    return torch.zeros(size, dtype=torch.int32, device=DEVICE)


DEVICE = "cuda"
"""Where arrays are made; the tests run the kernels with Triton's interpreter elsewhere."""


def count(ids: Any, counts: Any) -> None:
    """Slots of each expert: ids int32 [T, K], counts int32 [E]."""
    chunk = min(_CHUNK, max(32, triton.next_power_of_2(ids.numel())))
    launch: Any = _count
    launch[(counts.shape[0],)](ids, counts, ids.numel(), CHUNK=chunk)


def weighted_sum(rows: Any, factors: Any, out: Any) -> None:
    """out bfloat16 [T, H] of rows bfloat16 [T * K, H] times factors float32 [T, K]."""
    tokens, width = out.shape
    columns = 1024
    launch: Any = _sum
    grid = (tokens, -(-width // columns))
    launch[grid](rows, factors, out, width, TOP_K=factors.shape[1], COLUMNS=columns)
