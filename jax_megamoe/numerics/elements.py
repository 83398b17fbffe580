"""The elements that block formats are made of (E2M1, E4M3, UE8M0), and exact float32 arithmetic on
blocks of them.

Four things stand between XLA and the same bits everywhere, eager and jitted, and are worked around
here. It rewrites a division by a constant or by a broadcast into a multiplication, and on GPUs its
quotients are off by up to two units in the last place (`divide`). On GPUs it drops casts there and
back (`from_e4m3`). Its CPU backend takes denormals for zero: block maxima, exponents and scalings
are done on the integer bits of the floats.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jax_megamoe import _checks

Array = TypeVar("Array", jax.Array, np.ndarray)

_NAN_BITS = np.int32(0x7FC00000)
_NAN_BYTE = np.uint8(0x7F)

E4M3_MAX = 448.0
E2M1_MAX = 6.0

_MAX_UNITS_OFF = 6
"""Of an approximate quotient: PTX's div.full.f32 is within 2, and a shift may add one."""
_INFINITY = 0x7F800000
_NAN = 0x7FC00000
_BOUNDARIES = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)
"""Midpoints between the E2M1 magnitudes, and whether the midpoint itself rounds up (to the even
code)."""


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1_SIGNED = np.concatenate([_E2M1, -_E2M1]).astype(jnp.bfloat16)
_E2M1_PAIRS = np.stack([np.tile(_E2M1_SIGNED, 16), np.repeat(_E2M1_SIGNED, 16)], -1).view(np.uint32)
_E2M1_PAIRS = _E2M1_PAIRS[:, 0]
"""The two BF16 values in each byte of an E2M1 pair, the low nibble's in the low half."""


def ue8m0_to_float32(exponents: ArrayLike) -> jax.Array:
    """2^(b - 127) of UE8M0 bytes (uint8 or float8_e8m0fnu), float32, by bits: 0 gives 2^-127, 255
    NaN.

    Raises:
        TypeError: another dtype.
    """
    bits = ue8m0_bytes("exponents", exponents).astype(jnp.int32)
    shifted = jnp.where(bits == 0, 1 << 22, jnp.where(bits == 255, _NAN, bits << 23))
    return lax.bitcast_convert_type(shifted, jnp.float32)


def ue8m0_bytes(name: str, exponents: ArrayLike) -> jax.Array:
    """UE8M0 exponents as uint8; float8_e8m0fnu is taken by its bytes.

    Raises:
        TypeError: neither uint8 nor float8_e8m0fnu.
    """
    _checks.dtype(name, exponents, ["uint8", "float8_e8m0fnu"])
    return lax.bitcast_convert_type(jnp.asarray(exponents), jnp.uint8)


def float32_to_ue8m0(scales: ArrayLike) -> jax.Array:
    """UE8M0 bytes of float32 powers of two; NaN for every float32 that is not one (infinity, 0 and
    negatives too).

    Raises:
        TypeError: not float32.
    """
    _checks.dtype("scales", scales, ["float32"])
    bits = lax.bitcast_convert_type(jnp.asarray(scales), jnp.int32)
    exponent = jnp.where(bits == 1 << 22, 0, bits >> 23)
    is_power = (bits == 1 << 22) | ((bits & 0x7FFFFF == 0) & (bits > 0) & (bits < _INFINITY))
    return jnp.where(is_power, exponent, 255).astype(jnp.uint8)


def encode_e2m1(x: ArrayLike, unit: ArrayLike = 1.0) -> jax.Array:
    """E2M1 codes (uint8, 0 to 15) of `x / unit`, nearest even on 0, .5, 1, 1.5, 2, 3, 4, 6; larger
    saturates.

    There is no negative zero, and NaN gives 0. `unit` broadcasts against `x`; nothing is divided:
    `x` is compared with multiples of it, which are exact when `unit` has at most 21 significant
    bits.

    Raises:
        TypeError: `x` is not bfloat16, float16 or float32.
    """
    x = to_float32("x", x)
    unit = jnp.asarray(unit, jnp.float32)
    magnitude = jnp.abs(x)
    code = jnp.zeros(x.shape, jnp.uint8)
    for boundary, tie_goes_up in _BOUNDARIES:
        reached = jnp.greater_equal if tie_goes_up else jnp.greater
        code += reached(magnitude, boundary * unit).astype(jnp.uint8)
    return jnp.where((x < 0) & (code != 0), code | 8, code)


