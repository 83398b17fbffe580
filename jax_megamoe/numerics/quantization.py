"""Block quantisation: MXFP8, MXFP4, NVFP4 and block-scaled FP8, encode and decode, bit for bit as
the kernels take them.

Plain jnp in float32. The bits are the same eager and jitted, on a CPU and on an H200
(benchmarks/results/quantization_h200.json): `elements.divide` corrects the quotients that XLA's GPU
backend approximates. Every quantiser works along the last axis K, keeps the leading axes and
returns `(values, scales)`. Finite input gives finite values and scales, and zero stays zero (E4M3
keeps its sign). A NaN stays in its block: E4M3 values hold the NaN themselves; E2M1 has no NaN, so
the scale of its block becomes NaN. UE8M0 byte b is 2^(b - 127), 255 is NaN.

Sources: OCP Microscaling Formats v1.0 for E2M1, E4M3 and UE8M0; vLLM and DeepGEMM for how a scale
is chosen.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_megamoe import _checks
from jax_megamoe.numerics.elements import (
    E2M1_MAX,
    E4M3_MAX,
    block_amax,
    decode_e2m1_pairs,
    divide,
    encode_e2m1,
    expand_scales,
    from_e4m3,
    nan_where,
    pack_e2m1,
    power_of_two_above,
    power_of_two_factors,
    scale_factors,
    split_blocks,
    times_power_of_two,
    to_e4m3,
    to_float32,
    ue8m0_bytes,
)

NVFP4_MAX = E4M3_MAX * E2M1_MAX
"""Largest value of an NVFP4 block over its global scale: 2688."""

NVFP4_BLOCK_FLOOR = 2.0**-9
"""The smallest positive E4M3 number, which vLLM's NVFP4 block scales do not go below."""

_MX_AMAX_FLOOR = 1e-4
_FP8_AMAX_FLOOR = 1e-10
_SMALLEST_NORMAL = 2.0**-126


def quantize_mxfp8(x: ArrayLike, *, block: int = 32) -> tuple[jax.Array, jax.Array]:
    """MXFP8 of `x` [..., K]: float8_e4m3fn [..., K] and UE8M0 bytes, uint8 [..., K / block].

    A block's scale is the smallest power of two s with amax <= 448 s, amax floored at 1e-4 (so s >=
    2^-22), and the values are x / s, nearest even; an infinite value has s 2^127 and saturates. One
    rule for weights, dispatched tokens (vLLM's staging, sgl's pre-dispatch) and the second matmul's
    input (vLLM's kernel).

    Raises:
        TypeError: `x` is not bfloat16, float16 or float32.
        ValueError: K is not a multiple of `block`.
    """
    grouped = split_blocks("x", to_float32("x", x), block)
    exponents = _exponents(grouped, E4M3_MAX, skip_nan=True)
    values = to_e4m3(times_power_of_two(grouped, 127 - exponents))
    return values.reshape(jnp.shape(x)), exponents[..., 0].astype(jnp.uint8)


quantize_tokens_mxfp8 = quantize_mxfp8
requantize_l2_mxfp8 = quantize_mxfp8


def quantize_mxfp4(x: ArrayLike, *, block: int = 32) -> tuple[jax.Array, jax.Array]:
    """MXFP4 of `x` [..., K]: uint8 E2M1 pairs [..., K / 2] and UE8M0 bytes [..., K / block].

    As `quantize_mxfp8` with 6 for 448; a block with a NaN has the NaN exponent 255.

    Raises:
        TypeError: `x` is not bfloat16, float16 or float32.
        ValueError: K is not a multiple of `block`.
    """
    grouped = split_blocks("x", to_float32("x", x), block)
    exponents = _exponents(grouped, E2M1_MAX, skip_nan=False)
    codes = encode_e2m1(times_power_of_two(grouped, 127 - jnp.minimum(exponents, 254)))
    return pack_e2m1(codes.reshape(jnp.shape(x))), exponents[..., 0].astype(jnp.uint8)


