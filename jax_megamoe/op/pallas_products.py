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
from jax_megamoe.op import pallas_decode

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


def tiles_of(num_rows: int, num_experts: int, *, decoded: bool = False) -> Tiles:
    """Tiles for so many rows of so many experts.

    Blocks have half again an expert's even share, so that most experts are read once. The buffers
    of all stages fit the 99 KB of shared memory that consumer GPUs have.

    Args:
        num_rows: of all experts.
        num_experts: E.
        decoded: weights of 4 or 8 bits, with a scale for 128 of K.
    """
    share = 3 * num_rows // (2 * num_experts)
    rows = min(128, max(16, 1 << max(0, share - 1).bit_length()))
    if rows <= 32:
        return Tiles(rows, columns=64, depth=128, warps=4, stages=4)
    warps = 4 if rows == 64 else 8
    if decoded:
        return Tiles(rows, columns=128, depth=128, warps=8, stages=3 if rows == 64 else 2)
    return Tiles(rows, columns=128, depth=64, warps=warps, stages=3)


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


class Matrix(NamedTuple):
    """The experts' matrices as they are stored in a recipe of `pallas_experts.FORMATS`.

    Attributes:
        weight: [E, N, K], bfloat16 or float8_e4m3fn, or uint8 [E, N, K / 2].
        scale: UE8M0 words, int32 [E, K / 128, N], or float32 [E, N / 128, K / 128].
    """

    weight: Array
    scale: Array | None = None

    @property
    def depth(self) -> int:
        """K."""
        return self.weight.shape[2] * (2 if self.weight.dtype == jnp.uint8 else 1)


class Rows(NamedTuple):
    """What the experts multiply.

    Attributes:
        values: bfloat16 [rows, K]; beside uint8 weights `halves` of it.
        scale: float32 [rows, K / 128], beside weights with a float32 scale; else None.
    """

    values: BFloat16[Array, "*two rows k"]
    scale: Float32[Array, "rows blocks"] | None = None


class _Operands(NamedTuple):
    """What the kernel reads."""

    blocks: RowBlocks
    order: Any
    rows: Rows
    matrix: Matrix
    weighed: Weighed | None


def addressable(array: Array) -> bool:
    """Whether Pallas computes right offsets: it takes 32 bits, with a sign, up to 2^32 bytes."""
    return array.size < 2**31 or array.size * array.dtype.itemsize > 2**32


def halves(values: Float[Array, "rows k"]) -> Float[Array, "2 rows half"]:
    """Values of even and of odd k, as the two in a byte of weights."""
    return values.reshape(values.shape[0], -1, 2).transpose(2, 0, 1)


def product(
    rows: Rows,
    matrix: Matrix,
    order: Int32[Array, " slots"],
    blocks: RowBlocks,
    weighed: Weighed | None = None,
    *,
    tiles: Tiles,
    top_k: int | None,
    interleaved: bool = False,
    dtype: Any = jnp.bfloat16,
    interpret: bool = False,
) -> Float[Array, "slots n"]:
    """Each row times its expert's matrix, transposed, summed in float32.

    Args:
        rows: tokens, slot s of which is row s // top_k; with top_k None: sorted by expert.
        matrix: of each expert.
        order: the slots, sorted by expert.
        blocks: of the sorted rows.
        weighed: biases.
        tiles: how the product is cut.
        top_k: slots of a token.
        interleaved: the matrix' rows are gate and up in turns of 8.
        dtype: of the result.
        interpret: by JAX instead of the GPU, for tests.

    Returns:
        With top_k the sorted rows, without it the slots in their own order; undefined in rows
        without an expert.
    """
    operands = _Operands(blocks, order, rows, matrix, weighed)
    axes = frozenset[str]().union(*map(varying_axes, jax.tree.leaves(operands)))
    operands = jax.tree.map(lambda each: vary(each, axes), operands)
    width = matrix.weight.shape[1]
    kernel = partial(
        _kernel, tiles=tiles, top_k=top_k, interleaved=interleaved, assembled=not interpret
    )
    varying = jax.typeof(operands.order).manual_axis_type
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((order.shape[0], width), dtype, manual_axis_type=varying),
        grid=(width // tiles.columns, blocks.expert.shape[0]),
        compiler_params=triton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="mega_moe_product",
    )(operands)


