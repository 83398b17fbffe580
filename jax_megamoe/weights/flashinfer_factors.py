"""Scales that FlashInfer's SM90 kernels decode exactly: a power of two moved out of each matrix.

The kernels make one E4M3 byte of a code times its scale, and multiply a matrix's result by one
float32 factor. E4M3 reaches 17 octaves, codes span 3.6 of them: what lies outside becomes 0, 448
(MXFP4) or NaN (NVFP4) without a word. So each matrix [..., N, K] of an expert gets an integer z:
its scales are stored times 2^z, and its factor is times 2^-z. Gate and up are one matrix here: they
share the factor. NumPy in NumPy out, JAX in JAX out (jit-able).
"""

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_megamoe.weights.flashinfer_layout import nvfp4_decoded

Array = Any
"""A NumPy or JAX array: in the same call all are of one kind."""

_MX_BLOCK, _NV_BLOCK = 32, 16
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# Scale bytes at which each magnitude decodes exactly; nothing bounds a 0.
_LOWEST = np.array([-999, 122, 121, 121, 120, 120, 119, 119], np.int32)
_HIGHEST = np.array([999, 136, 135, 135, 134, 134, 133, 133], np.int32)
_EXACT = (122, 133)
"""Scale bytes at which every code decodes exactly."""

_ROUNDED_BYTE = 121
"""At it the kernel has 0 and 1 to 6 times 2^-6, which is all that it has of numbers so small."""
# The magnitude at that byte nearest to one at s octaves less, for s = 0 to 4; half of the least
# goes to 0.
_NEAREST = np.array(
    [
        [0, 0, 2, 3, 4, 5, 6, 7],
        [0, 0, 0, 2, 2, 3, 4, 5],
        [0, 0, 0, 0, 0, 2, 2, 3],
        [0, 0, 0, 0, 0, 0, 0, 2],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ],
    np.uint8,
)

_KEPT = len(_NEAREST)
"""In place of octaves: the group stays as it is."""

_NV_LARGEST = 0x69
"""The largest E4M3 scale, 72: 6 times it is at most 448."""
_NV_SHIFTS = (-3, 15)
_NV_NORMAL = 0x10
"""From this scale on, 2^-5, no product is an E4M3 subnormal."""


class Fitted(NamedTuple):
    """A matrix with scales that the kernel decodes.

    Attributes:
        codes: uint8 pairs [..., N, K / 2].
        scales: uint8 [..., N, K / block].
        factor: float32 [...], power of two that the result is to be multiplied by.
        rounded: int32 [...], weights that are other numbers than before.
    """

    codes: Array
    scales: Array
    factor: Array
    rounded: Array