def nvfp4_global_scale(w: ArrayLike) -> jax.Array:
    """amax / 2688 over the last two axes of `w` [..., N, K], float32 [...]: 1 for a matrix of zeros
    or denormals.

    Never denormal itself, so that weights can be divided by it. NaNs are skipped.

    Raises:
        TypeError: `w` is not bfloat16, float16 or float32.
    """
    largest = block_amax(to_float32("w", w), (-2, -1), skip_nan=True)[..., 0, 0]
    smallest_normal = float(jnp.finfo(jnp.float32).tiny)
    scale = jnp.maximum(divide(largest, NVFP4_MAX), smallest_normal)
    return jnp.where(largest < smallest_normal, 1.0, scale)


def quantize_nvfp4(
    x: ArrayLike,
    global_scale: ArrayLike,
    *,
    block_floor: float = NVFP4_BLOCK_FLOOR,
    reciprocal: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """NVFP4 of `x` [..., K] under a global scale g: E2M1 pairs, uint8 [..., K / 2], and
    float8_e4m3fn [..., K / 16].

    The value is e2m1 * e4m3 * g. A block's scale is amax(x / g) * (1 / 6) within [block_floor,
    448], cast to E4M3; the values are x / g / scale, nearest even on E2M1. A block with a NaN has
    the scale NaN.

    Args:
        x: bfloat16, float16 or float32 [..., K].
        global_scale: float32; its axes are the leading ones of `x` (a scalar, one per expert, one
            per row).
        block_floor: the smallest block scale; 0 lets blocks far below their matrix vanish.
        reciprocal: scale by amax / (6 g), and multiply by 1 / (scale * g) instead of dividing
            twice, as the kernels do.

    Raises:
        TypeError: `x` or `global_scale` has another dtype.
        ValueError: K is not a multiple of 16, or `global_scale` has axes that `x` has not.
    """
    grouped = split_blocks("x", to_float32("x", x), 16)
    outer = _leading("global_scale", global_scale, jnp.shape(x), grouped.ndim)
    if not reciprocal:
        grouped = divide(grouped, outer)
    largest = block_amax(grouped, (-1,))
    ratio = divide(largest, E2M1_MAX * outer) if reciprocal else largest * (1 / E2M1_MAX)
    scales = to_e4m3(jnp.maximum(ratio, block_floor))
    decoded = from_e4m3(scales)
    if reciprocal:
        # Without a division by 0, which jax_debug_infs would take for a fault.
        product = jnp.where(decoded > 0, decoded * outer, 1.0)
        inverse = jnp.where(decoded > 0, divide(jnp.ones_like(product), product), 0.0)
        codes = encode_e2m1(grouped * inverse)
    else:
        codes = encode_e2m1(grouped, decoded)
    return pack_e2m1(codes.reshape(jnp.shape(x))), scales[..., 0]


def quantize_fp8_rows(
    x: ArrayLike, *, block: int = 128, floor: float = _FP8_AMAX_FLOOR, by_product: bool = False
) -> tuple[jax.Array, jax.Array]:
    """E4M3 of `x` [..., K] with a float32 scale per `block` values: float8_e4m3fn [..., K], float32
    [..., K / block].

    The scale is max(amax, floor) / 448, or times the float32 nearest 1 / 448 with `by_product`;
    values are x * (1 / scale), nearest even.

    Raises:
        TypeError: `x` is not bfloat16, float16 or float32.
        ValueError: K is not a multiple of `block`.
    """
    grouped = split_blocks("x", to_float32("x", x), block)
    values, scales = _cast_e4m3(grouped, (-1,), floor, by_product)
    return values.reshape(jnp.shape(x)), scales[..., 0]


def quantize_fp8_block(w: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Block-FP8 of `w` [..., N, K]: float8_e4m3fn [..., N, K] and float32 [..., N / 128, K / 128].

    A block's scale is max(amax, 1e-10) / 448; values are w * (1 / scale), nearest even.

    Raises:
        TypeError: `w` is not bfloat16, float16 or float32.
        ValueError: N or K is not a multiple of 128.
    """
    *leading, rows, columns = jnp.shape(w)
    _checks.multiple("w rows N", rows, 128)
    _checks.multiple("w columns K", columns, 128)
    tiles = to_float32("w", w).reshape(*leading, rows // 128, 128, columns // 128, 128)
    values, scales = _cast_e4m3(tiles, (-3, -1), _FP8_AMAX_FLOOR, by_product=False)
    return values.reshape(jnp.shape(w)), scales[..., 0, :, 0]


def quantize_tokens_nvfp4(
    x: ArrayLike, *, floors_scales: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """NVFP4 of tokens `x` [..., K], each under its own scale of amax / 2688.

    With `floors_scales`, as vLLM's staging, amax is floored at 1e-12 and multiplied by 1 / 2688,
    and block scales are floored. Else, as sgl's, amax is floored at 1e-4 and divided, and values
    are multiplied by reciprocals.

    Returns:
        E2M1 pairs, uint8 [..., K / 2]; block scales, float8_e4m3fn [..., K / 16]; token scales,
            float32 [...].

    Raises:
        TypeError: `x` is not bfloat16, float16 or float32.
        ValueError: K is not a multiple of 16.
    """
    largest = block_amax(to_float32("x", x), (-1,), skip_nan=True)[..., 0]
    if floors_scales:
        token_scale = jnp.maximum(largest, 1e-12) * (1 / NVFP4_MAX)
        return *quantize_nvfp4(x, token_scale), token_scale
    token_scale = divide(jnp.maximum(largest, _MX_AMAX_FLOOR), NVFP4_MAX)
    return *quantize_nvfp4(x, token_scale, block_floor=0.0, reciprocal=True), token_scale


def quantize_tokens_fp8_block(x: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Tokens `x` [..., K] for SM90: float8_e4m3fn [..., K], float32 [..., K / 128] (sgl's
    pre-dispatch).

    Raises:
        TypeError: `x` is not bfloat16, float16 or float32.
        ValueError: K is not a multiple of 128.
    """
    return quantize_fp8_rows(x)


def requantize_l2_nvfp4(
    a: ArrayLike, activation_scale: ArrayLike | None
) -> tuple[jax.Array, jax.Array]:
    """The second matmul's NVFP4 input from `a` [..., K] under one float32 scale, as vLLM's kernel.

    With the scale None, as sgl's kernel: `a` is divided by it already, block scales are E4M3 of
    amax * (1 / 6) without a floor, and values are products with 1 / scale, 0 where that is 0.

    Raises:
        TypeError: `a` or `activation_scale` has another dtype.
        ValueError: K is not a multiple of 16.
    """
    if activation_scale is not None:
        return quantize_nvfp4(a, activation_scale, reciprocal=True)
    grouped = split_blocks("a", to_float32("a", a), 16)
    scales = to_e4m3(block_amax(grouped, (-1,)) * (1 / E2M1_MAX))
    decoded = from_e4m3(scales)
    inverse = jnp.where(decoded > 0, divide(jnp.ones_like(decoded), decoded), 0.0)
    codes = encode_e2m1(grouped * inverse)
    return pack_e2m1(codes.reshape(jnp.shape(a))), scales[..., 0]


def requantize_l2_fp8_block(a: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """The second matmul's input on SM90 from `a` [..., K]: float8_e4m3fn [..., K], float32 [..., K
    / 128].

    As sgl's kernel: the scale is a product with 1 / 448, the values a product with 1 / scale.

    Raises:
        TypeError: `a` is not bfloat16, float16 or float32.
        ValueError: K is not a multiple of 128.
    """
    return quantize_fp8_rows(a, by_product=True)


def requantize_l2_fp8_power(a: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """The second matmul's input on SM90 with 4-bit weights from `a` [..., K]: float8_e4m3fn [...,
    K] and UE8M0 bytes, uint8 [..., K / 128].

    As FlashInfer's kernels: the scale is the smallest power of two s with amax <= 448 s, without a
    floor; a block whose scale would not be a normal number is 0, one with an infinity NaN. A NaN
    stays, also in a block of nothing else.

    Raises:
        TypeError: `a` is not bfloat16, float16 or float32.
        ValueError: K is not a multiple of 128.
    """
    grouped = split_blocks("a", to_float32("a", a), 128)
    largest = block_amax(grouped, (-1,), skip_nan=True)
    exponents = power_of_two_above(jnp.maximum(largest, _SMALLEST_NORMAL), E4M3_MAX)
    vanishes = exponents < 1
    exponents = jnp.where(jnp.isinf(largest), 255, jnp.where(vanishes, 0, exponents))
    scaled = times_power_of_two(grouped, 127 - jnp.minimum(exponents, 254))
    values = to_e4m3(jnp.where(vanishes & ~jnp.isnan(grouped), 0, scaled))
    return values.reshape(jnp.shape(a)), exponents[..., 0].astype(jnp.uint8)


def dequantize_mxfp8(values: ArrayLike, exponents: ArrayLike) -> jax.Array:
    """float32 [..., K] of E4M3 values [..., K] and UE8M0 exponents [..., K / block]; results below
    2^-126 may be 0.

    Raises:
        TypeError: the values are not float8_e4m3fn, or the exponents not uint8 or float8_e8m0fnu.
        ValueError: the exponents do not tile the values.
    """
    _checks.dtype("values", values, ["float8_e4m3fn"])
    return _times_ue8m0(from_e4m3(values), exponents)


def dequantize_mxfp4(packed: ArrayLike, exponents: ArrayLike) -> jax.Array:
    """float32 [..., K] of E2M1 pairs [..., K / 2] and UE8M0 exponents [..., K / block]; see
    `dequantize_mxfp8`.

    Raises:
        TypeError: the pairs are not uint8, or the exponents not uint8 or float8_e8m0fnu.
        ValueError: the exponents do not tile the values.
    """
    return _times_ue8m0(decode_e2m1_pairs(packed).astype(jnp.float32), exponents)


def dequantize_nvfp4(packed: ArrayLike, scales: ArrayLike, global_scale: ArrayLike) -> jax.Array:
    """float32 [..., K] of E2M1 pairs [..., K / 2], E4M3 scales [..., K / 16] and a global scale of
    leading axes.

    Raises:
        TypeError: the pairs are not uint8, the scales not float8_e4m3fn, or the global scale not
            float32.
        ValueError: the scales do not tile the values, or the global scale has axes that they have
            not.
    """
    _checks.dtype("scales", scales, ["float8_e4m3fn"])
    values = decode_e2m1_pairs(packed).astype(jnp.float32)
    scales = expand_scales("scales", from_e4m3(scales), values.shape)
    return values * scales * _leading("global_scale", global_scale, values.shape, values.ndim)


def dequantize_fp8_block(values: ArrayLike, scales: ArrayLike) -> jax.Array:
    """float32 [..., N, K] of E4M3 values and a float32 grid of scales that tiles them ([..., N /
    128, K / 128], ...).

    Raises:
        TypeError: the values are not float8_e4m3fn, or the scales not float32.
        ValueError: the scales do not tile the values.
    """
    _checks.dtype("values", values, ["float8_e4m3fn"])
    _checks.dtype("scales", scales, ["float32"])
    factors = scale_factors(jnp.asarray(scales))
    first, second = (expand_scales("scales", each, jnp.shape(values)) for each in factors)
    return from_e4m3(values) * first * second


dequantize_tokens_fp8_block = dequantize_fp8_block


def _exponents(grouped: jax.Array, limit: float, *, skip_nan: bool) -> jax.Array:
    largest = jnp.maximum(block_amax(grouped, (-1,), skip_nan=skip_nan), _MX_AMAX_FLOOR)
    return power_of_two_above(largest, limit)


def _cast_e4m3(
    x: jax.Array, axes: tuple[int, ...], floor: float, by_product: bool
) -> tuple[jax.Array, jax.Array]:
    largest = jnp.maximum(block_amax(x, axes, skip_nan=True), floor)
    scales = largest * (1 / E4M3_MAX) if by_product else divide(largest, E4M3_MAX)
    return to_e4m3(x * divide(jnp.ones_like(scales), scales)), scales


def _times_ue8m0(values: jax.Array, exponents: ArrayLike) -> jax.Array:
    bytes_ = ue8m0_bytes("exponents", exponents)
    first, second = power_of_two_factors(bytes_.astype(jnp.int32) - 127)
    first = nan_where(bytes_ == 255, first)
    scaled = values * expand_scales("exponents", first, values.shape)
    return scaled * expand_scales("exponents", second, values.shape)


def _leading(name: str, scale: ArrayLike, shape: tuple[int, ...], rank: int) -> jax.Array:
    """float32 `scale`, whose axes are the leading ones of `shape`, and axes of size 1
    up to `rank`."""
    _checks.dtype(name, scale, ["float32"])
    scale = jnp.asarray(scale)
    _checks.shape(name, scale, shape[:-1][: scale.ndim])
    return scale.reshape(*scale.shape, *(1,) * (rank - scale.ndim))