def pack_e2m1(codes: ArrayLike) -> jax.Array:
    """Pairs of E2M1 codes [..., K] as bytes [..., K / 2], even k in the low nibble.

    Raises:
        TypeError: not uint8.
        ValueError: K is odd.
    """
    _checks.dtype("codes", codes, ["uint8"])
    pairs = split_blocks("codes", jnp.asarray(codes), 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def decode_e2m1_pairs(packed: ArrayLike) -> jax.Array:
    """bfloat16 values [..., K] of E2M1 pairs, uint8 [..., K / 2], even k in the low nibble.

    Looks both values of a byte up at once: a third of the time of decoding each on a CPU.

    Raises:
        TypeError: not uint8.
    """
    _checks.dtype("packed", packed, ["uint8"])
    index = jnp.asarray(packed).astype(jnp.int32)
    pairs = jnp.take(jnp.asarray(_E2M1_PAIRS), index, mode="clip")
    values = lax.bitcast_convert_type(pairs, jnp.bfloat16)
    return values.reshape(*index.shape[:-1], 2 * index.shape[-1])


def pack_words(scales: Array) -> Array:
    """One-byte scales [..., G] as int32 words [..., G / 4], the lowest index in the lowest byte.

    Raises:
        TypeError: not uint8, float8_e8m0fnu or float8_e4m3fn.
        ValueError: G is not a multiple of 4.
    """
    _checks.dtype("scales", scales, ["uint8", "float8_e8m0fnu", "float8_e4m3fn"])
    _checks.multiple("last axis of scales", scales.shape[-1], 4)
    return scales.view(np.uint8).view(np.int32)


def unpack_words(words: Array) -> Array:
    """The bytes, uint8 [..., G], in int32 words [..., G / 4]: the inverse of `pack_words`.

    Raises:
        TypeError: not int32.
    """
    _checks.dtype("words", words, ["int32"])
    if isinstance(words, np.ndarray):
        words = np.ascontiguousarray(words)
    return words.view(np.uint8)


def to_float32(name: str, x: ArrayLike) -> jax.Array:
    """`x` as float32. BF16 is widened by its bits: XLA may skip a rounding to BF16 that a
    conversion would undo.

    Raises:
        TypeError: not bfloat16, float16 or float32.
    """
    _checks.dtype(name, x, ["bfloat16", "float16", "float32"])
    x = jnp.asarray(x)
    if x.dtype != jnp.bfloat16:
        return x.astype(jnp.float32)
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
    return lax.bitcast_convert_type(bits, jnp.float32)


def nan_where(condition: jax.Array, x: jax.Array) -> jax.Array:
    """float32 `x`, NaN where the condition holds.

    By bits: a NaN as a constant of the program would set off `jax_debug_nans` on finite inputs.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type(jnp.where(condition, _NAN_BITS, bits), jnp.float32)


def to_e4m3(x: jax.Array) -> jax.Array:
    """float32 as float8_e4m3fn: nearest even, saturating at 448, every NaN the byte 0x7F."""
    is_nan = jnp.isnan(x)
    finite = jnp.clip(jnp.where(is_nan, 0, x), -E4M3_MAX, E4M3_MAX)
    byte = lax.bitcast_convert_type(finite.astype(jnp.float8_e4m3fn), jnp.uint8)
    return lax.bitcast_convert_type(jnp.where(is_nan, _NAN_BYTE, byte), jnp.float8_e4m3fn)


def from_e4m3(x: ArrayLike) -> jax.Array:
    """float32 of float8_e4m3fn, by bits.

    Not a cast: XLA's GPU backend drops a pair of casts there and back, and the rounding with it
    (xla_allow_excess_precision).
    """
    byte = lax.bitcast_convert_type(jnp.asarray(x), jnp.uint8).astype(jnp.int32)
    bits = byte & 0x7F
    normal = lax.bitcast_convert_type((bits << 20) + (120 << 23), jnp.float32)
    magnitude = jnp.where(bits < 8, bits.astype(jnp.float32) * jnp.float32(2**-9), normal)
    magnitude = nan_where(bits == 0x7F, magnitude)
    return jnp.where(byte >= 0x80, -magnitude, magnitude)


def split_blocks(name: str, x: jax.Array, block: int) -> jax.Array:
    """`x` [..., K] as [..., K / block, block].

    Raises:
        ValueError: K is not a multiple of `block`.
    """
    *leading, size = x.shape
    _checks.multiple(f"last axis of {name}", size, block)
    return x.reshape(*leading, size // block, block)


def check_tiles(name: str, shape: tuple[int, ...], grid: tuple[int, ...]) -> None:
    """Raises ValueError, with both shapes, unless scales of `shape` repeated along their last two
    axes can fill `grid` exactly."""
    alike = len(shape) == len(grid) and shape[:-2] == grid[:-2]
    if not alike or any(g % s if s else g for s, g in zip(shape, grid, strict=True)):
        raise ValueError(
            _checks.message(
                name,
                f"a grid that tiles {list(grid)} exactly",
                f"shape {list(shape)}",
                "a scale covers the same whole number of rows and columns everywhere",
            )
        )


def expand_scales(name: str, scales: Array, grid: tuple[int, ...]) -> Array:
    """`scales` repeated along its last two axes (one if it has no more) to the shape `grid`.

    Raises:
        ValueError: `scales` does not tile `grid` exactly; the message has both shapes.
    """
    check_tiles(name, scales.shape, grid)
    # A broadcast, not repeat(), which XLA turns into a gather.
    sizes = [
        (size, wanted // max(size, 1)) for size, wanted in zip(scales.shape, grid, strict=True)
    ]
    singles = scales.reshape([n for size, _ in sizes for n in (size, 1)])
    xp: Any = np if isinstance(scales, np.ndarray) else jnp
    return xp.broadcast_to(singles, [n for pair in sizes for n in pair]).reshape(grid)


def block_amax(x: jax.Array, axes: Sequence[int], *, skip_nan: bool = False) -> jax.Array:
    """The largest magnitude over `axes`, which stay with size 1; a NaN wins unless it is
    skipped."""
    bits = lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF
    if skip_nan:
        bits = jnp.where(bits > _INFINITY, 0, bits)
    return lax.bitcast_convert_type(jnp.max(bits, axis=axes, keepdims=True), jnp.float32)


def divide(a: jax.Array, b: ArrayLike) -> jax.Array:
    """`a / b`, each quotient correctly rounded, on any backend where it and both are normal.

    The barriers hide from XLA that `b` is constant or broadcast, and from what divides by the
    quotient that it is one: 1 / (a / b) would become b / a.
    """
    divisor = lax.optimization_barrier(jnp.broadcast_to(jnp.asarray(b, jnp.float32), a.shape))
    quotient = lax.platform_dependent(
        a, divisor, a / divisor, cpu=lambda a, b, q: q, default=corrected_quotient
    )
    return lax.optimization_barrier(quotient)


def corrected_quotient(a: jax.Array, b: jax.Array, approximate: jax.Array) -> jax.Array:
    """`a / b` correctly rounded, from a quotient that is off by a few units in the last place.

    In integers, which no backend rounds. Where `a`, `b` or a / b is no normal float32, the
    approximate one is returned.
    """
    bits_a, bits_b, bits = (lax.bitcast_convert_type(x, jnp.int32) for x in (a, b, approximate))

    def exponent(bits: jax.Array) -> jax.Array:
        return bits >> 23 & 0xFF

    def significand(bits: jax.Array) -> jax.Array:
        return bits & 0x7FFFFF | 0x800000

    one = significand(bits_b)
    low = (significand(bits_a) < one).astype(jnp.int32)
    expected = exponent(bits_a) - exponent(bits_b) + 127 - low
    # The significand of the quotient, below 2^24 and from 2^23; in another binade if it is at the
    # edge of its own.
    found, off = significand(bits), exponent(bits) - expected
    found = jnp.where(off > 0, found << 1, jnp.where(off < 0, found >> 1, found))
    # Both terms wrap around 2^32; what is left of them is small.
    remainder = (significand(bits_a) << 23 + low) - found * one
    for _ in range(_MAX_UNITS_OFF):
        step = jnp.where(remainder < 0, -1, (remainder >= one).astype(jnp.int32))
        found, remainder = found + step, remainder - step * one
    up = (2 * remainder > one) | ((2 * remainder == one) & (found & 1 == 1))
    sign = (bits_a ^ bits_b) & ~0x7FFFFFFF
    exact = sign | (expected << 23) + (found - 0x800000) + up.astype(jnp.int32)
    normal = (expected > 0) & (expected < 255)
    for each in (bits_a, bits_b):
        normal &= (exponent(each) > 0) & (exponent(each) < 255)
    return jnp.where(normal, lax.bitcast_convert_type(exact, jnp.float32), approximate)


def power_of_two_factors(exponent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two normal float32 whose product is 2^exponent, for int32 exponents from -127 to 128.

    Two, as 2^-127 is denormal and XLA:CPU takes denormals for zero.
    """
    half = exponent >> 1
    first = lax.bitcast_convert_type((half + 127) << 23, jnp.float32)
    return first, lax.bitcast_convert_type((exponent - half + 127) << 23, jnp.float32)


def times_power_of_two(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """`x * 2^exponent` for int32 exponents from -127 to 128."""
    first, second = power_of_two_factors(exponent)
    return x * first * second


def scale_factors(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two float32 that are 0 or normal and whose product is the float32 `scale`.

    XLA:CPU takes a denormal scale for zero, though what it scales need not become denormal: 448 *
    2^-127 is not. So a denormal, m * 2^-149, is m * 2^-74 and 2^-75.
    """
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    magnitude = (bits & 0x7FFFFF).astype(jnp.float32) * jnp.float32(2**-74)
    is_denormal = (bits & _INFINITY) == 0
    first = jnp.where(is_denormal, jnp.where(bits < 0, -magnitude, magnitude), scale)
    return first, jnp.where(is_denormal, jnp.float32(2**-75), jnp.float32(1))


def power_of_two_above(largest: jax.Array, limit: float) -> jax.Array:
    """UE8M0 exponent (int32) of the smallest power of two s with `largest` <= `limit` s.

    `largest` is normal; infinity gives 254, NaN 255. The same as rounding the quotient up by its
    bits: it never rounds across a power of two for the limits 448 and 6.
    """
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    above = bits - np.float32(limit).view(np.int32).item()
    exponent = 127 + ((above + 0x7FFFFF) >> 23)
    return jnp.where(bits > _INFINITY, 255, jnp.where(bits == _INFINITY, 254, exponent))
