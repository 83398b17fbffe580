"""staging.py against the recorded stagings, and the routing rules."""

from typing import Any

import cases
import golden_records as golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scale_pages

import jax_megamoe as mm
from jax_megamoe.numerics import elements
from jax_megamoe.numerics.tokens import quantize_tokens
from jax_megamoe.op.staged_tokens import StagedTokens, physical_routing, stage

EAGER_AND_JIT = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])


def recorded() -> dict[str, np.ndarray]:
    return {k: v for k, v in golden.arrays("staging").items() if k.startswith("stage_256")}


def config(form: str, **changes: Any) -> mm.MoEConfig:
    """The recorded layer: 173 tokens, top 8; its largest id says how many experts."""
    experts = int(recorded()["stage_256_topk_ids"].max()) + 1
    sizes = dict(hidden_size=256, intermediate_size=128, max_num_tokens=256)
    return mm.MoEConfig(num_experts=experts, top_k=8, weight_format=form, **sizes, **changes)


def stage_recorded(form: str, wrap: Any, **changes: Any) -> StagedTokens:
    data, cfg = recorded(), config(form, **changes)

    def run(x: Any, ids: Any, weights: Any, mask: Any) -> StagedTokens:
        fused = cfg.num_shared_experts > 0
        return stage(x, ids, weights, config=cfg, padding_mask=mask, fused_shared=fused)

    return wrap(run)(
        golden.bfloat16("staging", "stage_256_x"),
        data["stage_256_topk_ids"],
        data["stage_256_topk_weights"],
        data["stage_256_is_padding"],
    )


def words(scales: Any) -> Any:
    return elements.pack_words(scales)


@EAGER_AND_JIT
@pytest.mark.parametrize("form", ["mxfp8", "mxfp4"])
def test_mxfp8_is_the_recorded_staging(form: str, wrap: Any) -> None:
    staged = stage_recorded(form, wrap)
    golden.assert_recorded("staging", "stage_256_mxfp8_x", staged.tokens.values)
    golden.assert_recorded("staging", "stage_256_mxfp8_x_sf", words(staged.tokens.scale))
    assert staged.tokens.token_scale is None and staged.shared_tokens is None


@EAGER_AND_JIT
def test_nvfp4_is_the_recorded_staging_of_vllm(wrap: Any) -> None:
    staged = stage_recorded("nvfp4", wrap, num_shared_experts=1)
    golden.assert_recorded("staging", "stage_256_nvfp4_x", staged.tokens.values)
    golden.assert_recorded("staging", "stage_256_nvfp4_x_sf", words(staged.tokens.scale))
    golden.assert_recorded("staging", "stage_256_nvfp4_x_scales", staged.tokens.token_scale)
    shared = staged.shared_tokens
    assert shared is not None
    golden.assert_recorded("staging", "stage_256_mxfp8_x", shared.values)
    golden.assert_recorded("staging", "stage_256_mxfp8_x_sf", words(shared.scale))
    pages = scale_pages.shared_scale_pages(shared.scale, 64)
    golden.assert_recorded("staging", "stage_256_shared_sf_bm64", pages.T)


@EAGER_AND_JIT
@pytest.mark.parametrize("form", mm.WEIGHT_FORMATS)
def test_routing_is_the_recorded_one(form: str, wrap: Any) -> None:
    staged = stage_recorded(form, wrap)
    ids = np.asarray(staged.topk_ids)
    assert ids.dtype == np.int32
    golden.assert_recorded("staging", "stage_256_topk_idx_out", ids.astype(np.int64))
    golden.assert_recorded("staging", "stage_256_topk_weights_out", staged.topk_weights)


@pytest.mark.parametrize(
    ("form", "shared_format", "same"),
    [
        ("mxfp4", None, True),
        ("mxfp8", None, True),
        ("bf16", None, True),
        ("nvfp4", "mxfp8", False),
        ("nvfp4", "bf16", False),
    ],
)
def test_input_of_a_fused_shared_expert(form: str, shared_format: str | None, same: bool) -> None:
    cfg = cases.config(form, shared_format=shared_format, num_shared_experts=1)
    x, ids, weights = cases.tokens(cfg, 8)
    staged = stage(x, ids, weights, config=cfg, fused_shared=True)
    assert staged.shared_tokens is not None
    assert (staged.shared_tokens is staged.tokens) == same
    want = quantize_tokens(x, mm.RECIPES[str(cfg.shared_format)])
    golden.assert_same(staged.shared_tokens.values, want.values)
    assert stage(x, ids, weights, config=cfg).shared_tokens is None


@pytest.mark.parametrize("form", mm.WEIGHT_FORMATS)
def test_decoded_tokens_are_near_the_tokens(form: str) -> None:
    cfg = cases.config(form)
    x, ids, weights = cases.tokens(cfg, 16)
    tokens = stage(x, ids, weights, config=cfg).tokens
    decoded = np.asarray(tokens.decoded(), np.float64)
    if tokens.token_scale is not None:
        decoded *= np.asarray(tokens.token_scale, np.float64)[:, None]
    limit = {"bf16": 0.0, "nvfp4": 0.11}.get(form, 0.03)
    for got, want in zip(decoded, np.asarray(x, np.float64), strict=True):
        assert cases.relative_error(got, want) <= limit
    assert not decoded[8].any()


def test_padding_and_unknown_ids_are_unrouted_with_weight_0() -> None:
    cfg = cases.config("bf16")
    ids = jnp.asarray([[0, 15, 16, -1], [3, 3, 2**31 - 1, -(2**31)], [1, 2, 3, 4]], jnp.int32)
    weights = jnp.asarray([[1, 2, 3, jnp.nan], [5, 6, jnp.inf, 8], [9, 10, 11, jnp.nan]])
    mask = jnp.asarray([False, False, True])
    got_ids, got_weights = physical_routing(ids, weights, config=cfg, padding_mask=mask)
    np.testing.assert_array_equal(got_ids, [[0, 15, -1, -1], [3, 3, -1, -1], [-1] * 4])
    np.testing.assert_array_equal(got_weights, [[1, 2, 0, 0], [5, 6, 0, 0], [0] * 4])


def test_replicas_follow_the_map_given_else_the_initial_one() -> None:
    cfg = cases.config("bf16", num_logical_experts=12)
    ids = jnp.tile(jnp.arange(4, dtype=jnp.int32), (5, 1)).at[4, 0].set(12)
    weights = jnp.ones((5, 4))
    first, factors = physical_routing(ids, weights, config=cfg)
    # Slots 0..3 hold logical 0..3 again in 12..15: token i takes replica hash(i) % 2.
    hashes = np.arange(5) * 2654435769 % 2**32 % 2
    want = np.arange(4) + 12 * hashes[:, None]
    want[4, 0] = -1
    np.testing.assert_array_equal(first, want)
    np.testing.assert_array_equal(factors, np.where(want < 0, 0, 1))
    moved = mm.replica_map(np.asarray([*range(11, -1, -1), 5, 5, 5, 5]), 12)
    got, _ = physical_routing(ids, weights, config=cfg, eplb=moved)
    np.testing.assert_array_equal(got[:4], np.tile([11, 10, 9, 8], (4, 1)))
