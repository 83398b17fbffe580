"""weights/move.py: who sends what, simulated; and what the program takes of memory."""

import cases
import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from jax_megamoe.weights import move
from jax_megamoe.weights.move import Moves, plan_moves


def carried_out(old: np.ndarray, moves: Moves) -> tuple[np.ndarray, int]:
    """Contents of the slots after the moves, and how many experts are sent."""
    ranks, slots = moves.kept.shape
    held = old.reshape(ranks, slots)
    after = np.take_along_axis(held, moves.kept, axis=1)
    sent = 0
    for distance in range(ranks):
        for turn in range(moves.rounds[distance]):
            for rank in range(ranks):
                slot = moves.received[distance, rank, turn]
                if slot < slots:
                    owner = (rank - distance) % ranks
                    after[rank, slot] = held[owner, moves.sent[distance, owner, turn]]
                    sent += 1
    return after.reshape(-1), sent


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 5), st.integers(2, 6), st.integers(0, 2**32 - 1))
def test_every_slot_gets_its_expert(ranks: int, slots: int, seed: int) -> None:
    """And only experts that their rank has not are sent, each once a slot."""
    rng = np.random.default_rng(seed)
    logical = int(rng.integers(1, ranks * slots + 1))
    spare = ranks * slots - logical
    old, new = (
        rng.permutation([*range(logical), *rng.integers(0, logical, spare)]) for _ in range(2)
    )
    moves = plan_moves(old, new, ranks)
    after, sent = carried_out(old, moves)
    np.testing.assert_array_equal(after, new)
    held = old.reshape(ranks, slots)
    absent = [expert not in held[slot // slots] for slot, expert in enumerate(new)]
    assert sent == sum(absent)
    assert moves.rounds[0] == 0 and moves.rounds.max() <= slots


def test_nothing_moves() -> None:
    placement = np.arange(12) % 8
    moves = plan_moves(placement, placement, 4)
    assert not moves.rounds.any()
    np.testing.assert_array_equal(moves.kept, np.tile(np.arange(3), (4, 1)))


def test_replicas_share_the_sending() -> None:
    """Rank 0 and rank 1 both have expert 0; ranks 2 and 3 want it: each asks another."""
    old = np.asarray([0, 1, 0, 2, 3, 4, 5, 6])
    new = np.asarray([0, 1, 0, 2, 3, 0, 5, 0])
    moves = plan_moves(old, new, 4)
    np.testing.assert_array_equal(moves.rounds, [0, 0, 1, 1])


def test_memory_of_a_move() -> None:
    """A device's part once more, two experts and the tables; not the experts of other ranks."""
    ranks, slots, expert = 8, 4, (64, 1024)
    mesh = cases.ep_mesh(ranks)
    array = jax.ShapeDtypeStruct(
        (ranks * slots, *expert), np.uint8, sharding=NamedSharding(mesh, PartitionSpec("ep"))
    )
    moves = plan_moves(np.arange(32), np.arange(32)[::-1], ranks)
    compiled = move._moved.lower(array, moves, mesh=mesh, axis="ep").compile()
    memory = compiled.memory_analysis()
    one = expert[0] * expert[1]
    assert memory.alias_size_in_bytes == slots * one
    assert memory.temp_size_in_bytes <= (slots + 2) * one + 8192
