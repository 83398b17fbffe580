"""The grouped implementation over ranks: its launches between two exchanges of rows."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Bool, Float32, Int32

from jax_megamoe.config import MoEConfig
from jax_megamoe.launch import grouped
from jax_megamoe.launch.grouped import GroupedRoute
from jax_megamoe.mesh import Axis
from jax_megamoe.numerics import expert
from jax_megamoe.op.exchange import exchanged
from jax_megamoe.op.staged_tokens import physical_routing
from jax_megamoe.routing.replicas import ReplicaMap
from jax_megamoe.weights.params import ExpertWeights


def moe(
    x: BFloat16[Array, "tokens hidden"],
    topk_ids: Int32[Array, "tokens top_k"],
    topk_weights: Float32[Array, "tokens top_k"],
    weights: ExpertWeights,
    *,
    config: MoEConfig,
    route: GroupedRoute,
    axis: Axis | None = None,
    padding_mask: Bool[Array, " tokens"] | None = None,
    eplb: ReplicaMap | None = None,
    with_stats: bool = False,
) -> tuple[BFloat16[Array, "tokens hidden"], Int32[Array, " experts"] | None]:
    """The routed experts of one rank's tokens.

    Over ranks, BF16 rows travel by `lax.all_to_all`, so that no peer memory is needed; a rank
    quantises what it received.

    Args:
        x: bfloat16 [T, H].
        topk_ids: int32 [T, K], logical ids.
        topk_weights: float32 [T, K].
        weights: this rank's experts, in a grouped layout.
        config: the layer.
        route: from `grouped.try_route`.
        axis: the manual mesh axis (axes) of expert parallelism; None on one rank.
        padding_mask: bool [T], True for rows that are no tokens.
        eplb: where replicas are.
        with_stats: count tokens of each local expert.

    Returns:
        bfloat16 [T, H], 0 for a token without experts, and int32 [E] or None.
    """
    if route.num_ranks == 1:
        return grouped.moe(
            x,
            topk_ids,
            topk_weights,
            weights,
            config=config,
            route=route,
            padding_mask=padding_mask,
            eplb=eplb,
            with_stats=with_stats,
        )
    assert axis is not None
    ids, factors = physical_routing(
        topk_ids, topk_weights, config=config, padding_mask=padding_mask, eplb=eplb
    )
    counts = None
    if with_stats:
        counts = expert.count_tokens(ids, config.num_experts)
        counts = lax.psum_scatter(counts, axis, scatter_dimension=0, tiled=True)

    def take(row: Array) -> tuple[Array, Array]:
        return x[row // config.top_k], factors.reshape(-1)[row]

    def apply(rows: tuple[Array, Array], local_id: Array) -> Array:
        return grouped.rows(
            rows[0], local_id, rows[1], weights, config=config, route=route, axis=axis
        )

    zero = expert.varying_zero(x, weights.routed.w13_weight).astype(x.dtype)
    empty = jnp.zeros((ids.size, x.shape[1]), x.dtype) + zero
    local = weights.routed.w13_weight.shape[0]
    with jax.named_scope("mega_moe/experts"):
        slots = exchanged(
            ids.reshape(-1),
            empty,
            take,
            apply,
            local_experts=local,
            axis=axis,
            num_ranks=route.num_ranks,
        )
    weighs = config.recipe.rounding.weighs_in_combine
    slots = slots.reshape(*ids.shape, x.shape[1])
    return expert.combine(slots, factors if weighs else None, None).astype(x.dtype), counts
