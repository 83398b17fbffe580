"""What the routing of a layer did: `MoEStats`, and a callback that is handed the logical ids."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int32

from jax_megamoe import _checks
from jax_megamoe.config import MoEConfig, check_config
from jax_megamoe.mesh import gathered, has_explicit_axes
from jax_megamoe.numerics.expert import count_tokens
from jax_megamoe.routing.rebalance import imbalance
from jax_megamoe.routing.replicas import ReplicaMap, check_map, logical_ids, physical_ids

RoutingCallback = Callable[[str, np.ndarray, np.ndarray | None], None]
"""Called with a layer's name, int32 topk_ids [T, K] and bool padding_mask [T] or None."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MoEStats:
    """Counts of the slots of a call's tokens; a pytree.

    Every field is a count, so several calls add up: ``jax.tree.map(jnp.add, a, b)``.

    Attributes:
        tokens_per_expert: int32 [num_experts], slots routed to each physical expert.
        tokens_per_logical_expert: int32 [num_logical_experts], replicas taken together.
        rank_loads: int32 [num_ranks], slots routed to the experts of each rank.
        dropped_slots: int32 [], slots of real tokens that reach no expert: ids -1 or out of range.
        padded_rows: int32 [], rows that are no tokens.
    """

    tokens_per_expert: Int32[Array, " experts"]
    tokens_per_logical_expert: Int32[Array, " logical"]
    rank_loads: Int32[Array, " ranks"]
    dropped_slots: Int32[Array, ""]
    padded_rows: Int32[Array, ""]

    @property
    def imbalance(self) -> float:
        """Largest over mean of `rank_loads`, 1.0 where all are 0; outside jit."""
        return imbalance(np.asarray(self.rank_loads))


def moe_stats(
    topk_ids: Int32[Array, "tokens top_k"],
    *,
    config: MoEConfig,
    padding_mask: Bool[Array, " tokens"] | None = None,
    eplb: ReplicaMap | None = None,
    num_ranks: int = 1,
) -> MoEStats:
    """Counts of one call from its routing alone: what `mega_moe` would count, without running it.

    jit-able, outside `shard_map`, on the arrays that `mega_moe` is given.

    Args:
        topk_ids: int32 [T, K], logical ids, -1 for unrouted; of all ranks.
        config: the layer.
        padding_mask: bool [T], True for rows that are no tokens.
        eplb: where replicas are; None: the config's initial map.
        num_ranks: expert-parallel ranks, of equally many rows and experts: a token's replica
            depends on its row within its rank.

    Raises:
        ValueError: shapes that do not fit, rows or experts that do not divide by the ranks, a map
            that is not the config's.
        TypeError: a dtype that does not fit.
    """
    check_config(config, MoEConfig)
    _checks.shape("topk_ids", topk_ids, ("num_tokens", config.top_k))
    _checks.dtype("topk_ids", topk_ids, ["int32"])
    num_tokens = topk_ids.shape[0]
    if padding_mask is not None:
        _checks.shape("padding_mask", padding_mask, (num_tokens,))
        _checks.dtype("padding_mask", padding_mask, ["bool"])
    if eplb is not None:
        check_map(config, eplb)
    config.experts_per_rank(num_ranks)
    _checks.multiple("topk_ids rows", num_tokens, num_ranks)
    topk_ids, padding_mask = gathered((topk_ids, padding_mask))
    ids = logical_ids(topk_ids, config=config, padding_mask=padding_mask)
    by_rank = ids.reshape(num_ranks, num_tokens // num_ranks, config.top_k)
    slots = jax.vmap(lambda ids: physical_ids(ids, config=config, eplb=eplb))(by_rank)
    counts = count_tokens(slots.reshape(ids.shape), config.num_experts)
    dropped, padded = ids < 0, jnp.int32(0)
    if padding_mask is not None:
        dropped &= ~padding_mask[:, None]
        padded = padding_mask.sum(dtype=jnp.int32)
    return MoEStats(
        counts,
        count_tokens(ids, config.logical_experts),
        counts.reshape(num_ranks, -1).sum(axis=1),
        dropped.sum(dtype=jnp.int32),
        padded,
    )


_capturing = jax.make_user_context(None)


@contextmanager
def capture_routing(callback: RoutingCallback) -> Iterator[None]:
    """Hands the routing of every `mega_moe` call inside the `with` to `callback`.

    The callback gets the call's `name`, its logical `topk_ids` as they were given (before padding
    is taken out and replicas are chosen) and its `padding_mask` or None, as NumPy arrays. It is
    called once a call: also in each step of a scan, once an element under `jax.vmap`, and inside
    the caller's `shard_map` once a rank with that rank's rows. Calls may come from several threads
    and in any order, so a scan's layers are told apart by what the callback is given alone. All
    have been made when the `with` ends.

    A jitted function captures as it is traced. The context is part of what JAX traces it for, so a
    function that was compiled outside is compiled once more inside, for each callback, and neither
    is compiled again later; outside, nothing of this is in the program. Over several processes the
    callback runs in the first device's process. A program that captures cannot be exported.

    Args:
        callback: hashable, called from JAX's threads, which must not call JAX itself. What it
            raises surfaces as JAX's own error, where a result of the program is waited for.
    """
    with _capturing(callback):
        try:
            yield
        finally:
            jax.effects_barrier()


def capture(
    name: str,
    topk_ids: Int32[Array, "tokens top_k"],
    padding_mask: Bool[Array, " tokens"] | None,
    mesh: Mesh | AbstractMesh | None,
) -> None:
    """Hands a call's routing to the callback of the `capture_routing` around it, if there is one.

    Args:
        name: of the call.
        topk_ids, padding_mask: as `mega_moe` has them.
        mesh: that the rows are split over, outside `shard_map`.
    """
    callback: RoutingCallback | None = _capturing.value
    if callback is None:
        return

    def deliver(ids: Any, mask: Any) -> None:
        callback(name, np.asarray(ids), None if mask is None else np.asarray(mask))

    arrays = gathered((topk_ids, padding_mask))
    if mesh is not None and not has_explicit_axes(mesh):
        everywhere = NamedSharding(mesh, P())
        arrays = jax.tree.map(lambda a: lax.with_sharding_constraint(a, everywhere), arrays)
    io_callback(deliver, None, *arrays)