def fit_mxfp4(codes: Array, scales: Array) -> Fitted:
    """MXFP4 with weights that all decode exactly, wherever that is possible.

    It is when scales that belong to codes span at most 11 octaves, and often at more: what counts
    is the range of the weights that are not 0. Else the largest weight is put at the upper end, and
    groups below the lower end are rounded: by at most 2^-15 of the largest weight.

    Args:
        codes: uint8 [..., N, K / 2].
        scales: uint8 [..., N, K / 32], UE8M0 below 255.
    """
    if isinstance(codes, np.ndarray) and (fitted := _fit_few_octaves(codes, scales)):
        return fitted
    xp = np if isinstance(codes, np.ndarray) else jnp
    pairs = codes.reshape(*scales.shape, _MX_BLOCK // 2)
    found = xp.bitwise_or.reduce(xp.asarray(_pair_magnitudes())[pairs], axis=-1)
    lowest, highest = (xp.asarray(bounds)[found] for bounds in _bounds())
    stored = scales.astype(np.int32)
    upper = (highest - stored).min(axis=(-1, -2))
    lower = (lowest - stored).max(axis=(-1, -2))
    shift = xp.where(lower <= upper, xp.minimum(xp.maximum(lower, 0), upper), upper)
    # Nothing bounds a matrix of zeros.
    shift = xp.where(upper > _HIGHEST[1], 0, shift).astype(np.int32)
    moved = stored + shift[..., None, None]
    below = moved < lowest
    octaves = xp.where(below, xp.clip(_ROUNDED_BYTE - moved, 0, 4), _KEPT)
    moved = xp.where(below, _ROUNDED_BYTE, xp.clip(moved, 0, 254)).astype(np.uint8)
    recoded, rounded = _recode(xp, pairs, octaves)
    factor = _power_of_two(-shift)
    return Fitted(recoded.reshape(codes.shape), moved, factor, rounded.sum(axis=(-1, -2)))


def _recode(xp: Any, pairs: Array, octaves: Array) -> tuple[Array, Array]:
    """Codes [..., 16] rounded by groups, and int32 [...], how many are other numbers.

    Args:
        xp: numpy or jax.numpy.
        pairs: of codes.
        octaves: how far below `_ROUNDED_BYTE` a group's scale is, 0 to 4 or `_KEPT`.
    """
    table, others = (xp.asarray(each) for each in _recoded())
    if xp is jnp:
        index = octaves[..., None]
        return table[index, pairs], others[index, pairs].sum(axis=-1, dtype=np.int32)
    chosen = octaves != _KEPT
    codes, rounded = pairs.copy(), np.zeros(octaves.shape, np.int32)
    index = octaves[chosen][:, None]
    codes[chosen] = table[index, pairs[chosen]]
    rounded[chosen] = others[index, pairs[chosen]].sum(axis=-1)
    return codes, rounded


def _fit_few_octaves(codes: np.ndarray, scales: np.ndarray) -> Fitted | None:
    """`fit_mxfp4` by the scales alone; None where their spread does not suffice."""
    lower = _EXACT[0] - scales.min(axis=(-1, -2)).astype(np.int32)
    upper = _EXACT[1] - scales.max(axis=(-1, -2)).astype(np.int32)
    if (lower > upper).any():
        return None
    shift = np.minimum(np.maximum(lower, 0), upper).astype(np.int32)
    moved = (scales + shift[..., None, None]).astype(np.uint8)
    return Fitted(codes, moved, _power_of_two(-shift), np.zeros(shift.shape, np.int32))


def fit_nvfp4(codes: Array, scales: Array) -> Fitted:
    """NVFP4 none of whose weights decodes to NaN, and as few as can be to subnormal numbers.

    The largest scale comes to lie from 40 to 72. `rounded` counts the weights whose E4M3 is not the
    product of code and scale: 1.5, 3 and 6 under a scale whose mantissa is 1, 3, 5, 6 or 7 eighths
    (by up to 4.8 %), and small ones; all under a scale that had to be rounded as it was moved down.

    Args:
        codes: uint8 [..., N, K / 2].
        scales: uint8 [..., N, K / 16], E4M3 without sign.
    """
    xp = np if isinstance(codes, np.ndarray) else jnp
    *lead, rows, groups = scales.shape
    pairs = codes.reshape(*lead, rows, groups, _NV_BLOCK // 2)
    used = xp.where((pairs & 0x77).max(axis=-1) > 0, scales, 0)
    largest = xp.asarray(_extended())[used.max(axis=(-1, -2))]
    shift = (_NV_LARGEST - largest) // 8
    shift = xp.where(used.max(axis=(-1, -2)) == 0, 0, shift).astype(np.int32)
    index = (shift - _NV_SHIFTS[0])[..., None, None]
    table, kept = (xp.asarray(each) for each in _shifted())
    moved = table[index, scales]
    # Of the magnitudes 1.5, 3 and 6 the lowest bit is set and one above it.
    odd = pairs & ((pairs >> 1) | (pairs >> 2)) & 0x11
    counts = ((odd & 1) + (odd >> 4)).sum(axis=-1, dtype=np.int32)
    inexact = xp.where(xp.asarray(_is_inexact())[moved, 3], counts, 0)
    small = (moved < _NV_NORMAL) | ~kept[index, scales]
    if xp is jnp or bool(small.any()):
        by_table = _inexact_codes(xp, pairs, moved, kept[index, scales])
        inexact = xp.where(small, by_table, inexact)
    rounded = inexact.sum(axis=(-1, -2), dtype=np.int32)
    return Fitted(codes, moved, _power_of_two(-shift), rounded)


def _inexact_codes(xp: Any, pairs: Array, scales: Array, kept: Array) -> Array:
    """Codes of each group that do not decode to their product with the scale."""
    table = xp.asarray(_is_inexact())
    total = 0
    for codes in (pairs & 7, (pairs >> 4) & 7):
        wrong = table[scales[..., None], codes] | (~kept[..., None] & (codes > 0))
        total = total + wrong.sum(axis=-1, dtype=np.int32)
    return total


def _power_of_two(exponent: Array) -> Array:
    """2^exponent as float32, by bits, from -126 to 127."""
    bits = ((exponent + 127) << 23).astype(np.int32)
    if isinstance(bits, np.ndarray | np.generic):
        return np.asarray(bits).view(np.float32)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


@lru_cache
def _pair_magnitudes() -> np.ndarray:
    """uint8 [256]: which magnitudes are in a pair of codes, a bit each."""
    pairs = np.arange(256)
    return ((1 << (pairs & 7)) | (1 << (pairs >> 4 & 7))).astype(np.uint8)


@lru_cache
def _bounds() -> tuple[np.ndarray, np.ndarray]:
    """int32 [256] each: least and largest exact scale byte of groups by the magnitudes in them."""
    present = np.arange(256)[:, None] >> np.arange(8) & 1 == 1
    present[:, 0] = True
    return (
        np.where(present, _LOWEST, _LOWEST[0]).max(axis=1),
        np.where(present, _HIGHEST, _HIGHEST[0]).min(axis=1),
    )


@lru_cache
def _recoded() -> tuple[np.ndarray, np.ndarray]:
    """uint8 [6, 256]: pairs of codes by octaves and pair as `_NEAREST` rounds them; and how many of
    the two are other numbers then."""
    values, octaves = np.array(_MAGNITUDES), np.arange(_KEPT)[:, None]
    other = values[_NEAREST] != values / 2.0**octaves
    nearest = np.concatenate([_NEAREST, np.arange(8, dtype=np.uint8)[None]])
    other = np.concatenate([other, np.zeros((1, 8), bool)])
    pairs = np.arange(256)
    low, high = pairs & 7, pairs >> 4 & 7
    codes = (pairs & 0x88) | nearest[:, low] | (nearest[:, high] << 4)
    return codes.astype(np.uint8), other[:, low].astype(np.uint8) + other[:, high]


@lru_cache
def _extended() -> np.ndarray:
    """int32 [128]: scale bytes as if E4M3 had no subnormal numbers: eight steps an octave."""
    octets = np.arange(128, dtype=np.uint8)
    values = np.minimum(octets, 0x7E).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    mantissa, exponent = np.frexp(values)  # mantissa in [0.5, 1)
    return np.where(values > 0, 8 * (exponent + 6) + 16 * mantissa - 8, -16).astype(np.int32)


@lru_cache
def _shifted() -> tuple[np.ndarray, np.ndarray]:
    """Scale bytes times 2^z, uint8 [19, 128] for z from -3 to 15, and whether that is exact."""
    octets = np.arange(128, dtype=np.uint8)
    values = np.minimum(octets, 0x7E).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    powers = 2.0 ** np.arange(_NV_SHIFTS[0], _NV_SHIFTS[1] + 1, dtype=np.float32)
    # A scale above the largest belongs to zeros alone.
    products = np.minimum(values * powers[:, None], 448.0)
    table = products.astype(ml_dtypes.float8_e4m3fn)
    return table.view(np.uint8), table.astype(np.float32) == products


@lru_cache
def _is_inexact() -> np.ndarray:
    """bool [128, 8]: whether the kernel's byte is not the product of scale and magnitude."""
    octets = np.minimum(np.arange(128, dtype=np.uint8), 0x7E)
    scales = octets.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    decoded = nvfp4_decoded()[:, :8].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return decoded != scales[:, None] * np.array(_MAGNITUDES, np.float32)
