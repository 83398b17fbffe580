"""Expert replicas: which physical slots hold a logical expert, and which of them a token uses."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int32

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
        TypeError: ids that are not integers.
    """
    held = checked_placement("physical_to_logical", physical_to_logical, num_logical)
    counts = np.bincount(held, minlength=num_logical)
    # Wide enough for one expert to get every spare slot, so that a rebalance keeps the shapes.
    width = held.size - num_logical + 1
    slots = np.full((num_logical, width), -1, np.int32)
    for logical in range(num_logical):
        slots[logical, : counts[logical]] = np.flatnonzero(held == logical)
    return ReplicaMap(jnp.asarray(slots), jnp.asarray(counts.astype(np.int32)))


def checked_placement(name: str, placement: np.ndarray, num_logical: int) -> np.ndarray:
    """int [num_experts] logical ids, each of them in some slot. Raises as `replica_map` does."""
    held = np.asarray(placement)
    if held.ndim != 1 or held.size == 0 or held.min() < 0 or held.max() >= num_logical:
        expected = f"ids in [0, {num_logical}) of shape [num_experts]"
        raise ValueError(_checks.message(name, expected, held))
    if not np.issubdtype(held.dtype, np.integer):
        raise TypeError(_checks.message(name, "integer ids", held.dtype))
    missing = np.setdiff1d(np.arange(num_logical), held)
    if missing.size:
        expected = "every logical expert in at least one slot"
        raise ValueError(_checks.message(name, expected, f"none for {missing.tolist()}"))
    return held


def placement_of(config: MoEConfig, replicas: ReplicaMap) -> np.ndarray:
    """int32 [num_experts], the logical expert in each slot by a map; the inverse of `replica_map`.

    Raises:
        ValueError, TypeError: a map that is not the config's, or that leaves slots empty.
    """
    check_map(config, replicas)
    slots = np.asarray(replicas.logical_to_physical)
    used = np.arange(slots.shape[1])[None] < np.asarray(replicas.num_replicas)[:, None]
    placement = np.full(config.num_experts, -1, np.int32)
    placement[slots[used]] = np.nonzero(used)[0]
    if placement.min() < 0:
        empty = np.flatnonzero(placement < 0).tolist()
        raise ValueError(_checks.message("eplb", "an expert in every slot", f"none in {empty}"))
    return placement


def initial_map(config: MoEConfig) -> ReplicaMap:
    """The map of a config before any rebalance: slot p holds logical expert p % num_logical."""
    slots = np.arange(config.num_experts) % config.logical_experts
    return replica_map(slots, config.logical_experts)


def check_map(config: MoEConfig, replicas: Any, argument: str = "eplb") -> None:
    """Checks that a map is one of the config's: types and shapes always, values where concrete.

    Args:
        config: the layer.
        replicas: the map.
        argument: its name in messages.

    Raises:
        TypeError: not a `ReplicaMap`, or an array of another dtype than int32.
        ValueError: another number of experts, an expert without or with too many replicas, a slot
            that does not exist or that two experts share.
    """
    if not isinstance(replicas, ReplicaMap):
        raise TypeError(_checks.message(argument, "a ReplicaMap", type(replicas).__name__))
    logical = config.logical_experts
    arrays = (replicas.num_replicas, replicas.logical_to_physical)
    names = (f"{argument}.num_replicas", f"{argument}.logical_to_physical")
    for name, array, shape in zip(names, arrays, ((logical,), (logical, "replicas")), strict=True):
        _checks.shape(name, array, shape)
        _checks.dtype(name, array, ["int32"])
    width = replicas.logical_to_physical.shape[1]
    if not width:
        raise ValueError(_checks.message(names[1], "room for at least one replica", "none"))
    # A process reads its own copy of a map that lies on the devices of several.
    if any(isinstance(each, Tracer) or not _is_readable(each) for each in arrays):
        return
    counts, slots = (np.asarray(array) for array in arrays)
    if counts.min() < 1 or counts.max() > width:
        got = f"numbers from {counts.min()} to {counts.max()}"
        raise ValueError(_checks.message(names[0], f"1 to {width} replicas of each expert", got))
    used = np.arange(width)[None] < counts[:, None]
    held = slots[used]
    if held.min() < 0 or held.max() >= config.num_experts:
        expected = f"slots in [0, {config.num_experts}) for the replicas of each expert"
        got = f"slots from {held.min()} to {held.max()}"
        hint = "make the map for this config: replica_map(physical_to_logical, num_logical)"
        raise ValueError(_checks.message(names[1], expected, got, hint))
    if np.unique(held).size != held.size:
        shared = np.flatnonzero(np.bincount(held) > 1).tolist()
        raise ValueError(_checks.message(names[1], "one expert in each slot", f"more in {shared}"))


