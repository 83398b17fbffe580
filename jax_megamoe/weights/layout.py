"""Row orders and scale words of the kernels' parameters: permutations, each with its inverse.

Arrays are [..., N, K] in any dtype, NumPy in NumPy out, JAX in JAX out (jit-able). Source:
DeepGEMM's kernels read the rows of gate and up in turns, and block scales in the order in
which the tensor core copies them (UTCCP): four bytes along K in one int32 word, the words of
one k beside each other.
"""

from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from jax_megamoe import _checks
from jax_megamoe.formats import FLASHINFER_MXFP4, FLASHINFER_NVFP4
from jax_megamoe.numerics.elements import Array, pack_words, unpack_words


@dataclass(frozen=True)
class RowOrder:
    """A permutation of rows: the axes of an array of shape `factors` are permuted.

    Attributes:
        name: what messages call it.
        factors: sizes of the axes; the one -1 takes what is left.
        order: source axis of each output axis.
    """

    name: str
    factors: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def multiple(self) -> int:
        """The number of rows is a multiple of this."""
        return abs(int(np.prod(self.factors)))

    def apply(self, rows: Array, axis: int = -2) -> Array:
        """`rows` in the new order along `axis`.

        Raises:
            ValueError: the size of `axis` is not a multiple of `multiple`.
        """
        return self._permuted(rows, axis, self.order, inverse=False)

    def undo(self, rows: Array, axis: int = -2) -> Array:
        """The inverse of `apply`."""
        order = tuple(int(i) for i in np.argsort(self.order))
        return self._permuted(rows, axis, order, inverse=True)

    def half(self, rows: Array, which: int, axis: int = -2) -> Array:
        """The first (0) or second (1) half of the source rows, out of rows in this order.

        Takes it before it permutes: XLA then multiplies as it would without either, and results
        over several ranks keep the bits of one rank's.

        Raises:
            ValueError: the size of `axis` is not a multiple of `multiple`.
        """
        shape = rows.shape
        axis %= len(shape)
        split = self._split(rows, axis, stored=True)
        taken = split[(*(slice(None),) * (axis + self.order.index(0)), which)]
        kept = [i for i in self.order if i]
        moved = (axis + int(i) for i in np.argsort(kept))
        after = range(axis + len(kept), taken.ndim)
        ordered = taken.transpose(*range(axis), *moved, *after)
        return ordered.reshape(*shape[:axis], shape[axis] // 2, *shape[axis + 1 :])

    def _split(self, rows: Array, axis: int, *, stored: bool) -> Array:
        """`rows` with `axis` (not negative) as axes of their own for the factors, in the stored
        order or the source's."""
        shape = rows.shape
        _checks.multiple(f"rows in {self.name} order", shape[axis], self.multiple)
        rest = shape[axis] // self.multiple
        factors = [rest if factor == -1 else factor for factor in self.factors]
        if stored:
            factors = [factors[i] for i in self.order]
        return rows.reshape(*shape[:axis], *factors, *shape[axis + 1 :])

    def _permuted(self, rows: Array, axis: int, order: tuple[int, ...], *, inverse: bool) -> Array:
        shape = rows.shape
        axis %= len(shape)
        split = self._split(rows, axis, stored=inverse)
        moved = [axis + i for i in order]
        after = range(axis + len(order), split.ndim)
        return split.transpose(*range(axis), *moved, *after).reshape(shape)


INTERLEAVE8 = RowOrder("interleave8", (2, -1, 8), (1, 0, 2))
"""Turns of 8 rows: r of gate (half 0) or up (half 1) at (r // 8) * 16 + 8 half + r % 8."""

SGL_FP4 = RowOrder("sgl_fp4", (2, -1, 8, 2), (1, 3, 0, 2))
"""16 rows of gate and of up in 32: gate even, up even, gate odd, up odd, 8 rows each."""

UTCCP = RowOrder("utccp", (-1, 4, 32), (0, 2, 1))
"""Scale rows: within each 128, 32 j + i at 4 i + j."""

W13_LAYOUTS = MappingProxyType(
    {order.name: order for order in (INTERLEAVE8, SGL_FP4)}
    | dict.fromkeys((FLASHINFER_MXFP4, FLASHINFER_NVFP4), INTERLEAVE8)
)
"""Row orders of w13 by the tag that parameters carry: the vllm source (and sgl for FP8 and BF16),
the sgl source for NVFP4, and the flashinfer source."""


SGL_TILE = 32
"""Rows of a tile in sgl's NVFP4 order."""


def split_rows(rows: Array, layout: str, axis: int = -2) -> Array:
    """Rows of w13 in a kernel's order as parameters hold them: ``sgl_fp4`` with an axis of tiles.

    So an array's shape says its order, and no array in one order passes for one in the other.

    Args:
        rows: any array with w13's rows.
        layout: their order.
        axis: of the rows; with ``sgl_fp4`` it becomes [2I / 32, 32].
    """
    if layout != SGL_FP4.name:
        return rows
    axis %= rows.ndim
    return rows.reshape(*rows.shape[:axis], -1, SGL_TILE, *rows.shape[axis + 1 :])


def join_rows(array: Array, layout: str, axis: int = -2) -> Array:
    """The inverse of `split_rows`; `axis` has the rows in the result."""
    if layout != SGL_FP4.name:
        return array
    axis %= array.ndim - 1
    return array.reshape(*array.shape[:axis], -1, *array.shape[axis + 2 :])


def w13_to_kernel(weight: Array, layout: str, axis: int = -2) -> Array:
    """w13 [..., 2I, K] or any array with its rows, gate rows first, in the kernel's row order.

    Raises:
        ValueError: an unknown layout, or 2I is not a multiple of its period.
    """
    return _w13_order(layout).apply(weight, axis)


def w13_from_kernel(weight: Array, layout: str, axis: int = -2) -> Array:
    """The inverse of `w13_to_kernel`."""
    return _w13_order(layout).undo(weight, axis)


def gate_and_up(w13: Array, layout: str, axis: int = -2) -> tuple[Array, Array]:
    """Gate and up out of w13, or out of any array with its rows in the kernel's order."""
    order = _w13_order(layout)
    return order.half(w13, 0, axis), order.half(w13, 1, axis)


def pack_scales(scales: Array) -> Array:
    """Scale bytes [..., N, G] as int32 words [..., G / 4, N], the lowest k in the lowest byte.

    Raises:
        TypeError: not uint8, float8_e8m0fnu or float8_e4m3fn.
        ValueError: G is not a multiple of 4.
    """
    return pack_words(scales).swapaxes(-1, -2)


def unpack_scales(words: Array) -> Array:
    """Scale bytes, uint8 [..., N, G], of int32 words [..., G / 4, N]: the inverse of `pack_scales`.

    Raises:
        TypeError: not int32.
    """
    return unpack_words(words.swapaxes(-1, -2))


def w13_scale_to_kernel(scale: Array, layout: str) -> Array:
    """Scale bytes of w13 [..., 2I, G], gate rows first, as the kernel's int32 [..., G / 4, 2I].

    Raises:
        TypeError: not uint8, float8_e8m0fnu or float8_e4m3fn.
        ValueError: an unknown layout, 2I is not a multiple of 128, or G not of 4.
    """
    return w2_scale_to_kernel(w13_to_kernel(scale, layout))


def w13_scale_from_kernel(words: Array, layout: str) -> Array:
    """Scale bytes, uint8 [..., 2I, G]: the inverse of `w13_scale_to_kernel`."""
    return w13_from_kernel(w2_scale_from_kernel(words), layout)


def w2_scale_to_kernel(scale: Array) -> Array:
    """Scale bytes of w2 [..., H, G] as the kernel's words, int32 [..., G / 4, H].

    Raises:
        TypeError: not uint8, float8_e8m0fnu or float8_e4m3fn.
        ValueError: H is not a multiple of 128, or G not of 4.
    """
    return pack_scales(UTCCP.apply(scale))


def w2_scale_from_kernel(words: Array) -> Array:
    """Scale bytes, uint8 [..., H, G]: the inverse of `w2_scale_to_kernel`."""
    return UTCCP.undo(unpack_scales(words))


def _w13_order(layout: str) -> RowOrder:
    _checks.one_of("layout", layout, W13_LAYOUTS)
    return W13_LAYOUTS[layout]
