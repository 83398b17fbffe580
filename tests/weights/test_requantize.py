"""requantize.py: what is kept, what is converted by value, and every refusal."""

import golden_records as golden
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from e2m1 import decode_e2m1, unpack_e2m1

from jax_megamoe.formats import WEIGHT_FORMATS
from jax_megamoe.numerics import elements
from jax_megamoe.numerics import quantization as q
from jax_megamoe.numerics.elements import expand_scales
from jax_megamoe.weights.requantize import SourceMatrix, quantize_matrix, requantize

E4M3 = ml_dtypes.float8_e4m3fn
E8M0 = ml_dtypes.float8_e8m0fnu
N, K = 256, 384


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def values(matrix, name):
    """float32 values of a `QuantizedMatrix` in the format `name`."""
    weight, scale, global_scale = matrix
    if name == "bf16":
        return np.asarray(weight).astype(np.float32)
    if name == "nvfp4":
        return np.asarray(q.dequantize_nvfp4(weight, scale, global_scale))
    decode = getattr(q, f"dequantize_{name}")
    return np.asarray(decode(weight, scale))


def assert_is_format(matrix, name, shape):
    spec = WEIGHT_FORMATS[name].weight
    assert str(matrix.weight.dtype) == spec.storage
    assert matrix.weight.shape == (*shape[:-1], shape[-1] // spec.values_per_element)
    if spec.scale == "none":
        assert matrix.scale is None
    else:
        dtypes = {"ue8m0": "uint8", "e4m3": "float8_e4m3fn", "float32": "float32"}
        assert str(matrix.scale.dtype) == dtypes[spec.scale]
        rows, columns = spec.block
        assert matrix.scale.shape == (*shape[:-2], shape[-2] // rows, shape[-1] // columns)
    assert (matrix.global_scale is not None) == spec.has_global_scale


def e4m3(rng, shape=(N, K)):
    return rng.standard_normal(shape).astype(np.float32).astype(E4M3)


def block_fp8(rng, scale_dtype, tile=128):
    """E4M3 weights and a grid of power-of-two scales in `scale_dtype`."""
    exponents = rng.integers(115, 125, (N // tile, K // tile)).astype(np.uint8)
    scale = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    stored = {
        "uint8": exponents,
        "float8_e8m0fnu": exponents.view(E8M0),
        "float32": scale,
        "bfloat16": scale.astype(ml_dtypes.bfloat16),
    }
    return SourceMatrix("w", e4m3(rng), stored[scale_dtype]), scale


SOURCES = {
    "bfloat16": lambda rng: SourceMatrix("w", e4m3(rng).astype(ml_dtypes.bfloat16)),
    "float16": lambda rng: SourceMatrix("w", rng.standard_normal((N, K)).astype(np.float16)),
    "float32": lambda rng: SourceMatrix("w", rng.standard_normal((N, K)).astype(np.float32)),
    "block_fp8": lambda rng: SourceMatrix(
        "w", e4m3(rng), rng.uniform(0.001, 0.02, (N // 128, K // 128)).astype(np.float32)
    ),
    "block_fp8_ue8m0": lambda rng: block_fp8(rng, "uint8")[0],
    "fp8_32x32": lambda rng: block_fp8(rng, "float8_e8m0fnu", tile=32)[0],
    "mxfp8": lambda rng: SourceMatrix(
        "w", e4m3(rng), rng.integers(118, 122, (N, K // 32)).astype(np.uint8)
    ),
    "mxfp4": lambda rng: SourceMatrix(
        "w",
        rng.integers(0, 256, (N, K // 2)).astype(np.uint8),
        rng.integers(118, 122, (N, K // 32)).astype(np.uint8),
    ),
    "nvfp4": lambda rng: SourceMatrix(
        "w",
        rng.integers(0, 256, (N, K // 2)).astype(np.uint8),
        rng.uniform(100, 400, (N, K // 16)).astype(E4M3),
        np.float32(1e-4),
    ),
}


def source_values(source):
    weight, scale = source.weight, source.scale
    if scale is None:
        return weight.astype(np.float32)
    if source.global_scale is not None:
        return np.asarray(q.dequantize_nvfp4(weight, scale, source.global_scale))
    number = scale if scale.dtype == np.float32 else np.asarray(elements.ue8m0_to_float32(scale))
    if weight.dtype == np.uint8:
        values = decode_e2m1(unpack_e2m1(weight))
    else:
        values = weight.astype(np.float32)
    return values * expand_scales("w", number, values.shape)


@pytest.mark.parametrize("target", WEIGHT_FORMATS)
@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_becomes_every_format_by_value(kind, target, rng):
    source = SOURCES[kind](rng)
    want = source_values(source)
    matrix = requantize(source, target)
    assert_is_format(matrix, target, (N, K))
    error = np.abs(values(matrix, target) - want)
    # Half a step of the coarsest step in each format, against the largest value of a block or row.
    steps = {"bf16": 2.0**-8, "mxfp8": 2.0**-4, "fp8_block": 2.0**-4, "mxfp4": 0.25, "nvfp4": 0.2}
    assert (error <= steps[target] * np.abs(want).max(axis=-1, keepdims=True)).all()


KEPT = [
    ("bfloat16", "bf16"),
    ("block_fp8", "fp8_block"),
    ("block_fp8_ue8m0", "fp8_block"),
    ("block_fp8_ue8m0", "mxfp8"),
    ("fp8_32x32", "mxfp8"),
    ("mxfp8", "mxfp8"),
    ("mxfp4", "mxfp4"),
    ("nvfp4", "nvfp4"),
]


@pytest.mark.parametrize(("kind", "target"), KEPT)
def test_elements_that_the_target_has_are_kept(kind, target, rng):
    source = SOURCES[kind](rng)
    matrix = requantize(source, target)
    golden.assert_same(matrix.weight, source.weight)
    golden.assert_same(values(matrix, target), source_values(source))


@pytest.mark.parametrize("target", WEIGHT_FORMATS)
@pytest.mark.parametrize("tile", [32, 128])
def test_one_scale_in_four_dtypes_gives_the_same_bits(target, tile):
    dtypes = ["uint8", "float8_e8m0fnu", "float32", "bfloat16"]
    first, *others = (
        requantize(block_fp8(np.random.default_rng(3), dtype, tile)[0], target) for dtype in dtypes
    )
    for other in others:
        for left, right in zip(other, first, strict=True):
            assert (left is None) == (right is None)
            if left is not None:
                golden.assert_same(left, right)


def test_exponent_byte_120_is_a_scale_of_one_128th():
    for scale in (np.uint8(120), np.uint8(120).view(E8M0), np.float32(2.0**-7)):
        grid = np.full((1, 1), scale)
        source = SourceMatrix("w", np.ones((128, 128), E4M3), grid)
        assert (values(requantize(source, "bf16"), "bf16") == 2.0**-7).all()
        assert (values(requantize(source, "mxfp8"), "mxfp8") == 2.0**-7).all()
        assert (values(requantize(source, "fp8_block"), "fp8_block") == 2.0**-7).all()


def test_values_follow_a_scale_that_is_rounded_up(rng):
    scale = np.full((N // 128, K // 128), 1.5 * 2.0**-7, np.float32)
    for weight in (np.ones((N, K), E4M3), e4m3(rng)):
        source = SourceMatrix("w", weight, scale)
        got, want = values(requantize(source, "mxfp8"), "mxfp8"), source_values(source)
        gain = float((got * want).sum() / (want * want).sum())
        assert abs(gain - 1) < 0.01


@pytest.mark.parametrize("target", ["mxfp8", "fp8_block", "mxfp4", "nvfp4"])
def test_blocks_of_zeros_and_of_one_value_stay_finite(target):
    weight = np.zeros((128, 256), np.float32)
    weight[5, 200] = 0.75
    matrix = requantize(SourceMatrix("w", weight), target)
    got = values(matrix, target).copy()
    assert got[5, 200] == pytest.approx(0.75, rel=0.1)
    got[5, 200] = 0
    assert (got == 0).all()
    zeros = requantize(
        SourceMatrix("w", np.zeros((128, 256), E4M3), np.zeros((1, 2), np.float32)), target
    )
    assert (values(zeros, target) == 0).all()


def test_experts_are_converted_alone(rng):
    weight = rng.standard_normal((3, N, K)).astype(np.float32) * np.float32([[[1]], [[8]], [[64]]])
    for target in WEIGHT_FORMATS:
        together = requantize(SourceMatrix("w", weight), target)
        assert_is_format(together, target, (3, N, K))
        for expert in range(3):
            alone = requantize(SourceMatrix("w", weight[expert]), target)
            for whole, part in zip(together, alone, strict=True):
                if part is not None:
                    golden.assert_same(whole[expert], part)


def test_device_arrays_and_int8_pairs_are_taken(rng):
    source = SOURCES["mxfp4"](rng)
    packed = SourceMatrix("w", jnp.asarray(source.weight.view(np.int8)), jnp.asarray(source.scale))
    for target in ("mxfp4", "nvfp4"):
        for left, right in zip(requantize(packed, target), requantize(source, target), strict=True):
            if left is not None:
                golden.assert_same(left, right)


def test_quantize_matrix_is_the_same_jitted(rng):
    w = rng.standard_normal((N, K)).astype(np.float32)
    for form in WEIGHT_FORMATS.values():
        jitted = jax.jit(quantize_matrix, static_argnums=1)(w, form)
        for left, right in zip(jitted, quantize_matrix(w, form), strict=True):
            if left is not None:
                golden.assert_same(left, right)


def with_one(array, value):
    array = array.copy()
    array[0, 1] = value
    return array


def weight8():
    return np.ones((128, 256), E4M3)


def pairs():
    return np.full((128, 128), 0x22, np.uint8)


NOT_FINITE = {
    "UE8M0 exponents below 255": lambda: (
        weight8(),
        with_one(np.full((1, 2), 120, np.uint8), 255),
    ),
    "UE8M0 exponents below 255, which is NaN, got 1 others among 2": lambda: (
        weight8(),
        with_one(np.full((1, 2), 120, np.uint8), 255).view(E8M0),
    ),
    "finite numbers, got 1 others among 2": lambda: (
        weight8(),
        np.array([[1, np.inf]], np.float32),
    ),
    "finite numbers, got 2 others among 2": lambda: (
        weight8(),
        np.array([[np.nan, -np.inf]], np.float32),
    ),
    "finite E4M3 numbers without a sign, got 1 others": lambda: (
        pairs(),
        with_one(np.full((128, 16), 0x38, np.uint8), 0x7F).view(E4M3),
        np.float32(1),
    ),
    "finite E4M3 numbers without a sign, got 1": lambda: (
        pairs(),
        with_one(np.full((128, 16), 0x38, np.uint8), 0xB8).view(E4M3),
        np.float32(1),
    ),
}


@pytest.mark.parametrize("text", NOT_FINITE)
@pytest.mark.parametrize("put", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_scales_that_are_not_finite_are_refused_by_name(text, put):
    with pytest.raises(ValueError, match=f"experts.3.up_proj scale: expected {text}"):
        SourceMatrix("experts.3.up_proj", *map(put, NOT_FINITE[text]()))


def test_weights_that_are_not_finite_are_refused_by_name():
    weight = with_one(weight8().view(np.uint8), 0xFF).view(E4M3)
    with pytest.raises(ValueError, match="up: expected finite E4M3 numbers, got 1 others among"):
        SourceMatrix("up", weight, np.ones((1, 2), np.float32))
    with pytest.raises(ValueError, match="up: expected finite numbers, got 1 others among"):
        SourceMatrix("up", with_one(np.ones((2, 2), ml_dtypes.bfloat16), np.nan))


def test_dtypes_are_not_reinterpreted():
    ones = np.ones((128, 256))
    scale = np.ones((1, 2), np.float32)
    for dtype in (ml_dtypes.float8_e5m2, np.float64, np.int32):
        with pytest.raises(TypeError, match="up: expected one of the dtypes"):
            SourceMatrix("up", ones.astype(dtype), scale)
    with pytest.raises(TypeError, match="up scale: expected none for float16, got one"):
        SourceMatrix("up", ones.astype(np.float16), scale)
    for dtype in (np.int8, np.float16, E4M3):
        with pytest.raises(TypeError, match="up scale: expected one of the dtypes"):
            SourceMatrix("up", weight8(), scale.astype(dtype))
    with pytest.raises(ValueError, match="up scale: expected powers of two for FP4 weights"):
        requantize(SourceMatrix("up", pairs(), np.full((128, 8), 0.75, np.float32)), "mxfp4")


def test_float16_is_read_by_value():
    weight = np.full((128, 128), 1.0, np.float16)
    assert (values(requantize(SourceMatrix("w", weight), "bf16"), "bf16") == 1).all()


def test_missing_and_misshaped_scales_are_refused():
    with pytest.raises(ValueError, match="up scale: expected one for float8_e4m3fn, got none"):
        SourceMatrix("up", weight8())
    with pytest.raises(ValueError, match=r"up scale: expected a grid that tiles \[128, 256\]"):
        SourceMatrix("up", weight8(), np.ones((1, 3), np.float32))
    with pytest.raises(
        ValueError, match="up global scale: expected one with E4M3 scales, got none"
    ):
        SourceMatrix("up", pairs(), np.ones((128, 16), E4M3))
    with pytest.raises(ValueError, match="up global scale: expected none without E4M3 scales"):
        SourceMatrix("up", pairs(), np.full((128, 8), 120, np.uint8), np.float32(1))
    with pytest.raises(ValueError, match="up rows: expected a multiple of 128, got 64"):
        requantize(SourceMatrix("up", np.ones((64, 256), np.float32)), "fp8_block")
    with pytest.raises(ValueError, match="target: expected one of"):
        requantize(SourceMatrix("up", np.ones((64, 256), np.float32)), "int4")


def test_a_global_scale_of_zero_needs_weights_of_zero():
    scale = np.ones((2, 128, 16), E4M3)
    weight = np.stack([np.zeros((128, 128), np.uint8), pairs()])
    source = SourceMatrix("up", weight, scale, np.float32([0, 1]))
    assert (values(requantize(source, "nvfp4"), "nvfp4")[0] == 0).all()
    negative_zeros = np.full((2, 128, 128), 0x88, np.uint8)
    SourceMatrix("up", negative_zeros, scale, np.float32([0, 0]))
    text = "up global scale: expected a number > 0 for weights that are not all 0, got"
    with pytest.raises(ValueError, match=text):
        SourceMatrix("up", weight, scale, np.float32([1, 0]))
    for bad in (np.nan, -1.0, np.inf):
        with pytest.raises(ValueError, match="up global scale: expected finite numbers >= 0"):
            SourceMatrix("up", weight, scale, np.float32([1, bad]))
    with pytest.raises(ValueError, match=r"up global scale: expected shape \[2\], got shape \[\]"):
        SourceMatrix("up", weight, scale, np.float32(1))
    with pytest.raises(TypeError, match="up global scale: expected dtype float32, got float64"):
        SourceMatrix("up", weight, scale, np.ones(2))
