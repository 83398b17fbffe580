"""What enters the symmetric buffer: quantised tokens, their scales and the routing."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Bool, Float32, Int32

from jax_megamoe.config import MoEConfig
from jax_megamoe.formats import RECIPES, Recipe
from jax_megamoe.numerics.tokens import QuantizedTokens, quantize_tokens
from jax_megamoe.routing.replicas import ReplicaMap, logical_ids, physical_ids


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
