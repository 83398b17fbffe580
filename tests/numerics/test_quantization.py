"""quantization.py against the recorded casts and stagings, a numpy oracle, and itself."""

import functools

import golden_records as golden
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import scale_pages
from e2m1 import decode_e2m1, unpack_e2m1
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_megamoe.numerics import elements
from jax_megamoe.numerics import quantization as q
from jax_megamoe.numerics.elements import to_e4m3

EAGER_AND_JIT = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])


CASTS = {
    "fp8_g32_256": q.quantize_mxfp8,
    "fp4_g32_256": q.quantize_mxfp4,
    "fp8_g128_256": lambda x: q.quantize_mxfp8(x, block=128),
    "fp4_g128_256": lambda x: q.quantize_mxfp4(x, block=128),
    "fp8_f32sf_g128_256": lambda x: q.quantize_fp8_rows(x, floor=1e-4),
    "nvfp4_256": lambda x: q.quantize_nvfp4(x, jnp.float32(1), block_floor=0.0, reciprocal=True),
}


@EAGER_AND_JIT
@pytest.mark.parametrize("name", CASTS)
def test_casts_are_the_recorded_ones(name, wrap):
    values, scales = wrap(CASTS[name])(golden.bfloat16("casts", "cast_in_256"))
    golden.assert_recorded("casts", f"{name}_q", values)
    if scales.dtype != jnp.float32:
        missing = -scales.shape[-1] % 4  # the record pads a word with scales of 1
        scales = elements.pack_words(jnp.pad(scales, ((0, 0), (0, missing)), constant_values=127))
    golden.assert_recorded("casts", f"{name}_sf", scales)


@EAGER_AND_JIT
@pytest.mark.parametrize("reciprocal", [False, True])
def test_nvfp4_with_a_block_floor_is_vllms_cast(wrap, reciprocal):
    cast = wrap(lambda x: q.quantize_nvfp4(x, jnp.float32(1), reciprocal=reciprocal))
    values, scales = cast(golden.bfloat16("casts", "cast_in_256"))
    golden.assert_recorded("casts", "nvfp4_256_q_vllm", values)
    golden.assert_recorded("casts", "nvfp4_256_sf_vllm", elements.pack_words(scales))


@EAGER_AND_JIT
def test_mxfp8_tokens_are_the_recorded_ones(wrap):
    for name in ("stage_256", "stage_256_special"):
        x = golden.bfloat16("staging", f"{name}_x")
        values, exponents = wrap(q.quantize_tokens_mxfp8)(x)
        golden.assert_recorded("staging", f"{name}_mxfp8_x", values)
        golden.assert_recorded("staging", f"{name}_mxfp8_x_sf", elements.pack_words(exponents))


@EAGER_AND_JIT
def test_fp4_tokens_are_the_recorded_ones(wrap):
    x = golden.bfloat16("staging", "stage_256_x")
    values, scales, token_scale = wrap(q.quantize_tokens_nvfp4)(x)
    golden.assert_recorded("staging", "stage_256_nvfp4_x", values)
    golden.assert_recorded("staging", "stage_256_nvfp4_x_sf", elements.pack_words(scales))
    golden.assert_recorded("staging", "stage_256_nvfp4_x_scales", token_scale)
    sgl = wrap(lambda x: q.quantize_tokens_nvfp4(x, floors_scales=False))
    values, scales, token_scale = sgl(x)
    golden.assert_recorded("staging", "stage_256_sgl_nvfp4_x", values)
    golden.assert_recorded("staging", "stage_256_sgl_nvfp4_x_sf", elements.pack_words(scales))
    golden.assert_recorded("staging", "stage_256_sgl_nvfp4_x_scales", token_scale)
    values, exponents = wrap(q.quantize_mxfp4)(x)
    golden.assert_recorded("staging", "stage_256_sgl_mxf4_x", values)
    golden.assert_recorded("staging", "stage_256_sgl_mxf4_x_sf", elements.pack_words(exponents))


@EAGER_AND_JIT
@pytest.mark.parametrize("block_m", [16, 64, 192, 240])
def test_shared_scale_pages_are_the_recorded_ones(block_m, wrap):
    exponents = elements.unpack_words(golden.arrays("staging")["stage_256_mxfp8_x_sf"])
    pages = wrap(lambda s: scale_pages.shared_scale_pages(s, block_m))(exponents)
    golden.assert_recorded("staging", f"stage_256_shared_sf_bm{block_m}", pages.T)


