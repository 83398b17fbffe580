"""Rows to their experts' ranks and back, in rounds of bounded size."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from jax_megamoe.mesh import Axis
from jax_megamoe.numerics import expert

_SLACK = 1.25
"""Rows that one exchange carries to a rank, over an even share; the rest go in another round."""
_MIN_ROWS = 8


def exchanged(
    ids: Int32[Array, " rows"],
    empty: Array,
    take: Callable[[Array], Any],
    apply: Callable[[Any, Array], Array],
    *,
    local_experts: int,
    axis: Axis,
    num_ranks: int,
) -> Array:
    """What the experts' ranks make of each row.

    Dropless: one round when the routing is near even, at most num_ranks when every row goes to one
    rank.

    Args:
        ids: each row's expert, -1 for none.
        empty: the result for rows without an expert, [rows, ...].
        take: the rows of some indices, a pytree that travels.
        apply: the results of such rows and of their local experts, `local_experts` for a row that
            is none; called once, in a loop.
        local_experts: experts of a rank.
        axis: the manual mesh axis (axes) of expert parallelism.
        num_ranks: its size.
    """
    num_rows = ids.shape[0]
    capacity = min(num_rows, max(_MIN_ROWS, int(_SLACK * num_rows / num_ranks)))
    num_experts = num_ranks * local_experts
    order = jnp.argsort(jnp.where(ids < 0, num_experts, ids), stable=True)
    counts = expert.count_tokens(ids[:, None], num_experts)
    to_rank = counts.reshape(num_ranks, local_experts).sum(1, dtype=jnp.int32)
    first = jnp.cumsum(to_rank, dtype=jnp.int32) - to_rank

    def exchange(array: Array) -> Array:
        return lax.all_to_all(array, axis, 0, 0, tiled=True)

    def one_round(i: Array, slots: Array) -> Array:
        nth = i * capacity + jnp.arange(capacity, dtype=jnp.int32)
        sent = nth[None, :] < to_rank[:, None]
        row = order[jnp.where(sent, first[:, None] + nth[None, :], 0)].reshape(-1)
        local_id = jnp.where(sent.reshape(-1), ids[row] % local_experts, local_experts)
        rows, local_id = jax.tree.map(exchange, (take(row), local_id))
        out = exchange(apply(rows, local_id))
        target = jnp.where(sent.reshape(-1), row, num_rows)
        return slots.at[target].set(out, mode="drop")

    rounds = lax.pmax(jnp.max(-(-to_rank // capacity)), axis)
    return lax.fori_loop(0, rounds, one_round, empty)
