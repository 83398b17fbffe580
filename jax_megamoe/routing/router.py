"""Routers: which experts a token goes to, and with what weights. Pure functions of arrays and a
frozen `Router`.

Logits are float32 throughout. The originals (transformers 5) multiply in float32 for DeepSeek-V3
and Kimi-K2, and in the model's dtype, bfloat16, for Qwen3, GPT-OSS and DeepSeek-V4, where GPT-OSS
and Qwen3 also round the weights of the experts to it: there a token whose experts nearly tie may
go to another one here.
"""

# Arguments are checked at run time too.
# pyright: reportUnnecessaryIsInstance=false

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float, Float32, Int32

from jax_megamoe import _checks
from jax_megamoe.mesh import by_rows, split_of

SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus", "topk_softmax")

_EPSILON = 1e-20
"""Added to the sum that weights are divided by, as DeepSeek does; too small to change any but 0."""

_WEIGHT_DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, kw_only=True)
class Router:
    """How a layer's tokens choose their experts.

    Scores come from the logits ``x @ weight.T``:

    * ``softmax``: probabilities over all experts (Qwen3-MoE, Qwen3-Next).
    * ``sigmoid``: each expert's own (DeepSeek-V3, Kimi-K2).
    * ``sqrtsoftplus``: ``sqrt(log(1 + exp(logit)))`` (DeepSeek-V4).
    * ``topk_softmax``: the largest logits, softmax over those alone (GPT-OSS).

    The top_k experts of the highest score are taken, or of the highest score plus correction bias
    if there is one; the weights never include that bias. Between equal experts the lower index wins
    (`jax.lax.top_k`); torch leaves that open.

    Attributes:
        num_experts: logical experts.
        top_k: experts a token names.
        scoring: one of the above.
        renormalize: divide a token's weights by their sum (not with topk_softmax, whose sum is 1).
        scaling_factor: factor of all weights, after that.
        num_groups: experts are in this many groups of equal size, and only those of the top_groups
            best groups can be chosen; a group's score is the sum of its two best experts.
        top_groups: see there.
        has_bias: the logits have a bias (GPT-OSS).
        has_correction_bias: see above (DeepSeek).
        weighs_input: a token's weight multiplies its expert's input, not its output (Llama 4);
            top_k is 1. `route` only returns the weights.
        table_size: where not 0, experts are looked up by token id in a table of that many rows
            (DeepSeek-V4's first layers); scores only give their weights.

    Raises:
        ValueError: a number out of range, an unknown scoring, settings that exclude each other.
        TypeError: a field of the wrong type.
    """

    num_experts: int
    top_k: int
    scoring: str = "softmax"
    renormalize: bool = False
    scaling_factor: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    has_bias: bool = False
    has_correction_bias: bool = False
    table_size: int = 0
    weighs_input: bool = False

    def __post_init__(self) -> None:
        for field in ("num_experts", "top_k", "num_groups", "top_groups"):
            number = _checks.integer(f"router {field}", getattr(self, field), minimum=1)
            object.__setattr__(self, field, number)
        table_size = _checks.integer("router table_size", self.table_size)
        object.__setattr__(self, "table_size", table_size)
        scaling_factor = _checks.finite("router scaling_factor", self.scaling_factor)
        object.__setattr__(self, "scaling_factor", scaling_factor)
        for field in ("renormalize", "has_bias", "has_correction_bias", "weighs_input"):
            if not isinstance(getattr(self, field), bool):
                value = repr(getattr(self, field))
                raise TypeError(_checks.message(f"router {field}", "a bool", value))
        _checks.one_of("router scoring", self.scoring, SCORINGS)
        _checks.at_most("router top_k", self.top_k, self.num_experts, "num_experts")
        self._check_groups()
        self._check_combinations()

    def _check_groups(self) -> None:
        _checks.at_most("router top_groups", self.top_groups, self.num_groups, "num_groups")
        _checks.multiple("router num_experts", self.num_experts, self.num_groups, "of num_groups")
        size = self.num_experts // self.num_groups
        if self.num_groups > 1 and size < 2:
            expected = "at least 2 experts a group: its two best are added"
            raise ValueError(_checks.message("router num_groups", expected, self.num_groups))
        limit = f"the experts of {self.top_groups} groups"
        _checks.at_most("router top_k", self.top_k, self.top_groups * size, limit)

    def _check_combinations(self) -> None:
        by_score = self.num_groups > 1 or self.has_correction_bias
        if self.scoring == "topk_softmax" and (by_score or self.table_size):
            expected = "another scoring than topk_softmax with groups, correction bias or table"
            raise ValueError(_checks.message("router scoring", expected, self.scoring))
        if self.weighs_input and self.top_k > 1:
            expected = "1 where weights multiply inputs: every expert would get another input"
            raise ValueError(_checks.message("router top_k", expected, self.top_k))
        if self.table_size and by_score:
            expected = "0 with groups or a correction bias, which choose experts by score"
            raise ValueError(_checks.message("router table_size", expected, self.table_size))


