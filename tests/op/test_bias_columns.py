"""bias_columns.py: a layer with folded biases against the same layer with biases of their own."""

import functools
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from jax.sharding import AxisType

import jax_megamoe as mm
from jax_megamoe.routing.replicas import replica_map

TOKENS, HIDDEN = 32, 192
FORMATS = ("mxfp4", "mxfp8", "bf16")


@functools.cache
def layer(form: str, **changes: Any) -> tuple[mm.MoEConfig, mm.ExpertWeights, mm.ExpertWeights]:
    """Config, parameters with biases, and the same folded."""
    cfg = cases.config(form, activation=cases.ACTIVATIONS["gpt_oss"], **changes)
    weights = cases.filled_up(cfg, HIDDEN)
    return cfg, weights, mm.fold_biases(cfg, weights)


def inputs(cfg: mm.MoEConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens with noise where a filled-up row has zeros: nothing there matters."""
    x, ids, factors = cases.tokens(cfg, TOKENS)
    return x, ids.at[3, 1].set(-1).at[5].set(-1), factors


def host(y: jax.Array) -> np.ndarray:
    return np.asarray(y, np.float32)


@pytest.mark.parametrize("form", FORMATS)
def test_equals_the_layer_with_biases(form: str) -> None:
    """Both implementations multiply the columns; the oracle unfolds them."""
    cfg, weights, folded = layer(form)
    args = inputs(cfg)
    want = mm.mega_moe(*args, weights, config=cfg, implementation="xla")
    plain = folded.with_routed(w2_bias=None)
    without = mm.mega_moe(*args, plain, config=cfg, implementation="xla")
    assert cases.relative_error(host(without), host(want)) > 0.3
    limit = tolerances.AGREEMENT[form].norm + tolerances.SECOND_BIASES
    outputs = {}
    for implementation in ("xla", "reference"):
        y = mm.mega_moe(*args, folded, config=cfg, implementation=implementation)
        assert cases.relative_error(host(y), host(want)) <= limit, implementation
        assert not host(y)[5].any()
        outputs[implementation] = y
    cases.assert_agree(outputs["xla"], outputs["reference"], form, "xla against reference")
    oracle = mm.einsum_moe(*args, folded, config=cfg)
    np.testing.assert_array_equal(host(oracle), host(mm.einsum_moe(*args, weights, config=cfg)))


@pytest.mark.parametrize("form", FORMATS)
def test_the_first_biases_are_exact(form: str) -> None:
    """Without second biases the sums differ in their order alone: here in nothing."""
    cfg, weights, folded = layer(form)
    weights, folded = (
        each.with_routed(w2_bias=jnp.zeros_like(each.routed.w2_bias)) for each in (weights, folded)
    )
    args = inputs(cfg)
    got, want = (mm.mega_moe(*args, each, config=cfg) for each in (folded, weights))
    cases.assert_agree(got, want, form, "folded")
    assert (host(got) == host(want)).mean() > 0.999


@pytest.mark.parametrize("form", FORMATS)
def test_second_biases_are_rounded_as_stated(form: str) -> None:
    """Element by element: what differs is five roundings to BF16 of known values."""
    cfg, weights, _ = layer(form)
    # Without first biases nothing else differs; the columns are 0 in both layers.
    own = weights.with_routed(w13_bias=jnp.zeros_like(weights.routed.w13_bias))
    columns = mm.fold_biases(cfg, own)
    plain = own.with_routed(w13_bias=None, w2_bias=None)
    x, ids, factors = inputs(cfg)

    def run(each: mm.ExpertWeights, chosen: jax.Array = ids) -> np.ndarray:
        return host(mm.mega_moe(x, chosen, factors, each, config=cfg, implementation="reference"))

    slots = np.arange(cfg.top_k)
    outputs = np.stack([run(plain, jnp.where(slots == slot, ids, -1)) for slot in slots])
    biases = np.asarray(factors)[..., None] * np.asarray(own.routed.w2_bias)[np.asarray(ids)]
    biases = np.where(np.asarray(ids)[..., None] >= 0, biases, 0).transpose(1, 0, 2)
    got, want, without = run(columns), run(own), run(plain)
    rounded = [*(outputs + biases), *outputs, without, got, want]
    # Each value is known after its rounding: half a bit of that is at most 1 / (1 - 2^-8) more.
    allowed = sum(np.abs(each) for each in rounded) * tolerances.BF16_ROUNDING * (1 + 2**-6)
    different = np.abs(got - want)
    assert different.max() > 0 and (different <= allowed).all()
    assert cases.relative_error(got, want) <= tolerances.SECOND_BIASES


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_over_ranks_with_replicas_padding_and_stats(kind: AxisType) -> None:
    cfg, _, folded = layer("mxfp4", num_experts=16, num_logical_experts=8)
    mesh = cases.ep_mesh(4, kind)
    spread = cases.sharded(folded, folded.partition_specs("ep"), mesh)
    slots = np.random.default_rng(0).permutation(np.arange(16) % 8)
    moved = jax.tree.map(lambda array: array[jnp.asarray(slots)], folded)
    eplb = replica_map(slots, 8)
    x, ids, factors = inputs(cfg)
    mask = jnp.arange(TOKENS) % 5 == 0
    dirty = jnp.where(mask[:, None], jnp.bfloat16(jnp.nan), x)
    want, counts = mm.mega_moe(
        x, ids, factors, folded, config=cfg, padding_mask=mask, return_stats=True
    )
    y, of_ranks = mm.mega_moe(
        dirty, ids, factors, spread, config=cfg, mesh=mesh, axis="ep", padding_mask=mask,
        return_stats=True,
    )  # fmt: skip
    assert not host(want)[::5].any() and np.asarray(counts).sum() > 0
    assert np.asarray(counts).sum() == np.asarray(of_ranks).sum()
    cases.assert_agree(y, want, "mxfp4", "four ranks")
    y = mm.mega_moe(x, ids, factors, moved, config=cfg, padding_mask=mask, eplb=eplb)
    cases.assert_agree(y, want, "mxfp4", "moved experts")


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_gradients(num_ranks: int) -> None:
    """As of the layer with biases; of tokens 0 where the constant is."""
    cfg, weights, folded = layer("bf16")
    x, ids, factors = inputs(cfg)
    x = x.at[:, -1:].set(0)
    places: dict[str, Any] = {}
    if num_ranks > 1:
        places = dict(mesh=cases.ep_mesh(num_ranks), axis="ep")
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal(x.shape), jnp.float32)

    def loss(x: jax.Array, factors: jax.Array, weights: mm.ExpertWeights) -> jax.Array:
        y = mm.mega_moe(x, ids, factors, weights, config=cfg, **places)
        return (y.astype(jnp.float32) * cotangent).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))
    got, want = gradients(x, factors, folded), gradients(x, factors, weights)
    assert not host(got[0])[:, HIDDEN:].any()
    limit = tolerances.GRADIENT_AGREEMENT["bf16"]
    assert cases.relative_error(host(got[0]), host(want[0])) <= limit.x
    assert cases.relative_error(got[1], want[1]) <= limit.topk_weights


def test_layers_keep_them() -> None:
    cfg, _, folded = layer("mxfp8")
    args = inputs(cfg)
    made = mm.MegaMoE(cfg, folded)
    assert made.weights.folds_biases
    want = mm.mega_moe(*args, folded, config=cfg)
    np.testing.assert_array_equal(host(made(*args)), host(want))
    batched = [jnp.stack([each, each[::-1]])[:, : TOKENS // 2] for each in args]
    y = jax.vmap(lambda *each: mm.mega_moe(*each, folded, config=cfg))(*batched)
    cases.assert_agree(y[0], want[: TOKENS // 2], "mxfp8", "a batch")
