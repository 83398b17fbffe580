"""router.py: experts and weights against loops in float64, ties, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances

import jax_megamoe as mm
from jax_megamoe.routing.router import router_logits, select_experts

EXPERTS, TOP_K, TOKENS, HIDDEN = 16, 4, 33, 128

ROUTERS = {
    "softmax": {},
    "softmax, renormalised": dict(renormalize=True),
    "softmax, scaled": dict(scaling_factor=0.5),
    "sigmoid": dict(scoring="sigmoid"),
    "DeepSeek-V3": dict(
        scoring="sigmoid",
        renormalize=True,
        scaling_factor=2.5,
        num_groups=4,
        top_groups=2,
        has_correction_bias=True,
    ),
    "Kimi-K2": dict(
        scoring="sigmoid", renormalize=True, scaling_factor=2.827, has_correction_bias=True
    ),
    "DeepSeek-V4": dict(
        scoring="sqrtsoftplus", renormalize=True, scaling_factor=1.5, has_correction_bias=True
    ),
    "DeepSeek-V4, table": dict(
        scoring="sqrtsoftplus", renormalize=True, scaling_factor=1.5, table_size=50
    ),
    "GPT-OSS": dict(scoring="topk_softmax", has_bias=True),
}


def make(**settings: Any) -> mm.Router:
    return mm.Router(**(dict(num_experts=EXPERTS, top_k=TOP_K) | settings))


def params(router: mm.Router, rng: np.random.Generator) -> mm.RouterParams:
    def floats(wanted: bool, std: float) -> Any:
        return jnp.asarray(rng.standard_normal(EXPERTS) * std, jnp.float32) if wanted else None

    table = rng.integers(0, EXPERTS, (router.table_size, TOP_K)) if router.table_size else None
    return mm.RouterParams(
        weight=jnp.asarray(rng.standard_normal((EXPERTS, HIDDEN)) * HIDDEN**-0.5, jnp.bfloat16),
        bias=floats(router.has_bias, 0.5),
        correction_bias=floats(router.has_correction_bias, 0.3),
        table=None if table is None else jnp.asarray(table, jnp.int32),
    )


def tokens(router: mm.Router, rng: np.random.Generator) -> tuple[jax.Array, Any]:
    x = jnp.asarray(rng.standard_normal((TOKENS, HIDDEN)), jnp.bfloat16)
    ids = jnp.asarray(rng.integers(0, router.table_size or 1, TOKENS), jnp.int32)
    return x, ids if router.table_size else None


def oracle(
    x: np.ndarray, params: mm.RouterParams, router: mm.Router, token_ids: Any
) -> tuple[np.ndarray, np.ndarray]:
    """A token at a time, in float64."""
    weight = np.asarray(params.weight, np.float64)
    ids = np.zeros((len(x), router.top_k), int)
    weights = np.zeros((len(x), router.top_k))
    for t, row in enumerate(np.asarray(x, np.float64)):
        logits = weight @ row
        if params.bias is not None:
            logits = logits + np.asarray(params.bias, np.float64)
        if router.scoring == "softmax":
            scores = np.exp(logits) / np.exp(logits).sum()
        elif router.scoring == "sigmoid":
            scores = 1 / (1 + np.exp(-logits))
        elif router.scoring == "sqrtsoftplus":
            scores = np.sqrt(np.log1p(np.exp(logits)))
        else:
            scores = np.exp(logits)
        choice = scores.copy()
        if params.correction_bias is not None:
            choice += np.asarray(params.correction_bias, np.float64)
        size = EXPERTS // router.num_groups
        worth = [
            np.sort(choice[g * size : (g + 1) * size])[-2:].sum() for g in range(EXPERTS // size)
        ]
        for group in np.argsort(worth)[: router.num_groups - router.top_groups]:
            choice[group * size : (group + 1) * size] = -np.inf
        chosen = np.argsort(-choice, kind="stable")[: router.top_k]
        if params.table is not None:
            chosen = np.asarray(params.table)[token_ids[t]]
        taken = scores[chosen]
        if router.renormalize or router.scoring == "topk_softmax":
            taken = taken / taken.sum()
        ids[t], weights[t] = chosen, taken * router.scaling_factor
    return ids, weights


@pytest.mark.parametrize("name", ROUTERS)
def test_experts_and_weights(name: str, rng: np.random.Generator) -> None:
    router = make(**ROUTERS[name])
    arrays = params(router, rng)
    x, token_ids = tokens(router, rng)
    ids, weights = jax.jit(lambda x, p, t: mm.route(x, p, router, token_ids=t))(
        x, arrays, token_ids
    )
    want_ids, want_weights = oracle(np.asarray(x), arrays, router, token_ids)
    assert (ids.dtype, weights.dtype) == (jnp.int32, jnp.float32)
    np.testing.assert_array_equal(ids, want_ids)
    limit = tolerances.ROUTING * want_weights.max()
    np.testing.assert_allclose(weights, want_weights, rtol=0, atol=limit)


@pytest.mark.parametrize("name", [name for name in ROUTERS if "table" not in name])
def test_lower_index_wins_between_equal_experts(name: str) -> None:
    router = make(**ROUTERS[name])
    bias = jnp.zeros(EXPERTS) if router.has_correction_bias else None
    ids, weights = select_experts(jnp.zeros((2, EXPERTS)), router, correction_bias=bias)
    np.testing.assert_array_equal(ids, [[0, 1, 2, 3]] * 2)
    assert len(np.unique(weights)) == 1
    logits = jnp.zeros((1, EXPERTS)).at[0, jnp.array([9, 14])].set(1.0)
    ids, _ = select_experts(logits, router, correction_bias=bias)
    # In groups of 4, the groups of 9 and 14 are the best: the rest is theirs too.
    rest = [8, 10] if router.num_groups > 1 else [0, 1]
    np.testing.assert_array_equal(ids, [[9, 14, *rest]])


def test_groups_with_negative_scores_keep_their_experts() -> None:
    """A masked expert is worth -inf, not 0."""
    router = make(**ROUTERS["DeepSeek-V3"])
    bias = jnp.full(EXPERTS, -3.0).at[8:].set(-2.0)
    ids, weights = select_experts(jnp.zeros((1, EXPERTS)), router, correction_bias=bias)
    np.testing.assert_array_equal(ids, [[8, 9, 10, 11]])
    np.testing.assert_allclose(weights, 2.5 / 4, rtol=tolerances.ROUTING)


def test_correction_bias_is_not_in_the_weights() -> None:
    router = make(scoring="sigmoid", has_correction_bias=True)
    bias = jnp.zeros(EXPERTS).at[7].set(100.0)
    ids, weights = select_experts(jnp.zeros((1, EXPERTS)), router, correction_bias=bias)
    np.testing.assert_array_equal(ids, [[7, 0, 1, 2]])
    np.testing.assert_array_equal(weights, [[0.5] * TOP_K])


def test_logits_whose_sigmoid_is_one_are_told_apart() -> None:
    """Llama 4 chooses by logits."""
    router = make(num_experts=4, top_k=1, scoring="sigmoid", weighs_input=True)
    ids, weights = select_experts(jnp.asarray([[20.0, 30.0, 25.0, -1.0]]), router)
    assert (int(ids[0, 0]), float(weights[0, 0])) == (1, 1.0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logits_are_float32(dtype: str, rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.standard_normal((TOKENS, HIDDEN)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((EXPERTS, HIDDEN)), dtype)
    logits = router_logits(x, weight, jnp.ones(EXPERTS))
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T + 1
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, want, rtol=0, atol=tolerances.ROUTING * np.abs(want).max())


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus", "topk_softmax"])
@pytest.mark.parametrize("logit", [-1e30, -200.0, -25.0, 80.0, 1e30])
def test_extreme_logits_give_finite_weights_and_derivatives(scoring: str, logit: float) -> None:
    router = make(scoring=scoring, renormalize=scoring != "topk_softmax")

    def total(logits: jax.Array) -> jax.Array:
        return (select_experts(logits, router).topk_weights ** 2).sum()

    logits = jnp.full((1, EXPERTS), logit, jnp.float32).at[0, 3].add(1.0)
    ids, weights = select_experts(logits, router)
    assert np.isfinite(weights).all() and sorted(np.asarray(ids)[0]) == sorted(set(ids[0].tolist()))
    if logit > -100:  # below, scores of single experts are 0 in float32, and so is their sum
        assert np.isfinite(jax.grad(total)(logits)).all()


def test_sqrtsoftplus_far_below_zero() -> None:
    logits = jnp.linspace(-60.0, 0.0, EXPERTS)[None]
    router = make(scoring="sqrtsoftplus", top_k=EXPERTS)
    _, weights = select_experts(logits, router)
    want = np.sqrt(np.log1p(np.exp(np.asarray(logits, np.float64))))[:, ::-1]
    np.testing.assert_allclose(weights, want, rtol=1e-5)


def test_nan_stays_in_its_token(rng: np.random.Generator) -> None:
    router = make(**ROUTERS["DeepSeek-V3"])
    arrays = params(router, rng)
    x, _ = tokens(router, rng)
    want = mm.route(x, arrays, router)
    got = mm.route(x.at[5].set(jnp.nan), arrays, router)
    others = np.arange(TOKENS) != 5
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[others], np.asarray(b)[others])
    assert ((np.asarray(got.topk_ids) >= 0) & (np.asarray(got.topk_ids) < EXPERTS)).all()


def test_token_ids_without_a_row_route_nowhere_when_traced(rng: np.random.Generator) -> None:
    router = make(**ROUTERS["DeepSeek-V4, table"])
    arrays = params(router, rng)
    x, token_ids = tokens(router, rng)
    odd = token_ids.at[:3].set(jnp.array([-1, 50, -7]))
    ids, weights = jax.jit(lambda t: mm.route(x, arrays, router, token_ids=t))(odd)
    np.testing.assert_array_equal(ids[:3], -1)
    np.testing.assert_array_equal(weights[:3], 0)
    want = mm.route(x, arrays, router, token_ids=token_ids)
    np.testing.assert_array_equal(ids[3:], want.topk_ids[3:])
    np.testing.assert_allclose(weights[3:], want.topk_weights[3:], rtol=tolerances.ROUTING)


class TestErrors:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            (
                dict(weighs_input=True),
                "router top_k: expected 1 where weights multiply inputs: .*, got 4",
            ),
            (dict(top_k=0), "router top_k: expected an integer >= 1, got 0"),
            (dict(top_k=17), "router top_k: expected at most num_experts = 16, got 17"),
            (
                dict(scoring="tanh"),
                r"router scoring: expected one of \['softmax', .*\], got 'tanh'",
            ),
            (dict(num_groups=3), "router num_experts: expected a multiple of 3, got 16"),
            (dict(num_groups=16), "router num_groups: expected at least 2 experts a group"),
            (dict(top_groups=2), "router top_groups: expected at most num_groups = 1, got 2"),
            (
                dict(num_groups=8, top_k=4),
                "router top_k: expected at most the experts of 1 groups = 2, got 4",
            ),
            (
                dict(scoring="topk_softmax", has_correction_bias=True),
                "router scoring: expected another scoring than topk_softmax with groups",
            ),
            (
                dict(table_size=9, has_correction_bias=True),
                "router table_size: expected 0 with groups or a correction bias",
            ),
            (dict(scaling_factor=float("nan")), "router scaling_factor: expected a finite number"),
        ],
    )
    def test_settings(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            make(**settings)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            (dict(renormalize=1), "router renormalize: expected a bool, got 1"),
            (dict(num_experts=2.0), r"router num_experts: expected an integer, got 2.0"),
        ],
    )
    def test_types(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(TypeError, match=message):
            make(**settings)

    @pytest.mark.parametrize(
        ("changes", "kind", "message"),
        [
            (
                dict(weight=jnp.zeros((3, HIDDEN))),
                ValueError,
                r"router weight: expected shape \[16, 128\], got shape \[3, 128\]",
            ),
            (
                dict(weight=jnp.zeros((EXPERTS, HIDDEN), jnp.int8)),
                TypeError,
                r"router weight: expected one of the dtypes \['bfloat16', 'float32'\], got int8",
            ),
            (dict(correction_bias=None), ValueError, "router correction_bias: expected an array"),
            (
                dict(bias=jnp.zeros(EXPERTS)),
                ValueError,
                "router bias: expected None: the Router's settings have none, got an array",
            ),
            (
                dict(correction_bias=jnp.zeros(EXPERTS, jnp.bfloat16)),
                TypeError,
                "router correction_bias: expected dtype float32, got bfloat16",
            ),
        ],
    )
    def test_arrays(
        self, changes: dict[str, Any], kind: type[Exception], message: str, rng: np.random.Generator
    ) -> None:
        router = make(**ROUTERS["Kimi-K2"])
        arrays = params(router, rng)._replace(**changes)
        with pytest.raises(kind, match=message):
            mm.route(tokens(router, rng)[0], arrays, router)

    @pytest.mark.parametrize(
        ("name", "token_ids", "kind", "message"),
        [
            (
                "softmax",
                jnp.zeros(TOKENS, jnp.int32),
                ValueError,
                "token_ids: expected None: this router has no table, got an array",
            ),
            (
                "DeepSeek-V4, table",
                None,
                ValueError,
                "token_ids: expected int32 ids of the tokens: this router looks experts up by them",
            ),
            (
                "DeepSeek-V4, table",
                jnp.full(TOKENS, 50, jnp.int32),
                ValueError,
                r"token_ids: expected ids in \[0, 50\), or -1 for none, got ids from 50 to 50",
            ),
            (
                "DeepSeek-V4, table",
                jnp.zeros(3, jnp.int32),
                ValueError,
                r"token_ids: expected shape \[33\], got shape \[3\]",
            ),
            (
                "DeepSeek-V4, table",
                jnp.zeros(TOKENS, jnp.uint8),
                TypeError,
                "token_ids: expected dtype int32, got uint8",
            ),
        ],
    )
    def test_token_ids(
        self,
        name: str,
        token_ids: Any,
        kind: type[Exception],
        message: str,
        rng: np.random.Generator,
    ) -> None:
        router = make(**ROUTERS[name])
        with pytest.raises(kind, match=message):
            mm.route(tokens(router, rng)[0], params(router, rng), router, token_ids=token_ids)