def _kernel(
    refs: _Operands,
    out_ref: Any,
    *,
    tiles: Tiles,
    top_k: int | None,
    interleaved: bool,
    assembled: bool,
) -> None:
    """A block of rows times `tiles.columns` rows of its expert's matrix.

    Columns come first in the grid: blocks of one expert run close together, and find its matrix in
    the L2 cache.
    """
    column, block = pl.program_id(0), pl.program_id(1)
    e = refs.blocks.expert[block]

    @pl.when(e >= 0)
    def _() -> None:
        start, stop = refs.blocks.start[block], refs.blocks.stop[block]
        row = start + jnp.arange(tiles.rows, dtype=jnp.int32)
        inside = row < stop
        # Past the end the first row is read again, and not stored: loads need no mask.
        row = jnp.where(inside, row, start)
        slot = triton.load(refs.order.at[row])
        source = row if top_k is None else slot // top_k
        total = _summed(refs, source, e, column, tiles, interleaved, assembled)
        if refs.weighed is not None:
            columns = pl.ds(column * tiles.columns, tiles.columns)
            bias = jnp.broadcast_to(refs.weighed.bias[e, columns][None, :], total.shape)
            if refs.weighed.factor is not None:
                factor = triton.load(refs.weighed.factor.at[slot])
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
    refs: _Operands,
    source: Array,
    e: Array,
    column: Array,
    tiles: Tiles,
    interleaved: bool,
    assembled: bool,
) -> Float32[Array, "rows columns"]:
    """The product of a block, over all of K."""
    matrix: Any = refs.matrix
    depth = tiles.depth
    # Decoded weights stay in registers, which only a tensor core's first operand can.
    swapped = matrix.scale is not None or tiles.rows < _SWAPPED_BELOW
    columns = pl.ds(column * tiles.columns, tiles.columns)
    decoded = partial(pallas_decode.decoded, assembled=assembled)
    stored = depth // 2 if matrix.weight.dtype == jnp.uint8 else depth

    def load_rows(i: Array, *half: int) -> Array:
        return triton.load(refs.rows.values.at[(*half, *_grid(source, i, stored))])

    def load_scales(i: Array, each: int) -> Array:
        row = column * tiles.columns + jnp.arange(tiles.columns, dtype=jnp.int32)
        words = triton.load(matrix.scale.at[e, i, pallas_decode.word_rows(row)])
        return pallas_decode.spread_scales(words, each)

    def step(i: Array, total: Array) -> Array:
        w = triton.load(matrix.weight.at[e, columns, pl.ds(i * stored, stored)])
        if matrix.scale is None:
            x = load_rows(i)
            return total + (_dot(w, x) if swapped else _dot(x, w))
        if w.dtype == jnp.uint8:
            scales = load_scales(i, 16)
            for half, name in enumerate(("e2m1 even", "e2m1 odd")):
                values = decoded(name, w, scales)
                total = total + _dot(values, load_rows(i, half))
            return total
        if matrix.scale.dtype == jnp.int32:
            return total + _dot(decoded("e4m3", w, load_scales(i, 32)), load_rows(i))
        row_scale: Any = refs.rows.scale
        of_rows = triton.load(row_scale.at[source, i])
        of_columns = _column_scales(matrix, e, column, i, tiles.columns, interleaved)
        scale = jnp.broadcast_to(of_rows[None, :], total.shape) * of_columns
        return total + _dot(decoded("e4m3", w, None), load_rows(i)) * scale

    shape = (tiles.columns, tiles.rows) if swapped else (tiles.rows, tiles.columns)
    num_steps = refs.rows.values.shape[-1] // stored
    total = lax.fori_loop(0, num_steps, step, jnp.zeros(shape, jnp.float32))
    return total.T if swapped else total


def _column_scales(
    matrix: Any, e: Array, column: Array, i: Array, size: int, interleaved: bool
) -> Array:
    """The float32 scales of some columns and of 128 of K: [columns, 1], or one for all."""
    first = column * size
    if not interleaved:
        return matrix.scale[e, first // 128, i]
    gate = first // 256
    half = matrix.scale.shape[1] // 2
    of_gate, of_up = matrix.scale[e, gate, i], matrix.scale[e, half + gate, i]
    is_up = jnp.arange(size, dtype=jnp.int32) // 8 % 2 == 1
    return jnp.where(is_up, of_up, of_gate)[:, None]


def _dot(a: Array, b: Array) -> Array:
    """a @ b.T in float32."""
    contract = (((1,), (1,)), ((), ()))
    return lax.dot_general(a, b, contract, preferred_element_type=jnp.float32)
