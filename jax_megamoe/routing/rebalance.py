"""Rebalancing of experts over ranks (EPLB, expert-parallel load balancing), outside a layer's jit.

`record_loads` adds up what `mega_moe(..., return_stats=True)` counts, `solve_placement` chooses the
expert of each slot, `rebalance` moves the experts there and makes the map to go on with.
"""

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float32, Int32

from jax_megamoe import _checks
from jax_megamoe.config import MoEConfig
from jax_megamoe.mesh import gathered
from jax_megamoe.routing.replicas import ReplicaMap, checked_placement, replica_map
from jax_megamoe.weights.move import move_experts
from jax_megamoe.weights.params import ExpertWeights


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

    Raises:
        ValueError: `loads` not one a logical expert of the map; fewer counts than logical experts,
            as those of another layer.
        TypeError: no arrays.
    """
    slots = replicas.logical_to_physical
    num_logical = slots.shape[0]
    _checks.shape("loads", loads, (num_logical,))
    _checks.shape("counts", counts, ("num_experts",))
    if counts.shape[0] < num_logical:
        expected = f"a count of each physical expert, at least {num_logical}"
        raise ValueError(_checks.message("counts", expected, counts.shape[0]))
    counts = gathered(counts)
    used = jnp.arange(slots.shape[1], dtype=jnp.int32)[None] < replicas.num_replicas[:, None]
    used &= (slots >= 0) & (slots < counts.shape[0])
    of_slots = jnp.where(used, counts[jnp.where(used, slots, 0)], 0)
    return loads * jnp.float32(decay) + of_slots.sum(axis=1).astype(jnp.float32)


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
    held = checked_placement("placement", placement, load.size)
    _checks.multiple("placement slots", held.size, num_ranks)
    share = load / np.bincount(held)
    return share[held].reshape(num_ranks, -1).sum(axis=1)


def imbalance(loads: np.ndarray) -> float:
    """Largest over mean load of the ranks: 1.0 where all are equal, or none has any."""
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
        checked_placement(name, placement, config.logical_experts)
        for name, placement in placements.items()
    )
    for name, held in (("old_placement", old), ("new_placement", new)):
        _checks.shape(name, held, (config.num_experts,))
    moved = move_experts(config, weights, old, new, mesh=mesh, axis=axis)
    return moved, replica_map(new, config.logical_experts)
