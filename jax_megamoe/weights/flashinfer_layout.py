"""How FlashInfer's SM90 kernels read 4-bit weights: braided codes, and scales among them.

Matrices are [..., N, K] in checkpoint order: codes as uint8 pairs [..., N, K / 2], the even k in
the low nibble, and scale bytes [..., N, K / block]. NumPy in NumPy out, JAX in JAX out (jit-able).
Both layouts are bijective and do not depend on a launch. Which scales the kernels decode exactly
is `flashinfer_factors`' matter.
"""

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_megamoe import _checks
from jax_megamoe.numerics.elements import Array, pack_words, unpack_words
from jax_megamoe.weights.layout import INTERLEAVE8

TILE = 128
"""Rows and columns of a tile."""
TILE_BYTES = TILE * TILE // 2 + TILE * 4
"""MXFP4: 8192 bytes of codes and 512 of scales."""
ROW_BYTES = 80
"""NVFP4: of a row and 128 columns: 64 bytes of codes, 8 scales, 8 zeros."""

_CODE_BYTES = 64
_MX_SCALES, _NV_SCALES = 4, 8
_MAGNITUDES = 0x77777777
# Nibble i of a word of eight codes holds the sign of code _SIGNS[i].
_SIGNS = (4, 0, 5, 1, 6, 2, 7, 3)


def interleave_rows(rows: Array) -> Array:
    """w13's rows [..., 2I, K], gate rows first, in turns of 8 of gate and up: codes and scales."""
    return INTERLEAVE8.apply(rows)


def separate_rows(rows: Array) -> Array:
    """The inverse of `interleave_rows`."""
    return INTERLEAVE8.undo(rows)


def mxfp4_tiles(codes: Array, scales: Array) -> Array:
    """MXFP4 [..., N, K] as the kernel's tiles, uint8 [..., N / 128, K / 128, 8704].

    In a tile lie for each 32 columns 16 bytes of codes of each of the 128 rows, then each row's
    four scale bytes.

    Args:
        codes: uint8 [..., N, K / 2].
        scales: uint8 [..., N, K / 32], UE8M0.

    Raises:
        ValueError: N or K is not a multiple of 128.
    """
    *lead, rows, columns = codes.shape
    _checks.multiple("rows of MXFP4 tiles", rows, TILE)
    _checks.multiple("columns of MXFP4 tiles", 2 * columns, TILE)
    down, across = rows // TILE, 2 * columns // TILE
    front = range(len(lead))
    i, j, k, m = (len(lead) + axis for axis in range(4))
    split = _braid(codes).reshape(*lead, down, TILE, across, _MX_SCALES, 16)
    parts = split.transpose(*front, i, k, m, j, m + 1).reshape(*lead, down, across, -1)
    of_rows = scales.reshape(*lead, down, TILE, across, _MX_SCALES).transpose(*front, i, k, j, m)
    return _xp(codes).concatenate([parts, of_rows.reshape(*lead, down, across, -1)], axis=-1)


def mxfp4_from_tiles(tiles: Array) -> tuple[Array, Array]:
    """Codes and scales of tiles [..., N / 128, K / 128, 8704]: `mxfp4_tiles`' inverse."""
    *lead, down, across, _ = tiles.shape
    rows = TILE * down
    front = range(len(lead))
    i, j, k, m = (len(lead) + axis for axis in range(4))
    parts = tiles[..., : TILE * _CODE_BYTES].reshape(*lead, down, across, _MX_SCALES, TILE, 16)
    codes = parts.transpose(*front, i, m, j, k, m + 1).reshape(*lead, rows, -1)
    of_rows = tiles[..., TILE * _CODE_BYTES :].reshape(*lead, down, across, TILE, _MX_SCALES)
    scales = of_rows.transpose(*front, i, k, j, m).reshape(*lead, rows, -1)
    return _unbraid(codes), scales


def nvfp4_rows(codes: Array, scales: Array) -> Array:
    """NVFP4 [..., N, K] as the kernel's rows, uint8 [..., N, 80 K / 128].

    Args:
        codes: uint8 [..., N, K / 2].
        scales: uint8 [..., N, K / 16], E4M3.

    Raises:
        ValueError: K is not a multiple of 128.
    """
    *lead, rows, columns = codes.shape
    _checks.multiple("columns of NVFP4 rows", 2 * columns, TILE)
    across = 2 * columns // TILE
    xp = _xp(codes)
    parts = [
        _braid(codes).reshape(*lead, rows, across, _CODE_BYTES),
        scales.reshape(*lead, rows, across, _NV_SCALES),
        xp.zeros((*lead, rows, across, ROW_BYTES - _CODE_BYTES - _NV_SCALES), np.uint8),
    ]
    return xp.concatenate(parts, axis=-1).reshape(*lead, rows, across * ROW_BYTES)


def nvfp4_from_rows(stored: Array) -> tuple[Array, Array]:
    """Codes and scales of the kernel's rows [..., N, 80 K / 128]: `nvfp4_rows`' inverse."""
    *lead, rows, width = stored.shape
    parts = stored.reshape(*lead, rows, width // ROW_BYTES, ROW_BYTES)
    codes = parts[..., :_CODE_BYTES].reshape(*lead, rows, -1)
    scales = parts[..., _CODE_BYTES : _CODE_BYTES + _NV_SCALES].reshape(*lead, rows, -1)
    return _unbraid(codes), scales


def mxfp4_decoded() -> np.ndarray:
    """The E4M3 byte that the kernel makes of a scale byte and a code, uint8 [256, 16].

    The exponent is added to the element's byte: exact, or 0 below the normal numbers and 448 above
    them. Scale byte 255 counts as a large exponent, not as NaN.
    """
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], ml_dtypes.float8_e4m3fn)
    elements = magnitudes.view(np.uint8).astype(int)
    shift = 8 * (np.arange(256)[:, None] - 127)
    octets = np.clip(elements + np.clip(shift, -255, 255), 0, 0x7E)
    octets = np.where((octets < 8) | (elements == 0), 0, octets).astype(np.uint8)
    return np.concatenate([octets, octets | 0x80], axis=1)


def nvfp4_decoded() -> np.ndarray:
    """The E4M3 byte that the kernel makes of a scale byte and a code, uint8 [128, 16].

    It is the nearest to their product, NaN above 448. Scales have no sign, and byte 0x7f counts as
    0x7e.
    """
    octets = np.minimum(np.arange(128, dtype=np.uint8), 0x7E)
    scales = octets.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    products = scales[:, None] * np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    table = products.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.concatenate([table, table | 0x80], axis=1)


def _xp(array: Any) -> Any:
    return np if isinstance(array, np.ndarray) else jnp


def _braid(codes: Array) -> Array:
    """Signs moved to where the decoder reads them, in words of eight codes."""
    return _moved_signs(codes, tuple((source, i) for i, source in enumerate(_SIGNS)))


def _unbraid(codes: Array) -> Array:
    """The inverse of `_braid`."""
    return _moved_signs(codes, tuple((i, source) for i, source in enumerate(_SIGNS)))


def _moved_signs(codes: Array, moves: tuple[tuple[int, int], ...]) -> Array:
    """uint8 pairs [..., K / 2] with sign bits moved from one nibble of a word to another."""
    words = pack_words(codes).astype(np.uint32)
    moved = words & np.uint32(_MAGNITUDES)
    for source, target in moves:
        sign = words & np.uint32(8 << 4 * source)
        shift = np.uint32(4 * abs(target - source))
        moved = moved | (sign << shift if target > source else sign >> shift)
    return unpack_words(moved.astype(np.int32))