# A NumPy oracle that shares no code with the package: IEEE float32 and ml_dtypes' conversions.


def up_to_power_of_two(scale):
    bits = scale.view(np.int32)
    exponent = np.clip((bits >> 23) + ((bits & 0x7FFFFF) != 0), 1, 254)
    return exponent.astype(np.uint8), (exponent << 23).astype(np.int32).view(np.float32)


def nearest_e2m1(values):
    """Packed codes of the nearest of the 8 magnitudes, the even code of two as near."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    distance = np.abs(np.minimum(np.abs(values), 6).astype(np.float64)[..., None] - magnitudes)
    near = distance == distance.min(axis=-1, keepdims=True)
    even_first = [0, 2, 4, 6, 1, 3, 5, 7]
    code = np.array(even_first)[near[..., even_first].argmax(axis=-1)]
    code = np.where((values < 0) & (code != 0), code + 8, code).astype(np.uint8)
    return code[..., 0::2] + 16 * code[..., 1::2]


def oracle_mx(x, limit):
    grouped = x.astype(np.float32).reshape(*x.shape[:-1], -1, 32)
    amax = np.maximum(np.abs(grouped).max(axis=-1, keepdims=True), np.float32(1e-4))
    exponents, scale = up_to_power_of_two(amax / np.float32(limit))
    return (grouped * (np.float32(1) / scale)).reshape(x.shape), exponents[..., 0]


def oracle_nvfp4(x, outer):
    v = (x.astype(np.float32) / outer).reshape(*x.shape[:-1], -1, 16)
    ratio = np.abs(v).max(axis=-1, keepdims=True) * (np.float32(1) / np.float32(6))
    scale = np.clip(ratio, np.float32(2**-9), np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
    return nearest_e2m1((v / scale.astype(np.float32)).reshape(x.shape)), scale[..., 0]


@st.composite
def inputs(draw):
    """Rows of 256 in one of the input dtypes: normal values, wide ranges, ties, near edges."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = jnp.dtype(draw(st.sampled_from(["bfloat16", "float16", "float32"])))
    kind = draw(st.sampled_from(["normal", "wide", "grid", "edge", "sparse"]))
    x = rng.standard_normal((4, 256))
    with np.errstate(over="ignore"):
        if kind == "wide":
            x *= 2.0 ** rng.integers(-40, 40, x.shape)
        elif kind == "grid":
            x = rng.integers(-24, 25, x.shape) / 4 * 2.0 ** rng.integers(-8, 8)
        elif kind == "edge":
            x[:, ::32] = 448 * 2.0 ** rng.integers(-9, 9, (4, 8))
            x = np.nextafter(x.astype(np.float32), np.float32(1e30) * rng.integers(-1, 2, x.shape))
        elif kind == "sparse":
            x *= rng.random(x.shape) < 0.02
        x = np.clip(x, -6e4, 6e4) if dtype == np.float16 else x
    return x.astype(dtype)


@functools.cache
def jitted(name):
    """The quantiser jitted, and in a loop in jit."""
    quantise = getattr(q, name)
    return jax.jit(quantise), jax.jit(lambda x: jax.lax.map(quantise, x[None]))


def every_way(name, x):
    """The eager result as NumPy arrays, after asserting that jit gives the same bits."""
    eager = getattr(q, name)(x)
    straight, looped = (function(x) for function in jitted(name))
    for left, right, inner in zip(eager, straight, looped, strict=True):
        golden.assert_same(left, right, name)
        golden.assert_same(left, inner[0], name)
    return [np.asarray(array) for array in eager]


