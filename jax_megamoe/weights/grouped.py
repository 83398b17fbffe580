"""Weight layouts of the grouped products: permutations of words and scales, each with its inverse.

Arrays have leading axes, then [N, K] of one matrix; NumPy in, NumPy out, JAX in, JAX out.
Source: Humming's kernels read each lane's share of a tensor-core tile in one load. Which order that
is follows from the bits of a weight and of the rows it multiplies:

- ``flat``: as wide as the rows. Pieces of 16 bytes of each row, those of one depth together.
- ``packed``: narrower. In tiles of 64 rows and 64 columns a lane's values are words of their own,
  the values of a word in the order that its decoding leaves them.
- ``fused``: MXFP4 under E4M3 rows: block scales become exponents of E4M3, so that at most 12 powers
  of two are left under a second scale; words differ in the place of the sign.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_megamoe import _checks
from jax_megamoe.formats import GROUPED_BF16, GROUPED_ROWS, WeightFormat

Array = Any
"""A NumPy or a JAX array; results are of the same kind."""

FUSED_BINADES = 12
"""Block scales that fused MXFP4 tells apart under one second scale."""


def numpy_or_jax(array: Array) -> Any:
    """The module that the array is of."""
    return np if isinstance(array, np.ndarray) else jnp


def to_flat(weight: Array) -> Array:
    """Bytes [..., N, B] as [..., B / 16, N, 16].

    Raises:
        ValueError: B is not a multiple of 16.
    """
    *lead, n, num_bytes = weight.shape
    _checks.multiple("bytes of a row", num_bytes, 16)
    return weight.reshape(*lead, n, num_bytes // 16, 16).swapaxes(-2, -3)


def from_flat(weight: Array) -> Array:
    """The inverse of `to_flat`."""
    *lead, pieces, n, _ = weight.shape
    return weight.swapaxes(-2, -3).reshape(*lead, n, pieces * 16)


class Packing(NamedTuple):
    """How codes become words.

    Attributes:
        bits: of a code.
        row_bits: of a value of the rows that the weight multiplies.
        fused: signs alone are shuffled.
        packed_k: 64 columns make one row of words.
    """

    bits: int
    row_bits: int
    fused: bool = False
    packed_k: bool = False

    @property
    def per_word(self) -> int:
        """Codes of a 32-bit word."""
        return 32 // self.bits

    @property
    def shuffle(self) -> np.ndarray:
        """Which value of a lane's eight or four a word has at each place."""
        values = 32 // self.row_bits
        half = self.per_word // values
        places = np.arange(self.per_word)
        return places % half * values + places // half

    def tiles(self, n: int, k: int) -> tuple[int, ...]:
        """[N, K] as an array of 64 by 64: (rows, 2, 2, 2, 8, columns, steps of depth, 2, 4,
        values)."""
        return (n // 64, 2, 2, 2, 8, k // 64, self.row_bits // 4, 2, 4, 32 // self.row_bits)

    @property
    def order(self) -> tuple[int, ...]:
        """Axes of `tiles` as the words have them, slowest first. A lane is (8, 4), axes 4 and 8; a
        word takes the last values."""
        if self.packed_k:
            return (5, 0, 1, 2, 4, 8, 6, 3, 7, 9)
        if self.row_bits == 8:
            return (5, 6, 0, 1, 4, 8, 2, 3, 7, 9)
        return (5, 6, 0, 4, 8, 1, 2, 3, 7, 9)


def pack(codes: Array, packing: Packing) -> Array:
    """Codes, uint8 [..., N, K], as int32 words [..., K / d, N d bits / 32], d = 256 / row_bits
    columns in a row of words, or 64.

    Raises:
        ValueError: N or K is not a multiple of 64.
    """
    xp = numpy_or_jax(codes)
    *lead, n, k = codes.shape
    _checks.multiple("rows of a packed matrix", n, 64)
    _checks.multiple("columns of a packed matrix", k, 64)
    tiled = codes.reshape(*lead, *packing.tiles(n, k))
    first = len(lead)
    axes = (*range(first), *(first + axis for axis in packing.order))
    values = tiled.transpose(axes).reshape(*lead, -1, packing.per_word).astype(xp.uint32)
    sign = xp.uint32(1 << (packing.bits - 1))
    shuffled = values[..., packing.shuffle]
    plain = values if packing.fused else shuffled
    codes32 = (plain & (sign - xp.uint32(1))) | (shuffled & sign)
    words = (codes32 << _shifts(packing, codes32)).sum(-1, dtype=xp.uint32)
    depth = _depth(packing)
    return words.reshape(*lead, k // depth, n * depth * packing.bits // 32).view(xp.int32)


def unpack(words: Array, packing: Packing, n: int, k: int) -> Array:
    """Codes, uint8 [..., n, k], of `pack`'s words."""
    xp = numpy_or_jax(words)
    *lead, _, _ = words.shape
    flat = words.view(xp.uint32).reshape(*lead, -1, 1)
    codes32 = (flat >> _shifts(packing, flat)) & xp.uint32((1 << packing.bits) - 1)
    sign = xp.uint32(1 << (packing.bits - 1))
    back = np.argsort(packing.shuffle)
    shuffled = codes32[..., back]
    plain = codes32 if packing.fused else shuffled
    values = ((plain & (sign - xp.uint32(1))) | (shuffled & sign)).astype(xp.uint8)
    order = packing.order
    sizes = packing.tiles(n, k)
    first = len(lead)
    tiled = values.reshape(*lead, *(sizes[axis] for axis in order))
    back_order = (first + int(axis) for axis in np.argsort(order))
    return tiled.transpose(*range(first), *back_order).reshape(*lead, n, k)


def _depth(packing: Packing) -> int:
    return 64 if packing.packed_k else 256 // packing.row_bits


def _shifts(packing: Packing, like: Array) -> Array:
    """The place of each code of a word, on the last axis of as many as `like` has."""
    xp = numpy_or_jax(like)
    places = xp.arange(packing.per_word, dtype=xp.uint32) * xp.uint32(packing.bits)
    return places.reshape(*(1,) * (like.ndim - 1), -1)


def transpose_eights(scales: Array) -> Array:
    """The last axis in eights, each 8 by 8 transposed: scales by group. Its own inverse."""
    *lead, n = scales.shape
    _checks.multiple("rows of scales", n, 64)
    return scales.reshape(*lead, n // 64, 8, 8).swapaxes(-1, -2).reshape(*lead, n)


def to_thirtytwos(rows: Array) -> Array:
    """Biases and second scales [..., N]: in each 32, place 8i + 2j + k has row 8j + 2i + k.
    Its own inverse."""
    *lead, n = rows.shape
    _checks.multiple("rows of biases", n, 32)
    return rows.reshape(*lead, n // 32, 4, 4, 2).swapaxes(-2, -3).reshape(*lead, n)


class Fused(NamedTuple):
    """MXFP4 with its block scales folded into exponents of E4M3.

    Attributes:
        codes: uint8 [..., N, K]; those of blocks far below the largest are rounded.
        scale: uint8 [..., N, G], 1 to 12.
        lowest: int32 [..., 1, 1] or [..., N, 1], the UE8M0 byte that a block scale of 1 stands for.
    """

    codes: Array
    scale: Array
    lowest: Array


def fuse(codes: Array, scale: Array, *, by_row: bool) -> Fused:
    """Block scales relative to the largest of their matrix, or of their row.

    A block more than 11 powers of two below the largest gets the lowest scale, and its values are
    rounded to E2M1 under it, ties away from zero: at most 2^-13 of the largest value. There is no
    negative zero.

    Args:
        codes: E2M1 codes, uint8 [..., N, K].
        scale: UE8M0 bytes, uint8 [..., N, K / 32].
        by_row: each row has a second scale of its own.
    """
    xp = numpy_or_jax(codes)
    axes = (-1,) if by_row else (-2, -1)
    bytes_ = scale.astype(xp.int32)
    top = bytes_.max(axis=axes, keepdims=True)
    lowest = xp.maximum(bytes_.min(axis=axes, keepdims=True), top - (FUSED_BINADES - 1))
    raised = xp.maximum(bytes_, lowest)
    delta = xp.repeat(raised - bytes_, 32, axis=-1)
    new = (raised - lowest + 1).astype(xp.uint8)
    return Fused(_lowered(codes, delta), new, lowest)


_E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.float32)


def _lowered(codes: Array, delta: Array) -> Array:
    """E2M1 codes of values times 2^-delta, ties away from zero."""
    xp = numpy_or_jax(codes)
    magnitude = codes & xp.uint8(7)
    values = xp.asarray(_E2M1_DOUBLED)[magnitude] * xp.exp2(
        -xp.minimum(delta, 30).astype(xp.float32)
    )
    lowered = xp.zeros(codes.shape, xp.uint8)
    for boundary in (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0):
        lowered = lowered + (values >= boundary).astype(xp.uint8)
    sign = xp.where(magnitude == 0, xp.uint8(0), codes & xp.uint8(8))
    return lowered | sign


def fuses_exactly(codes: Array, scale: Array) -> Array:
    """Whether `fuse` by matrix changes no value, [...]."""
    xp = numpy_or_jax(codes)
    bytes_ = scale.astype(xp.int32)
    blocks = codes.reshape(*scale.shape, -1)
    used = ((blocks & xp.uint8(7)) != 0).any(axis=-1)
    top = bytes_.max(axis=(-2, -1), keepdims=True)
    far = used & (bytes_ < top - (FUSED_BINADES - 1))
    return ~far.any(axis=(-2, -1))


def unfuse(scale: Array, lowest: Array) -> Array:
    """UE8M0 bytes, uint8 [..., N, G], of a `Fused`."""
    xp = numpy_or_jax(scale)
    return (scale.astype(xp.int32) + lowest - 1).astype(xp.uint8)


def second_scale(lowest: Array) -> Array:
    """The float32 2^(lowest - 128) that fused products are multiplied by."""
    xp = numpy_or_jax(lowest)
    # Bytes 0 and 1 stand for denormal numbers.
    bits = xp.where(lowest >= 2, (lowest - 1) << 23, xp.where(lowest == 1, 1 << 22, 1 << 21))
    return bits.astype(xp.int32).view(xp.float32)


def lowest_of(second: Array) -> Array:
    """The inverse of `second_scale`, int32."""
    xp = numpy_or_jax(second)
    bits = second.view(xp.int32)
    small = xp.where(bits >= 1 << 22, 1, 0)
    return xp.where(bits >= 1 << 23, (bits >> 23) + 1, small)


def padded_rows(n: int) -> int:
    """Rows of a matrix as it is stored."""
    return -(-n // GROUPED_ROWS) * GROUPED_ROWS


def packing(form: WeightFormat, layout: str) -> Packing | None:
    """How a format's codes are packed in a layout; None: they stay bytes, in flat order."""
    bits = form.weight.bits
    if layout == GROUPED_BF16:
        return Packing(bits, 16)
    return None if bits == 8 else Packing(bits, 8, fused=True, packed_k=True)


def is_fused(form: WeightFormat, layout: str) -> bool:
    """Whether a format's block scales become exponents of its codes in a layout."""
    how = packing(form, layout)
    return how is not None and how.fused


def shapes(
    form: WeightFormat, layout: str, hidden: int, inter: int, num_experts: int, *, by_row: bool
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of the routed matrices and their scales, by field name.

    Args:
        form: the weight format.
        layout: of the grouped products'.
        hidden, inter: H and I.
        num_experts: E.
        by_row: a fused MXFP4 matrix has a second scale for each row.
    """
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    how, spec = packing(form, layout), form.weight
    for name, rows, k in zip(
        ("w13_weight", "w2_weight"), (2 * inter, hidden), (hidden, inter), strict=True
    ):
        n = padded_rows(rows)
        if how is None:
            weight = ((num_experts, k // 16, n, 16), "uint8")
        else:
            depth = 64 if how.packed_k else 256 // how.row_bits
            weight = ((num_experts, k // depth, n * depth * how.bits // 32), "int32")
        if spec.scale == "float32":
            scale = ((num_experts, k // 128, n // 128), "float32")
        else:
            scale = ((num_experts, k // spec.block[1], n), "uint8")
        found[name], found[f"{name}_scale"] = weight, scale
        if how is not None and how.fused:
            by_matrix, of_rows = ((num_experts,), "float32"), ((num_experts, n), "bfloat16")
            found[f"{name}_scale_2"] = of_rows if by_row else by_matrix
    return found
