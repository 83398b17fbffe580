"""expert.py: the derivatives of the steps that round, and of the activation."""

import dataclasses
from functools import partial

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_megamoe as mm
from jax_megamoe.formats import Rounding
from jax_megamoe.numerics import expert

SGL_NVFP4 = dataclasses.replace(mm.RECIPES["nvfp4"], rounding=Rounding(floors_scales=False))


@pytest.mark.parametrize("recipe", [*mm.RECIPES.values(), SGL_NVFP4])
def test_a_rounding_is_the_identity(recipe: mm.Recipe, rng: np.random.Generator) -> None:
    act, tangent = (jnp.asarray(rng.standard_normal((4, 128)), jnp.float32) for _ in range(2))
    act = act.at[0, :16].set(1e6)  # NVFP4 saturates here
    scale = jnp.float32(0.25) if recipe.activations.has_global_scale else None
    second = partial(expert.second_input, weight=None, recipe=recipe, activation_scale=scale)
    value, got = jax.jvp(second, (act,), (tangent,))
    np.testing.assert_array_equal(value, second(act))
    want = (tangent if scale is None else tangent / scale).astype(value.dtype)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(jax.jvp(expert.round_bf16, (act,), (tangent,))[1], tangent)


def test_large_negative_gates_have_no_nan() -> None:
    gate = jnp.asarray([-1e4, -200.0, -89.0, 0.0, 200.0], jnp.float32)
    for name in cases.ACTIVATIONS:
        slope = jax.vmap(jax.grad(expert.activate), (0, 0, None))(
            gate, jnp.ones_like(gate), cases.ACTIVATIONS[name]
        )
        assert np.isfinite(slope).all(), name
        np.testing.assert_allclose(slope[:2], 0, atol=1e-30)


@pytest.mark.parametrize(("dtype", "highest"), [("float32", True), ("bfloat16", False)])
def test_float32_is_not_multiplied_as_less(dtype: str, highest: bool) -> None:
    """A GPU's default is TF32, which does not hold fp8_block's decoded values."""
    x, w = jnp.ones((4, 8), dtype), jnp.ones((6, 8), dtype)
    assert ("HIGHEST" in jax.jit(expert.matmul).lower(x, w).as_text()) == highest