@settings(max_examples=30, deadline=None)
@given(x=inputs())
def test_quantisers_agree_with_the_oracle(x):
    values, exponents = every_way("quantize_mxfp8", x)
    want, want_exponents = oracle_mx(x, 448)
    golden.assert_same(exponents, want_exponents, "mxfp8 exponents")
    golden.assert_same(values, want.astype(ml_dtypes.float8_e4m3fn), "mxfp8")

    packed, exponents = every_way("quantize_mxfp4", x)
    want, want_exponents = oracle_mx(x, 6)
    golden.assert_same(exponents, want_exponents, "mxfp4 exponents")
    golden.assert_same(packed, nearest_e2m1(want), "mxfp4")

    packed, scales, token_scale = every_way("quantize_tokens_nvfp4", x)
    amax = np.abs(x.astype(np.float32)).max(axis=-1)
    want = np.maximum(amax, np.float32(1e-12)) * (np.float32(1) / np.float32(2688))
    golden.assert_same(token_scale, want, "token scale")
    want, want_scales = oracle_nvfp4(x, token_scale[:, None])
    golden.assert_same(scales, want_scales, "nvfp4 scales")
    golden.assert_same(packed, want, "nvfp4")

    values, scales = every_way("quantize_fp8_rows", x)
    grouped = x.astype(np.float32).reshape(4, 2, 128)
    want = np.maximum(np.abs(grouped).max(axis=-1), np.float32(1e-10)) / np.float32(448)
    golden.assert_same(scales, want, "fp8 scales")
    want = grouped * (np.float32(1) / want)[..., None]
    golden.assert_same(values, want.astype(ml_dtypes.float8_e4m3fn).reshape(4, 256), "fp8")


@settings(max_examples=10, deadline=None)
@given(x=inputs())
def test_dequantised_values_quantise_to_themselves(x):
    """Values that a format holds survive a round trip; the first cast is within half a step."""
    x = x.astype(np.float32)
    for name, step in (("mxfp8", 2.0**-4), ("mxfp4", 0.25)):
        quantise, decode = getattr(q, f"quantize_{name}"), getattr(q, f"dequantize_{name}")
        once = np.asarray(decode(*quantise(x)))
        amax = np.abs(x).reshape(4, 8, 32).max(axis=-1).repeat(32, axis=-1)
        assert (np.abs(once - x) <= step * np.maximum(amax, 1e-4)).all()
        golden.assert_same(decode(*quantise(once)), once, name)
    tokens = q.dequantize_nvfp4(*q.quantize_tokens_nvfp4(x))
    assert (np.abs(tokens - x) <= 0.2 * np.abs(x).max(axis=-1, keepdims=True)).all()


@EAGER_AND_JIT
def test_a_scale_doubles_just_above_448_times_a_power_of_two(wrap):
    powers = np.arange(-20, 20)
    at = (448 * 2.0**powers).astype(np.float32)
    above = np.nextafter(at, np.float32(np.inf))
    x = np.zeros((2, len(powers), 32), np.float32)
    x[0, :, 3], x[1, :, 3] = at, -above
    values, exponents = wrap(q.quantize_mxfp8)(x)
    assert exponents[..., 0].tolist() == [(127 + powers).tolist(), (128 + powers).tolist()]
    assert (np.asarray(values)[0, :, 3] == 448).all()
    assert (np.asarray(values)[1, :, 3] == -224).all()


def test_e2m1_encodes_every_bf16_as_the_nearest():
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    finite = every[every.view(np.uint16) & 0x7FFF < 0x7F80]
    codes = elements.encode_e2m1(finite)
    golden.assert_same(elements.pack_e2m1(codes), nearest_e2m1(finite.astype(np.float32)))
    decoded = decode_e2m1(np.arange(16, dtype=np.uint8))
    want = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    golden.assert_same(decoded, want)
    assert elements.encode_e2m1(jnp.float32([np.nan, np.inf, -np.inf, -0.0])).tolist() == [
        0,
        7,
        15,
        0,
    ]
    packed = np.arange(256, dtype=np.uint8)
    golden.assert_same(elements.pack_e2m1(unpack_e2m1(packed)), packed)
    assert unpack_e2m1(np.uint8([0x21])).tolist() == [1, 2]


@EAGER_AND_JIT
def test_e4m3_rounds_as_ml_dtypes_does(wrap):
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    x = np.concatenate([bits.view(np.float32), np.ldexp(np.float32(1.0625), np.arange(-149, 128))])
    x = np.where(np.isnan(x), np.float32(np.nan), x)
    want = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    golden.assert_same(wrap(to_e4m3)(x), want)


def test_ue8m0_bytes_are_powers_of_two():
    every = np.arange(256, dtype=np.uint8)
    numbers = np.asarray(elements.ue8m0_to_float32(every))
    want = every.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    golden.assert_same(numbers[:255], want[:255])
    assert np.isnan(numbers[255])
    assert numbers[120] == 2.0**-7
    golden.assert_same(elements.ue8m0_to_float32(every.view(ml_dtypes.float8_e8m0fnu)), numbers)
    golden.assert_same(elements.float32_to_ue8m0(numbers), every)
    others = np.float32([0, -1, 3, np.inf, -np.inf, 2.0**-149, -0.0, 2.0**-126 * 0.75])
    assert elements.float32_to_ue8m0(others).tolist() == [255] * len(others)


