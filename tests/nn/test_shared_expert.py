"""shared_expert.py: the unfused shared expert against NumPy in float64."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from flax import nnx

import jax_megamoe as mm
from jax_megamoe.nn.shared_expert import SharedExpert

HIDDEN, INTER = 192, 96


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("name", ["swiglu", "clamped", "gpt_oss"])
def test_output(name: str, has_gate: bool, rng: np.random.Generator) -> None:
    activation = cases.ACTIVATIONS[name]
    expert = SharedExpert(HIDDEN, INTER, activation=activation, has_gate=has_gate, rngs=nnx.Rngs(0))
    x = jnp.asarray(4 * rng.standard_normal((20, HIDDEN)), jnp.bfloat16)
    y = nnx.jit(lambda expert, x: expert(x))(expert, x)
    wide = np.asarray(x, np.float64)
    gate, up, down = (
        np.asarray(param[...], np.float64)
        for param in (expert.gate_proj, expert.up_proj, expert.down_proj)
    )
    g, u = wide @ gate.T, wide @ up.T
    clamp = np.inf if activation.clamp is None else activation.clamp
    g, u = np.minimum(g, clamp), np.clip(u, -clamp, clamp)
    want = (g * sigmoid(activation.alpha * g) * (u + activation.beta)) @ down.T
    if has_gate:
        want *= sigmoid(wide @ np.asarray(expert.output_gate[...], np.float64).T)
    assert y.dtype == jnp.float32
    # One rounding to bfloat16, of the value between the matmuls.
    assert cases.relative_error(y, want) < tolerances.ACCURACY["bf16"].layer[0]


def test_parameters_are_replicated_and_of_unit_gain() -> None:
    mesh = cases.ep_mesh(4)
    plain = mm.Activation("swiglu")
    expert = SharedExpert(
        HIDDEN, INTER, activation=plain, has_gate=True, mesh=mesh, rngs=nnx.Rngs(0)
    )
    for param in jax.tree.leaves(nnx.state(expert, nnx.Param)):
        assert param.dtype == jnp.bfloat16 and len(param.sharding.device_set) == 4
        assert param.sharding.is_fully_replicated
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = np.asarray(getattr(expert, name)[...], np.float32)
        np.testing.assert_allclose(weight.std() * weight.shape[1] ** 0.5, 1, rtol=0.03)
