"""Moving whole experts between slots and ranks, on the devices and in place of what was there.

Every rank sends and receives one expert at a time. The rounds are grouped by how far the receiver
is from the sender along the axis: a round is one collective permute, whose pattern is compiled in,
while the experts it moves and the number of rounds are data. So one compiled program makes every
move, and sends no more than the busiest pair of ranks at each distance has to.
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int32, Shaped

from jax_megamoe import _checks
from jax_megamoe.config import ExpertSpec
from jax_megamoe.mesh import axis_names
from jax_megamoe.weights.checkpoint.buffers import place
from jax_megamoe.weights.params import ExpertWeights, check_weights


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Moves:
    """Who sends which expert where; R ranks of S slots each.

    Attributes:
        kept: int32 [R, S], for each slot the one of its own rank that it is taken from; its own
            where it is filled from another rank.
        sent: int32 [R distances, R, S rounds], the slot that a rank sends, by the distance to the
            receiver.
        received: int32 [R distances, R, S rounds], the slot that a rank fills; S for none.
        rounds: int32 [R distances], rounds that are needed.
    """

    kept: Int32[np.ndarray, "ranks slots"]
    sent: Int32[np.ndarray, "ranks ranks slots"]
    received: Int32[np.ndarray, "ranks ranks slots"]
    rounds: Int32[np.ndarray, " ranks"]


def plan_moves(old: np.ndarray, new: np.ndarray, num_ranks: int) -> Moves:
    """The moves from placement `old` to `new`.

    A slot is filled from itself if it holds the expert already, else from its rank, else from the
    rank that has the least to send over the same distance.

    Args:
        old: int [num_experts], the logical expert in each slot; each is in at least one.
        new: int [num_experts], likewise.
        num_ranks: ranks of equally many slots.
    """
    slots = old.size // num_ranks
    kept = np.tile(np.arange(slots, dtype=np.int32), (num_ranks, 1))
    sent = np.zeros((num_ranks, num_ranks, slots), np.int32)
    received = np.full_like(sent, slots)
    queued = np.zeros((num_ranks, num_ranks), np.int32)
    for target in np.flatnonzero(old != new).tolist():
        rank, slot = divmod(target, slots)
        sources = [divmod(source, slots) for source in np.flatnonzero(old == new[target]).tolist()]
        here = [local for owner, local in sources if owner == rank]
        if here:  # a copy on the device costs no link
            kept[rank, slot] = here[0]
            continue
        _, owner, local = min(
            (queued[(rank - owner) % num_ranks, owner], owner, local) for owner, local in sources
        )
        distance = (rank - owner) % num_ranks
        turn = queued[distance, owner]
        sent[distance, owner, turn] = local
        received[distance, rank, turn] = slot
        queued[distance, owner] += 1
    return Moves(kept, sent, received, queued.max(axis=1))


def move_experts(
    config: ExpertSpec,
    weights: ExpertWeights,
    old: np.ndarray,
    new: np.ndarray,
    *,
    mesh: Mesh | None = None,
    axis: str | tuple[str, ...] | None = None,
) -> ExpertWeights:
    """`weights` with the experts of placement `old` where `new` has them; donated field by field.

    Args:
        config: the layer.
        weights: its parameters.
        old: int [num_experts], the logical expert in each slot; each is in at least one.
        new: int [num_experts], likewise.
        mesh: the mesh that the experts are sharded over; None: they are on one device.
        axis: its expert-parallel axis, or axes.

    Raises:
        ValueError: parameters that are not the config's, or on several devices without a mesh; a
            mesh without the axis, or experts that do not divide by it.
    """
    check_weights(config, weights)
    sharding = place(config, mesh, axis).routed
    devices = len(weights.routed.w13_weight.sharding.device_set)
    if sharding is None and devices > 1:
        expected = f"the weights' own: they are on {devices} devices"
        raise ValueError(_checks.message("mesh and axis", expected, None))
    names = axis_names(axis)
    sizes = [mesh.shape[name] for name in names] if mesh is not None else []
    moves = plan_moves(old, new, math.prod(sizes))
    moved: dict[str, Array] = {}
    for name, array in weights.routed.arrays().items():  # every rank holds all of a shared one
        if sharding is None:
            moved[name] = _moved(array, moves)
        else:
            moved[name] = _moved(jax.device_put(array, sharding), moves, mesh=mesh, axis=axis)
    return weights.with_routed(**moved)


# One field at a time, donated: the peak is the parameters and one field, not twice the parameters.
@partial(jax.jit, static_argnames=("mesh", "axis"), donate_argnums=0)
def _moved(
    array: Shaped[Array, "experts ..."],
    moves: Moves,
    *,
    mesh: Mesh | None = None,
    axis: str | tuple[str, ...] | None = None,
) -> Shaped[Array, "experts ..."]:
    if mesh is None or axis is None:
        return array[moves.kept[0]]
    rows = PartitionSpec(axis)
    on_rank = partial(_moved_on_rank, axis=axis)
    return jax.shard_map(on_rank, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows)(
        array, moves
    )


def _moved_on_rank(
    array: Shaped[Array, "slots ..."], moves: Moves, *, axis: str | tuple[str, ...]
) -> Shaped[Array, "slots ..."]:
    """This rank's part of a field, filled from its own slots and then round by round."""
    rank = lax.axis_index(axis)
    # Collectives of all backends carry integers; and no bit of a NaN changes.
    bits = lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")
    filled = bits[moves.kept[rank]]
    num_ranks = moves.rounds.size
    for distance in range(1, num_ranks):
        pairs = [(sender, (sender + distance) % num_ranks) for sender in range(num_ranks)]
        sent, received = moves.sent[distance, rank], moves.received[distance, rank]

        def exchange(
            turn: Array, filled: Array, pairs=pairs, sent=sent, received=received
        ) -> Array:
            # Read from `bits`, which no round writes: a slot may be filled before it is sent.
            arrived = lax.ppermute(bits[sent[turn]], axis, pairs)
            return filled.at[received[turn]].set(arrived, mode="drop")

        filled = lax.fori_loop(0, moves.rounds[distance], exchange, filled)
    return lax.bitcast_convert_type(filled, array.dtype)