def check_ids(topk_ids: Any, config: MoEConfig) -> None:
    """Raises ValueError for ids out of range in what this process holds of a concrete array;
    tracers pass."""
    if isinstance(topk_ids, Tracer):
        return
    shards = getattr(topk_ids, "addressable_shards", None)
    parts = [topk_ids] if shards is None else [shard.data for shard in shards]
    for ids in (np.asarray(part) for part in parts if part.size):
        low, high = int(ids.min()), int(ids.max())
        if low < -1 or high >= config.logical_experts:
            expected = f"expert ids in [0, {config.logical_experts}), or -1 for unrouted"
            raise ValueError(_checks.message("topk_ids", expected, f"ids from {low} to {high}"))


def _is_readable(array: Any) -> bool:
    return getattr(array, "is_fully_addressable", True) or array.is_fully_replicated


def to_physical(
    topk_ids: Int32[Array, "tokens top_k"], replicas: ReplicaMap, num_experts: int
) -> Int32[Array, "tokens top_k"]:
    """Physical slots for logical ids; -1 stays -1, and what the map has out of range becomes -1.

    Token i uses replica ``(i * 2654435769 mod 2^32) mod count`` of each of its experts, i counted
    within this rank's tokens.

    Args:
        topk_ids: int32 [num_tokens, top_k], logical ids in [0, num_logical) or -1.
        replicas: the map.
        num_experts: physical slots of all ranks.
    """
    routed = topk_ids >= 0
    logical = jnp.where(routed, topk_ids, 0)
    token = jnp.arange(topk_ids.shape[0], dtype=jnp.uint32) * _HASH
    count = replicas.num_replicas[logical]
    routed &= (count >= 1) & (count <= replicas.logical_to_physical.shape[1])
    divisor = jnp.where(routed, count, 1).astype(jnp.uint32)
    chosen = (token[:, None] % divisor).astype(jnp.int32)
    physical = replicas.logical_to_physical[logical, chosen]
    return jnp.where(routed & (physical >= 0) & (physical < num_experts), physical, -1)


def logical_ids(
    topk_ids: Int32[Array, "tokens top_k"],
    *,
    config: MoEConfig,
    padding_mask: Bool[Array, " tokens"] | None = None,
) -> Int32[Array, "tokens top_k"]:
    """The ids with padding and what is out of range set to -1."""
    known = (topk_ids >= 0) & (topk_ids < config.logical_experts)
    if padding_mask is not None:
        known &= ~padding_mask[:, None]
    return jnp.where(known, topk_ids, -1)


def physical_ids(
    ids: Int32[Array, "tokens top_k"], *, config: MoEConfig, eplb: ReplicaMap | None = None
) -> Int32[Array, "tokens top_k"]:
    """Physical slots of one rank's `logical_ids`; eplb None: the config's initial map."""
    if eplb is not None:
        return to_physical(ids, eplb, config.num_experts)
    if config.logical_experts != config.num_experts:
        return to_physical(ids, initial_map(config), config.num_experts)
    return ids