class RouterParams(NamedTuple):
    """A router's arrays, a pytree; None for an array that its `Router` does not use.

    Attributes:
        weight: bfloat16 or float32 [E, H].
        bias: float32 [E], of the logits.
        correction_bias: float32 [E], added to scores where experts are chosen.
        table: int32 [table_size, top_k], experts by token id.
    """

    weight: Any
    bias: Any = None
    correction_bias: Any = None
    table: Any = None


class Routing(NamedTuple):
    """A router's decision for each token.

    Attributes:
        topk_ids: int32 [T, K], logical experts; -1 where a table has no row for the token.
        topk_weights: float32 [T, K].
    """

    topk_ids: Any
    topk_weights: Any


def route(
    x: Float[Array, "tokens hidden"],
    params: RouterParams,
    router: Router,
    *,
    token_ids: Int32[Array, " tokens"] | None = None,
) -> Routing:
    """Experts and weights of every token; of rows that are split over devices each has its own.

    Args:
        x: bfloat16 or float32 [T, H].
        params: the router's arrays.
        router: its settings.
        token_ids: int32 [T], for a router with a table; -1 routes nowhere. Ids without a row of the
            table raise where the array is concrete and route nowhere where it is traced.

    Raises:
        ValueError: an array missing, superfluous or of a wrong shape, a token id out of range.
        TypeError: an array of a wrong dtype.
    """
    check_route(x, params, router, token_ids)
    if split_of(x) is None:
        return _route((x, token_ids), params, router=router)
    return by_rows(_route, (x, token_ids), params, router=router)


def _route(tokens: tuple[Array, Array | None], params: RouterParams, *, router: Router) -> Routing:
    x, token_ids = tokens
    logits = router_logits(x, params.weight, params.bias)
    return select_experts(
        logits,
        router,
        correction_bias=params.correction_bias,
        table=params.table,
        token_ids=token_ids,
    )


def router_logits(
    x: Float[Array, "tokens hidden"],
    weight: Float[Array, "experts hidden"],
    bias: Float[Array, " experts"] | None = None,
) -> Float32[Array, "tokens experts"]:
    """``x @ weight.T + bias`` in float32.

    Products of two bfloat16 are exact in float32; anything else is multiplied as float32, which a
    GPU would round to TF32 unless told.
    """
    if x.dtype != weight.dtype:
        x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    logits = lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return logits if bias is None else logits + bias.astype(jnp.float32)[None]


def select_experts(
    logits: Float32[Array, "tokens experts"],
    router: Router,
    *,
    correction_bias: Float32[Array, " experts"] | None = None,
    table: Int32[Array, "ids top_k"] | None = None,
    token_ids: Int32[Array, " tokens"] | None = None,
) -> Routing:
    """Experts and weights from logits; `route` without the matmul and the checks."""
    if router.scoring == "topk_softmax":
        largest, ids = lax.top_k(logits, router.top_k)
        return Routing(ids, jax.nn.softmax(largest, axis=-1) * router.scaling_factor)
    scores = _scores(logits, router.scoring)
    if table is None:
        # Large logits have one sigmoid, 1: without a bias the logits themselves tell them apart.
        by_logits = router.scoring == "sigmoid" and router.num_groups == 1
        alone = logits if by_logits else scores
        choice = alone if correction_bias is None else scores + correction_bias[None]
        _, ids = lax.top_k(_best_groups(choice, router), router.top_k)
    else:
        ids = _looked_up(table, token_ids)
    weights = jnp.where(ids < 0, 0, jnp.take_along_axis(scores, jnp.maximum(ids, 0), axis=1))
    if router.renormalize:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + _EPSILON)
    return Routing(ids, weights * router.scaling_factor)


