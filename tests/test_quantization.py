"""quantization.py against the recorded casts and stagings, a numpy oracle, and itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_megamoe import quantization as q
from tests import golden_records as golden

EAGER_AND_JIT = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
STRICT = {"jax_numpy_dtype_promotion": "strict", "jax_numpy_rank_promotion": "raise"}


@pytest.fixture(autouse=True)
def strict_jax():
    before = {name: getattr(jax.config, name) for name in STRICT}
    for name, value in STRICT.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def words(scales):
    return q.pack_words(scales)


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
        scales = (
            scales
            if scales.shape[-1] % 4 == 0
            else jnp.pad(scales, ((0, 0), (0, 4 - scales.shape[-1])), constant_values=127)
        )
        scales = words(scales)
    golden.assert_recorded("casts", f"{name}_sf", scales)


@EAGER_AND_JIT
@pytest.mark.parametrize("reciprocal", [False, True])
def test_nvfp4_with_a_block_floor_is_vllms_cast(wrap, reciprocal):
    cast = wrap(lambda x: q.quantize_nvfp4(x, jnp.float32(1), reciprocal=reciprocal))
    values, scales = cast(golden.bfloat16("casts", "cast_in_256"))
    golden.assert_recorded("casts", "nvfp4_256_q_vllm", values)
    golden.assert_recorded("casts", "nvfp4_256_sf_vllm", words(scales))


@EAGER_AND_JIT
def test_mxfp8_tokens_are_the_recorded_ones(wrap):
    for name in ("stage_256", "stage_256_special"):
        x = golden.bfloat16("staging", f"{name}_x")
        values, exponents = wrap(q.quantize_tokens_mxfp8)(x)
        golden.assert_recorded("staging", f"{name}_mxfp8_x", values)
        golden.assert_recorded("staging", f"{name}_mxfp8_x_sf", words(exponents))


@EAGER_AND_JIT
def test_fp4_tokens_are_the_recorded_ones(wrap):
    x = golden.bfloat16("staging", "stage_256_x")
    values, scales, token_scale = wrap(q.quantize_tokens_nvfp4)(x)
    golden.assert_recorded("staging", "stage_256_nvfp4_x", values)
    golden.assert_recorded("staging", "stage_256_nvfp4_x_sf", words(scales))
    golden.assert_recorded("staging", "stage_256_nvfp4_x_scales", token_scale)
    sgl = wrap(lambda x: q.quantize_tokens_nvfp4(x, source="sgl"))
    values, scales, token_scale = sgl(x)
    golden.assert_recorded("staging", "stage_256_sgl_nvfp4_x", values)
    golden.assert_recorded("staging", "stage_256_sgl_nvfp4_x_sf", words(scales))
    golden.assert_recorded("staging", "stage_256_sgl_nvfp4_x_scales", token_scale)
    values, exponents = wrap(q.quantize_mxfp4)(x)
    golden.assert_recorded("staging", "stage_256_sgl_mxf4_x", values)
    golden.assert_recorded("staging", "stage_256_sgl_mxf4_x_sf", words(exponents))


@EAGER_AND_JIT
@pytest.mark.parametrize("block_m", [16, 64, 192, 240])
def test_shared_scale_pages_are_the_recorded_ones(block_m, wrap):
    exponents = q.unpack_words(golden.arrays("staging")["stage_256_mxfp8_x_sf"])
    pages = wrap(lambda s: q.shared_scale_pages(s, block_m))(exponents)
    golden.assert_recorded("staging", f"stage_256_shared_sf_bm{block_m}", pages.T)


@EAGER_AND_JIT
def test_l2_alpha_is_the_recorded_one(wrap):
    w2_scale = golden.arrays("staging")["stage_256_w2_global"]
    alpha = wrap(q.nvfp4_l2_alpha)(w2_scale, np.float32(0.37))
    golden.assert_recorded("staging", "stage_256_l2_alpha", alpha)
