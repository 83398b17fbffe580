"""Products of sorted rows with their experts' matrices: one Pallas kernel, through Triton.

For NVIDIA GPUs. Rows of an expert are multiplied in blocks of at most `Tiles.rows`, by a table
(`row_blocks`) that the device makes, so that nothing waits for the host. Weights are read where the
parameters have them.
"""

import os
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, BFloat16, Float, Float32, Int32

from jax_megamoe.mesh import vary, varying_axes

triton: Any
try:
    from jax.experimental.pallas import triton
except ImportError:  # JAX will drop it one day
    triton = None

SWITCH = "JAX_MEGAMOE_PALLAS"
"""Environment variable: 0 keeps the kernel out of what is traced."""
_OLDEST = 8.0
"""Compute capability: the first with BF16 tensor cores."""
_SWAPPED_BELOW = 64
"""Rows of a block: a Hopper tensor core multiplies 64 rows at once, so fewer are its columns."""


class Tiles(NamedTuple):
    """How a product is cut.

    Attributes:
        rows: of an expert that a program multiplies, at most.
        columns: of the result that it makes; divides 128.
        depth: of K in a step; divides 128.
        warps: of a program.
        stages: steps that are loaded ahead.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


class RowBlocks(NamedTuple):
    """What each program along the rows multiplies, int32 [blocks].

    Attributes:
        expert: whose matrix; -1 where there is nothing to do.
        start: its first row.
        stop: where the expert's rows end.
    """

    expert: Int32[Array, " blocks"]
    start: Int32[Array, " blocks"]
    stop: Int32[Array, " blocks"]


class Weighed(NamedTuple):
    """Biases of the experts, bias float32 [E, N], added to a row times its factor, float32
    [slots]; factor None: 1."""

    bias: Float32[Array, "experts n"]
    factor: Float32[Array, " slots"] | None = None


def available() -> bool:
    """Whether a CUDA device of this process can run the kernel.

    What is lowered for another platform does not have it, see `op.xla`. Without a GPU it is not
    traced: newer versions of JAX do not lower it there.
    """
    if triton is None or os.environ.get(SWITCH, "1") == "0":
        return False
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return False
    return all(float(getattr(d, "compute_capability", 0)) >= _OLDEST for d in devices)


def tiles_of(num_rows: int, num_experts: int) -> Tiles:
    """Tiles for so many rows of so many experts.

    Blocks have half again an expert's even share, so that most experts are read once. The buffers
    of all stages fit the 99 KB of shared memory that consumer GPUs have.
    """
    share = 3 * num_rows // (2 * num_experts)
    rows = min(128, max(16, 1 << max(0, share - 1).bit_length()))
    if rows <= 32:
        return Tiles(rows, columns=64, depth=128, warps=4, stages=4)
    return Tiles(rows, columns=128, depth=64, warps=4 if rows == 64 else 8, stages=3)


def row_blocks(ids: Int32[Array, " slots"], num_experts: int, rows: int) -> RowBlocks:
    """The blocks of all experts' rows, sorted by expert.

    Args:
        ids: each row's expert in any order, `num_experts` for a row of none.
        num_experts: E.
        rows: of a block.
    """
    num_rows = ids.shape[0]
    experts = jnp.arange(num_experts + 1, dtype=jnp.int32)
    # Sums over comparisons: a GPU does each in one kernel, where scans and scatters take several.
    first = jnp.sum(ids[None, :] < experts[:, None], axis=1, dtype=jnp.int32)
    blocks = -(-(first[1:] - first[:-1]) // rows)
    upto = jnp.where(experts[:-1, None] >= experts[None, :-1], blocks[None, :], 0)
    ends = jnp.sum(upto, axis=1, dtype=jnp.int32)
    block = jnp.arange(_most_blocks(num_rows, num_experts, rows), dtype=jnp.int32)
    expert = jnp.sum(ends[None, :] <= block[:, None], axis=1, dtype=jnp.int32)
    is_real = expert < num_experts
    own = jnp.where(is_real, expert, 0)
    start = first[own] + (block - (ends[own] - blocks[own])) * rows
    return RowBlocks(jnp.where(is_real, expert, -1), start, first[own + 1])


def _most_blocks(num_rows: int, num_experts: int, rows: int) -> int:
    """Blocks there can be, whatever the routing."""
    return min(num_rows, num_rows // rows + min(num_experts, num_rows))


def product(
    x: BFloat16[Array, "tokens k"],
    w: BFloat16[Array, "experts n k"],
    order: Int32[Array, " slots"],
    blocks: RowBlocks,
    weighed: Weighed | None = None,
    *,
    tiles: Tiles,
    top_k: int | None,
    dtype: Any = jnp.bfloat16,
    interpret: bool = False,
) -> Float[Array, "slots n"]:
    """Each row times its expert's matrix, transposed, summed in float32.

    Args:
        x: tokens, slot s of which is row s // top_k; with top_k None: rows sorted by expert.
        w: the matrices.
        order: the slots, sorted by expert.
        blocks: of the sorted rows.
        weighed: biases.
        tiles: how the product is cut.
        top_k: slots of a token.
        dtype: of the result.
        interpret: by JAX instead of the GPU, for tests.

    Returns:
        With top_k the sorted rows, without it the slots in their own order; undefined in rows
        without an expert.
    """
    operands = [*blocks, order, x, w, *(each for each in weighed or () if each is not None)]
    axes = frozenset[str]().union(*map(varying_axes, operands))
    operands = [vary(each, axes) for each in operands]
    like = jax.typeof(operands[0])
    kernel = partial(
        _kernel, tiles=tiles, top_k=top_k, biased=weighed is not None,
        has_factor=weighed is not None and weighed.factor is not None,
    )  # fmt: skip
    shape = jax.ShapeDtypeStruct(
        (order.shape[0], w.shape[1]), dtype, manual_axis_type=like.manual_axis_type
    )
    return pl.pallas_call(
        kernel,
        out_shape=shape,
        grid=(w.shape[1] // tiles.columns, blocks.expert.shape[0]),
        compiler_params=triton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="mega_moe_product",
    )(*operands)


def _kernel(
    expert_ref: Any, start_ref: Any, stop_ref: Any, order_ref: Any, x_ref: Any, w_ref: Any,
    *rest: Any, tiles: Tiles, top_k: int | None, biased: bool, has_factor: bool,
) -> None:  # fmt: skip
    """A block of rows times `tiles.columns` rows of its expert's matrix.

    Columns come first in the grid: blocks of one expert run close together, and find its matrix in
    the L2 cache.
    """
    column, block = pl.program_id(0), pl.program_id(1)
    out_ref = rest[-1]
    e = expert_ref[block]
    columns = pl.ds(column * tiles.columns, tiles.columns)

    @pl.when(e >= 0)
    def _() -> None:
        start, stop = start_ref[block], stop_ref[block]
        row = start + jnp.arange(tiles.rows, dtype=jnp.int32)
        inside = row < stop
        # Past the end the first row is read again, and not stored: loads need no mask.
        row = jnp.where(inside, row, start)
        slot = triton.load(order_ref.at[row])
        total = _summed(x_ref, w_ref, row if top_k is None else slot // top_k, e, column, tiles)
        if biased:
            bias = jnp.broadcast_to(rest[0][e, columns][None, :], total.shape)
            if has_factor:
                factor = triton.load(rest[1].at[slot])
                bias = bias * jnp.broadcast_to(factor[:, None], total.shape)
            total = total + bias
        # Out of bounds where it is not stored, so that the interpreter writes no row twice.
        place = jnp.where(inside, slot if top_k is None else row, out_ref.shape[0])
        triton.store(
            out_ref.at[_grid(place, column, tiles.columns)],
            total.astype(out_ref.dtype),
            mask=jnp.broadcast_to(inside[:, None], total.shape),
        )


def _grid(rows: Array, step: Array, size: int) -> tuple[Array, Array]:
    """Indices of some rows and of the columns of a step, [rows, size]."""
    shape = (rows.shape[0], size)
    columns = step * size + jnp.arange(size, dtype=jnp.int32)
    return jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(columns[None, :], shape)


def _summed(
    x_ref: Any, w_ref: Any, source: Array, e: Array, column: Array, tiles: Tiles
) -> Float32[Array, "rows columns"]:
    """The product of a block, over all of K."""
    swapped = tiles.rows < _SWAPPED_BELOW
    columns = pl.ds(column * tiles.columns, tiles.columns)

    def step(i: Array, total: Array) -> Array:
        x = triton.load(x_ref.at[_grid(source, i, tiles.depth)])
        w = triton.load(w_ref.at[e, columns, pl.ds(i * tiles.depth, tiles.depth)])
        return total + (_dot(w, x) if swapped else _dot(x, w))

    shape = (tiles.columns, tiles.rows) if swapped else (tiles.rows, tiles.columns)
    total = lax.fori_loop(0, x_ref.shape[1] // tiles.depth, step, jnp.zeros(shape, jnp.float32))
    return total.T if swapped else total


def _dot(a: Array, b: Array) -> Array:
    """a @ b.T in float32."""
    contract = (((1,), (1,)), ((), ()))
    return lax.dot_general(a, b, contract, preferred_element_type=jnp.float32)
