"""An expert-parallel layer as a JAX user writes it: bfloat16, all_to_all and ragged_dot."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float32, Int32

_SLACK, _SPARE = 1.1, 64


def capacity(num_rows: int, num_ranks: int) -> int:
    """Rows that a rank can send to another: a little over an even share."""
    return min(num_rows, int(_SLACK * num_rows / num_ranks) + _SPARE)


def layer(
    x: BFloat16[Array, "tokens hidden"],
    ids: Int32[Array, "tokens top_k"],
    factors: Float32[Array, "tokens top_k"],
    matrices: tuple[Array, Array],
    *,
    axis: str,
    num_ranks: int,
) -> BFloat16[Array, "tokens hidden"]:
    """One rank's part, inside `shard_map`. Rows over `capacity` are lost: random routing has none.

    Args:
        x: this rank's tokens.
        ids: their experts, of all ranks'.
        factors: their top-k weights.
        matrices: this rank's experts, as `contenders.random_matrices`.
        axis: the mesh axis of the ranks.
        num_ranks: its size.
    """
    w13, w2 = matrices
    (num_tokens, top_k), local = ids.shape, w13.shape[0]
    room = capacity(num_tokens * top_k, num_ranks)
    order = jnp.argsort(ids.reshape(-1))
    expert = ids.reshape(-1)[order]
    rank = expert // local
    nth = jnp.arange(len(order)) - jnp.searchsorted(rank, rank)
    slot = jnp.where(nth < room, rank * room + nth, num_ranks * room)

    def exchange(rows: Array) -> Array:
        return lax.all_to_all(rows, axis, 0, 0, tiled=True)

    sent = jnp.zeros((num_ranks * room, x.shape[1]), x.dtype).at[slot].set(x[order // top_k])
    named = jnp.full(num_ranks * room, local, jnp.int32).at[slot].set(expert % local)
    rows, named = exchange(sent), exchange(named)
    by_expert = jnp.argsort(named)
    counts = jnp.bincount(named, length=local).astype(jnp.int32)
    gate, up = jnp.split(lax.ragged_dot(rows[by_expert], w13, counts), 2, axis=-1)
    out = lax.ragged_dot(jax.nn.silu(gate) * up, w2, counts)
    back = exchange(out[jnp.argsort(by_expert)])
    slots = back[jnp.zeros_like(slot).at[order].set(slot)].reshape(num_tokens, top_k, -1)
    y = jnp.einsum("tkh,tk->th", slots, factors, preferred_element_type=jnp.float32)
    return y.astype(x.dtype)
