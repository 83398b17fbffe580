"""How far the quantised layer is from exact arithmetic: relative error and gain, by format.

`python -m pytest tests/test_accuracy.py -s` prints the table.
"""

from functools import partial
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tolerances

import jax_megamoe as mm

TOKENS = 256
SIZES = dict(hidden_size=512, intermediate_size=256, max_num_tokens=TOKENS)
CELLS = [(form, name) for form in cases.RECIPES for name in cases.activations_of(form)]


def inputs(cfg: mm.MoEConfig) -> tuple[jax.Array, ...]:
    """Normal tokens, so that the activation is in its bend; random routing."""
    _, ids, weights = cases.tokens(cfg, TOKENS)
    x = np.random.default_rng(4).standard_normal((TOKENS, cfg.hidden_size), np.float32)
    return jnp.asarray(x, jnp.bfloat16), ids, weights


def gain(y: Any, exact: Any) -> float:
    """The slope of y against exact y."""
    y, exact = np.asarray(y, np.float64), np.asarray(exact, np.float64)
    return float((y * exact).sum() / (exact * exact).sum())


def float_layer(cfg: mm.MoEConfig) -> np.ndarray:
    """The layer on the float matrices it was quantised from, in NumPy."""
    x, ids, factors = (np.asarray(array) for array in inputs(cfg))
    x = x.astype(np.float32)
    parts = cases.float_matrices(cfg)
    gate, up, down = (np.asarray(part, np.float32) for part in parts["routed"])
    y = np.zeros_like(x)
    for e in range(cfg.num_experts):
        hidden = oracle.activate(x @ gate[e].T, x @ up[e].T, cfg.activation)
        y += (factors * (ids == e)).sum(1)[:, None] * (hidden @ down[e].T)
    if "shared" in parts:
        gate, up, down = (np.asarray(part, np.float32) for part in parts["shared"])
        y += oracle.activate(x @ gate.T, x @ up.T, cfg.activation) @ down.T
    return y


def assert_within(value: float, bounds: tuple[float, float], what: str) -> None:
    assert bounds[0] <= value <= bounds[1], f"{what}: {value:.4f}, expected within {bounds}"


def assert_gain(got: float, expected: float) -> None:
    assert abs(got - expected) <= tolerances.GAIN, f"gain {got:.4f}, expected {expected}"


@pytest.mark.parametrize("form", cases.RECIPES)
def test_error_and_gain(form: str) -> None:
    cfg = cases.config(form, **SIZES)
    weights = cases.weights(cfg, gain=1.0)
    run = partial(mm.einsum_moe, *inputs(cfg), weights, config=cfg)
    y, exact, plain = run(), run(exact=True), float_layer(cfg)
    activations, layer = cases.relative_error(y, exact), cases.relative_error(y, plain)
    gains = gain(y, exact), gain(y, plain)
    print(
        f"\n{form:9} error {activations:.4f} from activations, {layer:.4f} with weights; ", end=""
    )
    print(f"gain {gains[0]:.4f}, {gains[1]:.4f}")
    allowed = tolerances.ACCURACY[form]
    assert_within(activations, allowed.activations, "error of activations")
    assert_within(layer, allowed.layer, "error of the layer")
    assert_gain(gains[0], allowed.gain)
    assert_gain(gains[1], allowed.layer_gain)


@pytest.mark.parametrize(("form", "name"), CELLS)
def test_gain_with_every_activation(form: str, name: str) -> None:
    cfg = cases.config(form, activation=cases.ACTIVATIONS[name], **SIZES)
    run = partial(mm.einsum_moe, *inputs(cfg), cases.weights(cfg, gain=1.0), config=cfg)
    assert_gain(gain(run(), run(exact=True)), tolerances.ACCURACY[form].gain)


@pytest.mark.parametrize(
    ("form", "shared_format"), [*((form, None) for form in cases.FUSING), ("nvfp4", "bf16")]
)
def test_gain_with_a_fused_shared_expert(form: str, shared_format: str | None) -> None:
    cfg = cases.config(form, shared_format=shared_format, num_shared_experts=2, **SIZES)
    run = partial(mm.einsum_moe, *inputs(cfg), cases.weights(cfg, gain=1.0), config=cfg)
    y, exact = run(), run(exact=True)
    routed, shared = tolerances.ACCURACY[form], tolerances.ACCURACY[str(cfg.shared_format)]
    # Half of the output is the shared expert's: two of it against four weighed by 1/2 on average.
    assert_gain(gain(y, exact), (routed.gain + shared.gain) / 2)
    assert_gain(gain(y, float_layer(cfg)), (routed.layer_gain + shared.layer_gain) / 2)
    assert cases.relative_error(y, exact) <= tolerances.ACCURACY[form].activations[1]


AT = ((0, 0), (0, 0), (0, 3))
"""Where the matrices of the next test are not zero."""


@pytest.mark.parametrize("form", cases.RECIPES)
def test_gate_and_up_are_told_apart(form: str) -> None:
    """Gate rows of ones, up rows of twos: silu(1) * 2, not silu(2) * 1."""
    cfg = cases.config(form, num_experts=2, top_k=1)
    gate = jnp.zeros((2, 128, 256), jnp.bfloat16).at[:, :, 0].set(1)
    down = jnp.zeros((2, 256, 128), jnp.bfloat16).at[:, :, 3].set(1)
    weights = mm.quantize_experts(cfg, gate, 2 * gate, down)
    x = jnp.zeros((1, 256), jnp.bfloat16).at[0, 0].set(1)
    y = mm.mega_moe(x, jnp.ones((1, 1), jnp.int32), jnp.ones((1, 1)), weights, config=cfg)
    # The kernel's weights: FlashInfer's NVFP4 holds 0.952 here, others 1.
    held = mm.dequantize_experts(cfg, weights)
    one, two, last = (float(each[0, row, k]) for each, (row, k) in zip(held, AT, strict=True))
    want = one / (1 + np.exp(-one)) * two * last
    np.testing.assert_allclose(np.asarray(y[0, :8], np.float32), want, rtol=0.05)
    assert 0.95 <= one <= 1
    assert two == 2 * one


@pytest.mark.parametrize("form", cases.RECIPES)
def test_zero_weights_and_zero_tokens_give_zero(form: str) -> None:
    cfg = cases.config(form, num_experts=2, top_k=1)
    zeros = jnp.zeros((2, 128, 256), jnp.bfloat16)
    one = zeros.at[0, 5, 7].set(1)
    weights = mm.quantize_experts(cfg, one, one, jnp.zeros((2, 256, 128), jnp.bfloat16))
    ids = jnp.asarray([[0], [1], [0]], jnp.int32)
    x = jnp.ones((3, 256), jnp.bfloat16).at[2].set(0)
    y = mm.mega_moe(x, ids, jnp.ones((3, 1)), weights, config=cfg)
    assert not np.asarray(y, np.float32).any()