def _scores(logits: Array, scoring: str) -> Array:
    if scoring == "softmax":
        return jax.nn.softmax(logits, axis=-1)
    if scoring == "sigmoid":
        return jax.nn.sigmoid(logits)
    # Far below 0, sqrt(log(1 + exp(x))) is exp(x / 2), and only that has a derivative in float32.
    far = -20.0
    near = jnp.sqrt(jax.nn.softplus(jnp.maximum(logits, far)))
    return jnp.where(logits < far, jnp.exp(jnp.minimum(logits, far) * 0.5), near)


def _best_groups(choice: Array, router: Router) -> Array:
    """`choice` with the least number at the experts of all but the best groups."""
    if router.top_groups == router.num_groups:
        return choice
    grouped = choice.reshape(choice.shape[0], router.num_groups, -1)
    best_two, _ = lax.top_k(grouped, 2)
    _, best = lax.top_k(best_two.sum(axis=-1), router.top_groups)
    kept = (best[:, :, None] == jnp.arange(router.num_groups, dtype=jnp.int32)[None, None]).any(
        axis=1
    )
    least = jnp.finfo(jnp.float32).min
    return jnp.where(kept[:, :, None], grouped, least).reshape(choice.shape)


def _looked_up(table: Array, token_ids: Any) -> Array:
    """Rows of the table, -1 for token ids that it does not have."""
    known = (token_ids >= 0) & (token_ids < table.shape[0])
    return jnp.where(known[:, None], table[jnp.where(known, token_ids, 0)], -1)


def check_route(x: Any, params: RouterParams, router: Router, token_ids: Any) -> None:
    """The checks of `route`; see there."""
    experts = router.num_experts
    _checks.shape("x", x, ("num_tokens", "hidden_size"))
    _checks.dtype("x", x, _WEIGHT_DTYPES)
    _checks.shape("router weight", params.weight, (experts, x.shape[1]))
    _checks.dtype("router weight", params.weight, _WEIGHT_DTYPES)
    table_shape = (router.table_size, router.top_k)
    for name, array, wanted, shape, dtype in (
        ("bias", params.bias, router.has_bias, (experts,), "float32"),
        (
            "correction_bias",
            params.correction_bias,
            router.has_correction_bias,
            (experts,),
            "float32",
        ),
        ("table", params.table, bool(router.table_size), table_shape, "int32"),
    ):
        if (array is not None) != wanted:
            expected = "an array" if wanted else "None: the Router's settings have none"
            got = "None" if array is None else "an array"
            raise ValueError(_checks.message(f"router {name}", expected, got))
        if array is not None:
            _checks.shape(f"router {name}", array, shape)
            _checks.dtype(f"router {name}", array, [dtype])
    _check_token_ids(token_ids, x.shape[0], router)


def _check_token_ids(token_ids: Any, num_tokens: int, router: Router) -> None:
    if (token_ids is not None) != bool(router.table_size):
        expected = "None: this router has no table"
        if router.table_size:
            expected = "int32 ids of the tokens: this router looks experts up by them"
        got = "None" if token_ids is None else "an array"
        raise ValueError(_checks.message("token_ids", expected, got))
    if token_ids is None:
        return
    _checks.shape("token_ids", token_ids, (num_tokens,))
    _checks.dtype("token_ids", token_ids, ["int32"])
    if not isinstance(token_ids, Tracer) and getattr(token_ids, "is_fully_addressable", True):
        ids = np.asarray(token_ids)
        if ids.size and not (ids.min() >= -1 and ids.max() < router.table_size):
            expected = f"ids in [0, {router.table_size}), or -1 for none"
            raise ValueError(
                _checks.message("token_ids", expected, f"ids from {ids.min()} to {ids.max()}")
            )
