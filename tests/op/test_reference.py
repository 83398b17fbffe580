"""reference.py: `einsum_moe` against the NumPy oracle, and exact mode against float matrices."""

from functools import partial

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import shapes

import jax_megamoe as mm

CELLS = [(form, name) for form in cases.RECIPES for name in cases.activations_of(form)]


def tiny(form: str, **changes: object) -> mm.MoEConfig:
    return cases.config(form, **(shapes.TINY | changes))


def routed(cfg: mm.MoEConfig, num_tokens: int = 12) -> tuple[jax.Array, ...]:
    x, ids, weights = cases.tokens(cfg, num_tokens)
    ids = ids.at[1].set(-1).at[2, 0].set(-1).at[3].set(2)
    return x, ids, weights.at[4, 0].set(0.0).at[5, 1].set(-0.5)


def assert_as_oracle(cfg: mm.MoEConfig, weights: mm.ExpertWeights, where: str) -> None:
    inputs = routed(cfg)
    got = mm.einsum_moe(*inputs, weights, config=cfg)
    assert got.dtype == jnp.bfloat16
    host = [np.asarray(array) for array in inputs]
    want = oracle.bf16(oracle.moe(*host, weights, cfg))
    cases.assert_agree(got, want, cfg.weight_format.name, where)
    exact = mm.einsum_moe(*inputs, weights, config=cfg, exact=True)
    assert exact.dtype == jnp.float32
    want = oracle.moe(*host, weights, cfg, rounds=False)
    assert cases.relative_error(exact, want) < 1e-5, f"{where}, exact"


@pytest.mark.parametrize(("form", "activation"), CELLS)
def test_equals_the_oracle(form: str, activation: str) -> None:
    cfg = tiny(form, activation=cases.ACTIVATIONS[activation])
    assert_as_oracle(cfg, cases.weights(cfg), f"{form} {activation}")


SHARED = [(form, None, n) for form in cases.FUSING for n in (1, 2)]


@pytest.mark.parametrize(("form", "shared_format", "num"), [*SHARED, ("nvfp4", "bf16", 1)])
def test_fused_shared_expert_equals_the_oracle(
    form: str, shared_format: str | None, num: int
) -> None:
    # The clamp shows that the shared expert is clamped too.
    activation = cases.ACTIVATIONS["clamped"]
    cfg = tiny(form, shared_format=shared_format, num_shared_experts=num, activation=activation)
    weights = cases.weights(cfg)
    assert weights.shared is not None
    assert_as_oracle(cfg, weights, f"{form} with {num} {cfg.shared_format} shared experts")


@pytest.mark.parametrize("form", cases.RECIPES)
def test_biases_equal_the_oracle(form: str) -> None:
    cfg = tiny(form)
    assert_as_oracle(cfg, cases.weights(cfg, biased=True), f"{form} with biases")


def test_sgl_row_order_equals_the_oracle() -> None:
    cfg = tiny("nvfp4", kernel_source="sgl")
    weights = cases.weights(cfg, biased=True)
    assert weights.layout == "sgl_fp4"
    assert_as_oracle(cfg, weights, "nvfp4 for sgl")


def test_input_scale_is_the_largest_and_1_without_any() -> None:
    cfg = tiny("nvfp4")
    parts = cases.float_matrices(cfg, gain=4.0)["routed"]
    quantise = partial(mm.quantize_experts, cfg, *parts)
    inputs = routed(cfg)

    def run(scales: list[float] | None) -> jax.Array:
        array = None if scales is None else jnp.asarray(scales, jnp.float32)
        return mm.einsum_moe(*inputs, quantise(w2_input_scale=array), config=cfg)

    largest = run([0.3, 0.3, 0.3, 0.3])
    np.testing.assert_array_equal(run([0.1, 0.0, 0.3, 0.2]), largest)
    ones = run([1.0, 0.5, 1.0, 1.0])
    np.testing.assert_array_equal(run(None), ones)
    np.testing.assert_array_equal(run([0.0, 0.0, 0.0, 0.0]), ones)
    assert cases.relative_error(largest, ones) > 1e-3


def test_clamp_holds_gate_from_above_and_up_from_both_sides() -> None:
    # Gate 30 and up -30 in the first hidden value, gate -30 in the second; down reads them out.
    cfg = tiny("bf16", activation=cases.ACTIVATIONS["gpt_oss"], num_shared_experts=1)
    gate = jnp.zeros((4, 128, 128), jnp.bfloat16).at[:, 0, 0].set(30).at[:, 1, 0].set(-30)
    up = jnp.zeros_like(gate).at[:, :2, 0].set(-30)
    down = jnp.zeros_like(gate).at[:, 0, 0].set(1).at[:, 1, 1].set(1)
    weights = mm.quantize_experts(cfg, gate, up, down, shared=(gate[0], up[0], down[0]))
    x = jnp.zeros((1, 128), jnp.bfloat16).at[0, 0].set(1)
    ids, factors = jnp.asarray([[0, -1]], jnp.int32), jnp.ones((1, 2), jnp.float32)
    y = mm.einsum_moe(x, ids, factors, weights, config=cfg, exact=True)
    one = 7 / (1 + np.exp(-1.702 * 7)) * (-7 + 1)
    other = -30 / (1 + np.exp(1.702 * 30)) * (-7 + 1)
    np.testing.assert_allclose(y[0, :3], [2 * one, 2 * other, 0], rtol=1e-6, atol=1e-18)


def test_weight_0_does_not_mask_an_infinite_expert_but_an_unrouted_slot_does() -> None:
    cfg = tiny("bf16")
    big = jnp.full((4, 128, 128), 3e38, jnp.bfloat16)
    weights = mm.quantize_experts(cfg, big, big, big)
    x = jnp.ones((2, 128), jnp.bfloat16)
    ids = jnp.asarray([[0, -1], [-1, -1]], jnp.int32)
    y = mm.einsum_moe(x, ids, jnp.zeros((2, 2), jnp.float32), weights, config=cfg)
    assert np.isnan(np.asarray(y[0], np.float32)).all()
    assert not np.asarray(y[1], np.float32).any()


def test_no_tokens() -> None:
    cfg = tiny("mxfp8", num_shared_experts=1)
    x, ids, factors = (array[:0] for array in cases.tokens(cfg, 2))
    for exact in (False, True):
        y = mm.einsum_moe(x, ids, factors, cases.weights(cfg), config=cfg, exact=exact)
        assert y.shape == (0, 128)


def test_padded_rows_are_0() -> None:
    cfg = tiny("mxfp4", num_shared_experts=1)
    inputs, weights = routed(cfg), cases.weights(cfg)
    mask = jnp.arange(12) >= 8
    whole = mm.einsum_moe(*inputs, weights, config=cfg)
    y = mm.einsum_moe(*inputs, weights, config=cfg, padding_mask=mask)
    np.testing.assert_array_equal(y[:8], whole[:8])
    assert not np.asarray(y[8:], np.float32).any()
