"""Expert replicas: which physical slots hold a logical expert, and which of them a token uses.

Rebalancing (EPLB, expert-parallel load balancing), outside the layer's jit: `record_loads` adds up
what `mega_moe(..., return_stats=True)` counts, `solve_placement` says which expert goes into which
slot, `rebalance` moves the experts there and makes the map to go on with.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, Int32

from jax_megamoe import _checks
from jax_megamoe.config import MoEConfig
from jax_megamoe.weights.move import move_experts
from jax_megamoe.weights.params import ExpertWeights

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
    held = _checked_placement("physical_to_logical", physical_to_logical, num_logical)
    counts = np.bincount(held, minlength=num_logical)
    # Wide enough for one expert to get every spare slot, so that a rebalance keeps the shapes.
    width = held.size - num_logical + 1
    slots = np.full((num_logical, width), -1, np.int32)
    for logical in range(num_logical):
        slots[logical, : counts[logical]] = np.flatnonzero(held == logical)
    return ReplicaMap(jnp.asarray(slots), jnp.asarray(counts.astype(np.int32)))


def _checked_placement(name: str, placement: np.ndarray, num_logical: int) -> np.ndarray:
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


def record_loads(
    loads: Float32[Array, " logical"],
    counts: Int32[Array, " experts"],
    replicas: ReplicaMap,
    *,
    decay: float = 1.0,
) -> Float32[Array, " logical"]:
    """Loads of the logical experts with one more call's counts; jit-able, outside `shard_map`.

    Args:
        loads: float32 [num_logical], zeros to begin with: tokens so far.
        counts: int32 [num_experts], what `mega_moe(..., return_stats=True)` counted.
        replicas: the map that the call used.
        decay: factor of what was there before. Below 1, old calls fade, and the sum stays where
            float32 counts exactly; with 1 it does so up to 2^24 tokens of an expert.

    Returns:
        ``loads * decay`` plus the tokens of all replicas of each expert.
    """
    counts = replicated(counts)
    slots = replicas.logical_to_physical
    used = jnp.arange(slots.shape[1])[None] < replicas.num_replicas[:, None]
    used &= (slots >= 0) & (slots < counts.shape[0])
    of_slots = jnp.where(used, counts[jnp.where(used, slots, 0)], 0)
    return loads * jnp.float32(decay) + of_slots.sum(axis=1).astype(jnp.float32)


def replicated(tree: Any) -> Any:
    """A tree of arrays with those over Explicit mesh axes gathered, so that any index reaches."""

    def gather(array: Any) -> Any:
        mesh = jax.typeof(array).sharding.mesh
        if AxisType.Explicit not in mesh.axis_types:
            return array
        return jax.reshard(array, NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(gather, tree)


def rank_loads(loads: np.ndarray, placement: np.ndarray, num_ranks: int) -> np.ndarray:
    """The load of each rank, float64 [num_ranks], were an expert's tokens split evenly over its
    replicas.

    Args:
        loads: [num_logical], tokens of each logical expert.
        placement: int [num_experts], the logical expert in each physical slot.
        num_ranks: expert-parallel ranks, of equally many slots.

    Raises:
        ValueError: an expert without a slot, an id out of range, slots that do not divide.
    """
    load = _checked_loads(loads)
    held = _checked_placement("placement", placement, load.size)
    _checks.multiple("placement slots", held.size, num_ranks)
    share = load / np.bincount(held)
    return share[held].reshape(num_ranks, -1).sum(axis=1)


def imbalance(loads: np.ndarray) -> float:
    """Largest over mean load of the ranks: 1.0 where all are alike, or none has any."""
    values = np.asarray(loads, np.float64)
    return float(values.max() / values.mean()) if values.any() else 1.0


def solve_placement(loads: np.ndarray, num_physical: int, num_ranks: int) -> np.ndarray:
    """Which logical expert each physical slot should hold for ranks of even load.

    Spare slots go one at a time to the expert with the most load a replica, up to one a rank. The
    replicas then go, heaviest first, to the rank with the least load that has a slot left, if there
    is one without that expert. Deterministic: ties go to the lowest number.

    Args:
        loads: [num_logical], tokens of each logical expert; any unit.
        num_physical: slots over all ranks.
        num_ranks: expert-parallel ranks; rank r has slots r * (num_physical / num_ranks) and on.

    Returns:
        int32 [num_physical], ids in rising order on each rank.

    Raises:
        ValueError: a load that is negative or not finite, fewer slots than experts, slots that do
            not divide by the ranks.
    """
    load = _checked_loads(loads)
    num_ranks = _checks.integer("num_ranks", num_ranks, minimum=1)
    num_physical = _checks.integer("num_physical", num_physical, minimum=load.size)
    _checks.multiple("num_physical", num_physical, num_ranks, "every rank has equally many slots")
    counts = _replica_counts(load, num_physical, num_ranks)
    share = load / counts
    capacity = num_physical // num_ranks
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = np.zeros(num_ranks)
    for expert in np.argsort(-share, kind="stable").tolist():
        for _ in range(counts[expert]):
            free = [rank for rank in range(num_ranks) if len(held[rank]) < capacity]
            rank = min(free, key=lambda r: (expert in held[r], totals[r], len(held[r])))
            held[rank].append(expert)
            totals[rank] += share[expert]
    return np.asarray([sorted(experts) for experts in held], np.int32).reshape(-1)


def _checked_loads(loads: np.ndarray) -> np.ndarray:
    load = np.asarray(loads, np.float64)
    if load.ndim != 1 or load.size == 0 or not np.isfinite(load).all() or load.min() < 0:
        expected = "finite numbers >= 0 of shape [num_logical_experts]"
        raise ValueError(_checks.message("loads", expected, load))
    return load


def _replica_counts(load: np.ndarray, num_physical: int, num_ranks: int) -> np.ndarray:
    """Slots of each expert."""
    counts = np.ones(load.size, np.int64)
    for _ in range(num_physical - load.size):
        # A second replica on a rank takes no load off it: only when nothing else is left.
        order = np.lexsort((counts, -load / counts, counts // num_ranks))
        counts[order[0]] += 1
    return counts


def rebalance(
    config: MoEConfig,
    weights: ExpertWeights,
    old_placement: np.ndarray,
    new_placement: np.ndarray,
    *,
    mesh: Mesh | None = None,
    axis: str | tuple[str, ...] | None = None,
) -> tuple[ExpertWeights, ReplicaMap]:
    """Moves whole experts to other slots: every routed parameter, its scales and biases with it.

    The layer is not recompiled: shapes and shardings stay as they are. `weights` are given up
    (donated), one field after another. A device holds its parameters, once more its part of the
    largest one (w13_weight), and two experts of that; never those of all ranks. Nothing is sent for
    an expert that stays on its rank. All processes make the call, with the same placements.

    Args:
        config: the layer.
        weights: its parameters; used up.
        old_placement: int [num_experts], the logical expert that each slot holds.
        new_placement: int [num_experts], which one it is to hold.
        mesh: the mesh that the experts are sharded over; None: they are on one device.
        axis: its expert-parallel axis, or axes.

    Returns:
        The parameters, and the map to call the layer with.

    Raises:
        ValueError: a placement of another size, with an id out of range or an expert in no slot;
            parameters that are not the config's or not on one device without a mesh; a mesh without
            the axis. `weights` are then left as they were.
        TypeError: ids that are not integers.
    """
    placements = dict(old_placement=old_placement, new_placement=new_placement)
    old, new = (
        _checked_placement(name, placement, config.logical_experts)
        for name, placement in placements.items()
    )
    for name, held in (("old_placement", old), ("new_placement", new)):
        _checks.shape(name, held, (config.num_experts,))
    moved = move_experts(config, weights, old, new, mesh=mesh, axis=axis)
    return moved, replica_map(new, config.logical_experts)
