"""elements.py: what XLA's GPU backend would round otherwise. The rest: test_quantization.py."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_megamoe as mm
from jax_megamoe.numerics import expert, quantization
from jax_megamoe.numerics.elements import corrected_quotient, divide, from_e4m3
from jax_megamoe.numerics.tokens import quantize_tokens

COUNT = 1 << 14


def floats(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.int32).view(np.float32)


def pairs(kind: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Dividends and divisors."""
    significands = floats(rng.integers(0x3F800000, 0x40000000, COUNT))
    if kind == "reciprocals":
        return np.ones(COUNT, np.float32), significands
    if kind == "bfloat16 over 448":
        values = jnp.asarray(100 * rng.standard_normal(COUNT), jnp.bfloat16)
        return np.asarray(values, np.float32), np.full(COUNT, 448, np.float32)
    if kind == "near 1":
        return floats(significands.view(np.int32) + rng.integers(-2, 3, COUNT)), significands
    if kind == "integers":  # with exact quotients among them
        return tuple(rng.integers(1, 1 << 12, COUNT).astype(np.float32) for _ in range(2))
    signs = rng.choice(np.float32([-1, 1]), COUNT)
    normal = [floats(rng.integers(0x00800000, 0x7F7FFFFF, COUNT)) for _ in range(2)]
    return signs * normal[0], normal[1]


@pytest.mark.parametrize("units", range(-3, 4))
@pytest.mark.parametrize(
    "kind", ["reciprocals", "bfloat16 over 448", "near 1", "integers", "any normal"]
)
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_a_quotient_that_is_off_is_corrected(
    kind: str, units: int, rng: np.random.Generator
) -> None:
    a, b = pairs(kind, rng)
    want = a / b
    found = floats(want.view(np.int32) + units)
    got = np.asarray(jax.jit(corrected_quotient)(a, b, found))
    tiny = np.finfo(np.float32).tiny
    normal = np.isfinite(want) & (np.abs(want) >= tiny) & np.isfinite(found)
    normal &= np.abs(found) >= tiny
    assert normal.mean() > 0.7
    np.testing.assert_array_equal(got[normal].view(np.int32), want[normal].view(np.int32))


def test_what_is_not_normal_stays() -> None:
    a = jnp.asarray([0, 1, jnp.nan, jnp.inf, 5, 1e-38, 3e38], jnp.float32)
    b = jnp.asarray([3, 0, 1, 2, jnp.inf, 1e5, 1e-5], jnp.float32)
    found = jnp.arange(7, dtype=jnp.float32)
    np.testing.assert_array_equal(corrected_quotient(a, b, found)[:6], found[:6])


def test_quotients_are_corrected_on_gpus_alone() -> None:
    a, b = jnp.ones(8, jnp.float32), jnp.full(8, 3.0, jnp.float32)
    traced = jax.jit(divide).trace(a, b)
    for platform, corrected in (("cpu", False), ("cuda", True), ("tpu", True)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("shift_left" in text) == corrected, platform
    np.testing.assert_array_equal(jax.jit(divide)(a, b), np.float32(1) / np.full(8, 3, np.float32))


def test_every_e4m3_number() -> None:
    codes = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn)
    for decode in (from_e4m3, jax.jit(from_e4m3)):
        got = np.asarray(decode(codes))
        want = codes.astype(np.float32)
        np.testing.assert_array_equal(got, want)
        same_sign = np.signbit(got) == np.signbit(want)
        assert same_sign[~np.isnan(want)].all()


@pytest.mark.parametrize("form", mm.WEIGHT_FORMATS)
def test_no_cast_is_undone_by_a_cast(form: str) -> None:
    """What a GPU would drop: a cast from E4M3 in a program that may have made it of float32."""
    recipe = mm.RECIPES[form]
    x = jnp.ones((4, 256), jnp.bfloat16)
    scale = jnp.float32(0.5) if form == "nvfp4" else None

    def programs(x: jax.Array) -> list[jax.Array]:
        tokens = quantize_tokens(x, recipe).decoded()
        act = x.astype(jnp.float32)
        second = expert.second_input(act, None, recipe, scale)
        return [tokens, second]

    text = jax.jit(programs).lower(x).as_text()
    assert not re.search(r"stablehlo.convert .*f8E4M3FN>\) ->", text)


def test_nvfp4_rounds_its_scales_before_it_divides() -> None:
    text = jax.jit(quantization.quantize_nvfp4).lower(jnp.ones(32), jnp.float32(1)).as_text()
    assert not re.search(r"stablehlo.convert .*f8E4M3FN>\) ->", text)
    assert "f8E4M3FN" in text
