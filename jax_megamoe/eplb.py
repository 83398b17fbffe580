"""Expert replicas: which physical slots hold a logical expert, and which of them a token uses."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jax_megamoe import _checks
from jax_megamoe.config import MoEConfig

_HASH = np.uint32(2654435769)
"""2^32 / golden ratio, odd: spreads neighbouring tokens over the replicas (Knuth, TAOCP vol. 3)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ReplicaMap:
    """Where the replicas of each logical expert are; a pytree, so it changes without a retrace.

    Attributes:
        logical_to_physical: int32 [num_logical, max_replicas], unused entries -1.
        num_replicas: int32 [num_logical], at least 1.
    """

    logical_to_physical: Int32[Array, "logical replicas"]
    num_replicas: Int32[Array, " logical"]


def replica_map(physical_to_logical: np.ndarray, num_logical: int) -> ReplicaMap:
    """The map for given slot contents.

    Args:
        physical_to_logical: int [num_experts], the logical expert that each physical slot holds.
        num_logical: number of logical experts.

    Raises:
        ValueError: an id out of range, or a logical expert in no slot.
    """
    held = np.asarray(physical_to_logical)
    if held.ndim != 1 or held.size == 0 or held.min() < 0 or held.max() >= num_logical:
        expected = f"ids in [0, {num_logical}) of shape [num_experts]"
        raise ValueError(_checks.message("physical_to_logical", expected, held))
    counts = np.bincount(held, minlength=num_logical)
    if not counts.all():
        missing = np.flatnonzero(counts == 0).tolist()
        expected = "every logical expert in at least one slot"
        raise ValueError(_checks.message("physical_to_logical", expected, f"none for {missing}"))
    # Wide enough for one expert to get every spare slot, so that a rebalance keeps the shapes.
    width = held.size - num_logical + 1
    slots = np.full((num_logical, width), -1, np.int32)
    for logical in range(num_logical):
        slots[logical, : counts[logical]] = np.flatnonzero(held == logical)
    return ReplicaMap(jnp.asarray(slots), jnp.asarray(counts.astype(np.int32)))


def initial_map(config: MoEConfig) -> ReplicaMap:
    """The map of a config before any rebalance: slot p holds logical expert p % num_logical."""
    slots = np.arange(config.num_experts) % config.logical_experts
    return replica_map(slots, config.logical_experts)


def to_physical(
    topk_ids: Int32[Array, "tokens top_k"], replicas: ReplicaMap
) -> Int32[Array, "tokens top_k"]:
    """Physical slots for logical ids; -1 stays -1.

    Token i uses replica ``(i * 2654435769 mod 2^32) mod count`` of each of its experts, i counted
    within this rank's tokens.

    Args:
        topk_ids: int32 [num_tokens, top_k], logical ids in [0, num_logical) or -1.
        replicas: the map.
    """
    routed = topk_ids >= 0
    logical = jnp.where(routed, topk_ids, 0)
    token = jnp.arange(topk_ids.shape[0], dtype=jnp.uint32) * _HASH
    count = replicas.num_replicas[logical].astype(jnp.uint32)
    chosen = (token[:, None] % count).astype(jnp.int32)
    physical = replicas.logical_to_physical[logical, chosen]
    return jnp.where(routed, physical, -1)