@EAGER_AND_JIT
def test_dequantise_covers_the_whole_exponent_range(wrap):
    exponents = np.arange(256, dtype=np.uint8)[:, None]
    ones = np.ones((256, 32), ml_dtypes.float8_e4m3fn)
    got = np.asarray(wrap(q.dequantize_mxfp8)(ones, exponents))[:, 0]
    assert (got[1:255] == 2.0 ** (np.arange(1, 255) - 127)).all()
    assert np.isnan(got[255])
    got = np.asarray(wrap(q.dequantize_mxfp4)(np.full((256, 16), 0x22, np.uint8), exponents))
    assert (got[1:255, 0] == 2.0 ** (np.arange(1, 255) - 127)).all()


def test_fp8_blocks_have_one_scale_a_tile():
    w = np.random.default_rng(1).standard_normal((2, 256, 384)).astype(np.float32)
    w[0, :128, :128] = 0
    w[1, 128:, 256:] = 0
    w[1, 200, 300] = -3e-9
    values, scales = q.quantize_fp8_block(w)
    tiles = w.reshape(2, 2, 128, 3, 128)
    want = np.maximum(np.abs(tiles).max(axis=(2, 4)), np.float32(1e-10)) / np.float32(448)
    golden.assert_same(scales, want)
    golden.assert_same(jax.jit(q.quantize_fp8_block)(w)[0], values)
    decoded = np.asarray(q.dequantize_fp8_block(values, scales))
    assert (decoded[0, :128, :128] == 0).all()
    assert decoded[1, 200, 300] == pytest.approx(-3e-9, rel=1e-6)
    assert (np.abs(decoded - w) <= np.abs(w) / 16 + 448 * 2.0**-10 * want.max()).all()


def test_global_scales_are_amax_over_2688():
    w = np.zeros((4, 16, 32), ml_dtypes.bfloat16)
    w[1, 3, 4], w[2, 0, 0], w[3, 0, 0] = -2688, 1, 1e-40
    got = q.nvfp4_global_scale(w)
    assert got.tolist() == [1, 1, np.float32(1) / np.float32(2688), 1]
    packed, scales = q.quantize_nvfp4(w, got)
    golden.assert_same(q.dequantize_nvfp4(packed, scales, got)[1], w[1].astype(np.float32))
    tiny = np.full((16, 32), 2.0**-125, np.float32)
    scale = q.nvfp4_global_scale(tiny)
    assert scale == np.finfo(np.float32).tiny
    decoded = q.dequantize_nvfp4(*q.quantize_nvfp4(tiny, scale), scale)
    np.testing.assert_allclose(decoded, tiny, rtol=0.05)


QUANTISERS = {
    "mxfp8": (q.quantize_mxfp8, q.dequantize_mxfp8),
    "mxfp4": (q.quantize_mxfp4, q.dequantize_mxfp4),
    "nvfp4": (q.quantize_tokens_nvfp4, q.dequantize_nvfp4),
    "sgl nvfp4": (lambda x: q.quantize_tokens_nvfp4(x, floors_scales=False), q.dequantize_nvfp4),
    "fp8_block": (q.quantize_tokens_fp8_block, q.dequantize_tokens_fp8_block),
    "l2 mxfp8": (q.requantize_l2_mxfp8, q.dequantize_mxfp8),
    "l2 fp8_block": (q.requantize_l2_fp8_block, q.dequantize_fp8_block),
    "l2 nvfp4": (
        lambda x: (*q.requantize_l2_nvfp4(x, jnp.float32(0.37)), jnp.float32(0.37)),
        q.dequantize_nvfp4,
    ),
}


@EAGER_AND_JIT
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", QUANTISERS)
def test_rows_do_not_touch_each_other_and_stay_finite(name, dtype, wrap):
    quantise, decode = QUANTISERS[name]
    x = np.random.default_rng(2).standard_normal((6, 256)).astype(np.float32)
    x[0], x[1], x[2] = 0, 1e-30, 2e38
    x[3, 17], x[4, 17] = 1e-40, 2e38
    x = x.astype(jnp.dtype(dtype))
    alone = wrap(quantise)(x)
    decoded = np.asarray(wrap(decode)(*alone))
    assert np.isfinite(decoded).all()
    assert (decoded[0] == 0).all()
    spoilt = x.copy()
    spoilt[1, 3], spoilt[2, 100], spoilt[4, 5] = np.nan, np.inf, -np.inf
    together = wrap(quantise)(spoilt)
    for left, right in zip(together, alone, strict=True):
        if left.ndim:
            golden.assert_same(left[np.array([0, 3, 5])], right[np.array([0, 3, 5])])
    assert np.isnan(np.asarray(wrap(decode)(*together))[1]).any()


