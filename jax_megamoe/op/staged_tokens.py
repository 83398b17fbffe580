"""What enters the symmetric buffer: quantised tokens, their scales and the routing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Bool, Float32, Int32

from jax_megamoe import _checks
from jax_megamoe.config import MoEConfig
from jax_megamoe.formats import RECIPES, Recipe
from jax_megamoe.numerics.tokens import QuantizedTokens, quantize_tokens
from jax_megamoe.routing.replicas import ReplicaMap, check_ids, check_map, logical_ids, physical_ids


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StagedTokens:
    """One rank's input as the kernel reads it.

    Attributes:
        tokens: what is dispatched to the routed experts.
        topk_ids: int32 [T, K], physical expert slots, -1 where unrouted.
        topk_weights: float32 [T, K], 0 where unrouted.
        shared_tokens: input of a fused shared expert; None without one.
    """

    tokens: QuantizedTokens
    topk_ids: Int32[Array, "tokens top_k"]
    topk_weights: Float32[Array, "tokens top_k"]
    shared_tokens: QuantizedTokens | None = None


def check_tokens(
    x: Any,
    topk_ids: Any,
    topk_weights: Any,
    mask: Any,
    eplb: Any,
    *,
    config: MoEConfig,
    dtypes: Sequence[str] = ("bfloat16",),
) -> None:
    """Checks the arrays of a call that have a row a token, and the replica map.

    Args:
        x, topk_ids, topk_weights, mask, eplb: as `mega_moe` takes them.
        config: the layer.
        dtypes: that x may have.

    Raises:
        ValueError: shapes that do not fit, concrete ids out of range, a map that is not the
            config's.
        TypeError: not arrays, or a dtype that does not fit.
    """
    _checks.shape("x", x, ("num_tokens", config.hidden_size))
    num_tokens = x.shape[0]
    _checks.dtype("x", x, dtypes, "x.astype(jnp.bfloat16) rounds it")
    for name, array, dtype in (
        ("topk_ids", topk_ids, "int32"),
        ("topk_weights", topk_weights, "float32"),
    ):
        _checks.shape(name, array, (num_tokens, config.top_k))
        _checks.dtype(name, array, [dtype], f"{name}.astype(jnp.{dtype}) converts it")
    if mask is not None:
        _checks.shape("padding_mask", mask, (num_tokens,))
        _checks.dtype("padding_mask", mask, ["bool"])
    if eplb is not None:
        check_map(config, eplb)
    check_ids(topk_ids, config)


def physical_routing(
    topk_ids: Int32[Array, "tokens top_k"],
    topk_weights: Float32[Array, "tokens top_k"],
    *,
    config: MoEConfig,
    padding_mask: Bool[Array, " tokens"] | None = None,
    eplb: ReplicaMap | None = None,
) -> tuple[Int32[Array, "tokens top_k"], Float32[Array, "tokens top_k"]]:
    """Physical slots and weights: padding and what is out of range become -1 with weight 0."""
    ids = logical_ids(topk_ids, config=config, padding_mask=padding_mask)
    slots = physical_ids(ids, config=config, eplb=eplb)
    return slots, jnp.where(slots >= 0, topk_weights, jnp.float32(0))


def stage(
    x: BFloat16[Array, "tokens hidden"],
    topk_ids: Int32[Array, "tokens top_k"],
    topk_weights: Float32[Array, "tokens top_k"],
    *,
    config: MoEConfig,
    recipe: Recipe | None = None,
    padding_mask: Bool[Array, " tokens"] | None = None,
    eplb: ReplicaMap | None = None,
    fused_shared: bool = False,
) -> StagedTokens:
    """What would enter the symmetric buffer for one rank's tokens.

    Args:
        x: bfloat16 [T, H].
        topk_ids: int32 [T, K], logical expert ids, -1 for unrouted.
        topk_weights: float32 [T, K].
        config: the layer.
        recipe: the config's with the rounding of a kernel (`recipe_for`); None: the config's.
        padding_mask: bool [T], True for rows that are no tokens.
        eplb: where replicas are; None: the config's initial map.
        fused_shared: the weights hold a fused shared expert.

    Returns:
        Tokens quantised by the rules of the recipe, physical ids and
        weights, the weight 0 wherever the id is -1.
    """
    ids, weights = physical_routing(
        topk_ids, topk_weights, config=config, padding_mask=padding_mask, eplb=eplb
    )
    recipe = recipe or config.recipe
    tokens = quantize_tokens(x, recipe)
    shared_tokens = None
    if fused_shared and config.shared_format is not None:
        shared = RECIPES[config.shared_format]
        same = shared.activations == recipe.activations
        shared_tokens = tokens if same else quantize_tokens(x, shared)
    return StagedTokens(tokens, ids, weights, shared_tokens)