def test_a_block_of_nan_alone_is_no_block_of_zeros():
    """A token with one NaN has nothing else after the first matmul."""
    a = np.ones((3, 256), np.float32)
    a[0, 128:], a[1, :128], a[2] = np.nan, 0, 1e-40
    decoded = np.asarray(q.dequantize_mxfp8(*q.requantize_l2_fp8_power(a)))
    assert np.isnan(decoded[0, 128:]).all()
    assert (decoded[0, :128] == 1).all() and (decoded[1, 128:] == 1).all()
    assert not decoded[1, :128].any() and not decoded[2].any()


def test_l2_inputs_follow_the_kernels_rules():
    a = np.random.default_rng(3).standard_normal((8, 256)).astype(ml_dtypes.bfloat16)
    wide = a.astype(np.float32)
    scale = np.float32(0.37)
    packed, scales = q.requantize_l2_nvfp4(a, scale)
    grouped = wide.reshape(8, 16, 16)
    ratio = np.abs(grouped).max(axis=-1) / (np.float32(6) * scale)
    want = np.clip(ratio, np.float32(2**-9), np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
    golden.assert_same(scales, want)
    inverse = np.float32(1) / (want.astype(np.float32) * scale)
    golden.assert_same(packed, nearest_e2m1((grouped * inverse[..., None]).reshape(8, 256)))
    a[0, :16] *= 1e-5  # the block vanishes, as it would not with a floor
    packed, scales = q.requantize_l2_nvfp4(a, None)
    grouped = a.astype(np.float32).reshape(8, 16, 16)
    want = (np.abs(grouped).max(axis=-1) * np.float32(1 / 6)).astype(ml_dtypes.float8_e4m3fn)
    golden.assert_same(scales, want)
    assert want[0, 0] == 0 and not np.asarray(packed)[0, :8].any()
    decoded = want.astype(np.float32)
    inverse = np.divide(1, decoded, out=np.zeros_like(decoded), where=decoded > 0)
    golden.assert_same(packed, nearest_e2m1((grouped * inverse[..., None]).reshape(8, 256)))
    wide = a.astype(np.float32)
    values, scales = q.requantize_l2_fp8_block(a)
    grouped = wide.reshape(8, 2, 128)
    want = np.abs(grouped).max(axis=-1) * (np.float32(1) / np.float32(448))
    golden.assert_same(scales, want)
    want = (grouped * (np.float32(1) / want)[..., None]).astype(ml_dtypes.float8_e4m3fn)
    golden.assert_same(values, want.reshape(8, 256))
    values, exponents = q.requantize_l2_mxfp8(np.zeros((1, 32), np.float32))
    assert exponents.tolist() == [[127 - 22]]


def test_bf16_rounding_survives_a_jit_that_made_the_input():
    """XLA may drop a rounding to BF16 followed by a widening; the quantisers must see it."""
    x = np.random.default_rng(4).standard_normal((64, 256)).astype(np.float32)
    fused = jax.jit(lambda x: q.quantize_tokens_fp8_block(x.astype(jnp.bfloat16)))(x)
    apart = q.quantize_tokens_fp8_block(x.astype(ml_dtypes.bfloat16))
    for left, right in zip(fused, apart, strict=True):
        golden.assert_same(left, right)


def test_shared_scale_rows_follow_the_tensor_cores_order():
    assert scale_pages.shared_scale_rows(34, 16)[[0, 1, 15, 16, 33]].tolist() == [
        0,
        4,
        60,
        128,
        260,
    ]
    rows = scale_pages.shared_scale_rows(500, 192)
    assert rows[[0, 31, 32, 127, 128, 191, 192]].tolist() == [0, 124, 1, 127, 128, 253, 256]
    assert len(set(rows.tolist())) == 500
    scales = np.arange(12 * 4, dtype=np.uint8).reshape(12, 4)
    pages = np.asarray(scale_pages.shared_scale_pages(scales, 16, num_rows=256))
    golden.assert_same(pages[0, :48:4], scales.view(np.int32)[:, 0])
    assert pages.shape == (1, 256)
    assert np.count_nonzero(pages) == 12
    with pytest.raises(ValueError, match="scale rows in use: expected at most num_rows = 100"):
        scale_pages.shared_scale_pages(scales, 16, num_rows=100)


def test_denormal_scales_are_not_zero():
    """XLA:CPU takes them for zero; what they scale need not be denormal."""
    values = np.array([[448, -448, 1, 2**-9]], ml_dtypes.float8_e4m3fn)
    scales = np.array([[2.0**-127], [1.5 * 2.0**-127], [2.0**-149], [2.0**-126], [0]], np.float32)
    want = values.astype(np.float64) * scales.astype(np.float64)
    want[np.abs(want) < 2.0**-126] = 0
    assert want[0, 0] == 448 * 2.0**-127
    for decode in (q.dequantize_fp8_block, jax.jit(q.dequantize_fp8_block)):
        got = np.asarray(decode(np.repeat(values, 5, 0), scales))
        np.testing.assert_array_equal(got, want.astype(np.float32))


def test_no_tokens_quantise_to_nothing():
    x = jnp.zeros((0, 256), jnp.bfloat16)
    for quantise, decode in QUANTISERS.values():
        assert jax.jit(lambda x: decode(*quantise(x)))(x).shape == (0, 256)
    assert scale_pages.shared_scale_pages(np.zeros((0, 8), np.uint8), 16).shape == (2, 0)


@pytest.mark.parametrize("name", QUANTISERS)
def test_wrong_dtypes_are_type_errors(name):
    quantise, _ = QUANTISERS[name]
    for dtype in (jnp.int32, jnp.float8_e4m3fn, jnp.uint8):
        with pytest.raises(TypeError, match=r"expected one of the dtypes \['bfloat16'"):
            quantise(jnp.zeros((2, 256), dtype))


def test_wrong_arguments_are_named():
    x = jnp.zeros((2, 72), jnp.bfloat16)
    cases = {32: q.quantize_mxfp8, 16: q.quantize_tokens_nvfp4, 128: q.quantize_tokens_fp8_block}
    for block, quantise in cases.items():
        with pytest.raises(
            ValueError, match=f"last axis of x: expected a multiple of {block}, got"
        ):
            quantise(x)
    with pytest.raises(ValueError, match="w rows N: expected a multiple of 128, got 2"):
        q.quantize_fp8_block(x)
    with pytest.raises(TypeError, match="global_scale: expected dtype float32, got bfloat16"):
        q.quantize_nvfp4(x[:, :64], jnp.bfloat16(1))
    with pytest.raises(ValueError, match=r"global_scale: expected shape \[2\], got shape \[3\]"):
        q.quantize_nvfp4(x[:, :64], jnp.ones(3))
    values, exponents = q.quantize_mxfp8(x[:, :64])
    with pytest.raises(ValueError, match=r"tiles \[2, 64\] exactly, got shape \[2, 3\]"):
        q.dequantize_mxfp8(values, jnp.zeros((2, 3), jnp.uint8))
    with pytest.raises(TypeError, match="exponents: expected one of the dtypes"):
        q.dequantize_mxfp8(values, jnp.ones((2, 2)))
    with pytest.raises(TypeError, match="scales: expected dtype float32, got uint8"):
        q.dequantize_fp8_block(values, exponents)
    with pytest.raises(TypeError, match="scales: expected dtype float8_e4m3fn, got uint8"):
        q.dequantize_nvfp4(jnp.zeros((2, 32), jnp.uint8), exponents, jnp.float32(1))
    with pytest.raises(TypeError, match="values: expected dtype float8_e4m3fn, got uint8"):
        q.dequantize_mxfp8(exponents, exponents)
    with pytest.raises(TypeError, match="packed: expected dtype uint8, got float8_e4m3fn"):
        q.dequantize_mxfp4(values, exponents)
    with pytest.raises(TypeError, match="scales: expected dtype float32, got int32"):
        elements.float32_to_ue8m0(jnp.ones(3, jnp.int32))
    with pytest.raises(TypeError, match="codes: expected dtype uint8, got int32"):
        elements.pack_e2m1(jnp.ones(2, jnp.int32))
    with pytest.raises(ValueError, match="last axis of codes: expected a multiple of 2, got 3"):
        elements.pack_e2m1(jnp.ones(3, jnp.uint8))
