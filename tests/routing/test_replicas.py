"""Maps of replicas, the choice among them, and what a rebalance changes."""

from functools import partial
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_megamoe as mm
from jax_megamoe.routing.replicas import initial_map, to_physical

LOGICAL = 12
TOKENS = 64
CONFIG = cases.config("mxfp8", num_logical_experts=LOGICAL)


def host(array: Any) -> np.ndarray:
    return np.asarray(array, np.float32)


def test_map_lists_the_slots_of_each_expert() -> None:
    held = np.asarray([2, 0, 1, 0, 0, 2])
    got = mm.replica_map(held, 3)
    np.testing.assert_array_equal(got.num_replicas, [3, 1, 2])
    np.testing.assert_array_equal(
        got.logical_to_physical, [[1, 3, 4, -1], [2, -1, -1, -1], [0, 5, -1, -1]]
    )
    assert got.num_replicas.dtype == got.logical_to_physical.dtype == jnp.int32


def test_initial_map_repeats_the_experts() -> None:
    got = initial_map(CONFIG)
    want = mm.replica_map(np.arange(16) % LOGICAL, LOGICAL)
    np.testing.assert_array_equal(got.logical_to_physical, want.logical_to_physical)
    np.testing.assert_array_equal(got.num_replicas, [2] * 4 + [1] * 8)


@pytest.mark.parametrize("held", [[0, 1, 3], [0, 1, -1], [[0, 1, 2]], []])
def test_ids_out_of_range(held: list[Any]) -> None:
    message = r"^physical_to_logical: expected ids in \[0, 3\) of shape \[num_experts\], got "
    with pytest.raises(ValueError, match=message):
        mm.replica_map(np.asarray(held, int), 3)


def test_experts_in_no_slot() -> None:
    message = (
        r"^physical_to_logical: expected every logical expert in at least one slot, got none for "
        r"\[1, 3\]$"
    )
    with pytest.raises(ValueError, match=message):
        mm.replica_map(np.asarray([0, 2, 0, 2]), 4)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.permutations(range(16)), st.lists(st.integers(0, 11), min_size=4, max_size=4))
def test_choice_is_the_hash_of_the_token(order: list[int], extra: list[int]) -> None:
    held = np.asarray([*range(LOGICAL), *extra])[order]
    ids = np.random.default_rng(0).integers(-1, LOGICAL, (40, 3)).astype(np.int32)
    got = np.asarray(to_physical(jnp.asarray(ids), mm.replica_map(held, LOGICAL)))
    for token, row in enumerate(ids.tolist()):
        for slot, logical in enumerate(row):
            if logical < 0:
                assert got[token, slot] == -1
                continue
            replicas = np.flatnonzero(held == logical)
            chosen = (token * 2654435769) % 2**32 % len(replicas)
            assert got[token, slot] == replicas[chosen]


def test_hash_spreads_tokens_evenly() -> None:
    ids = jnp.zeros((3000, 1), jnp.int32)
    slots = np.asarray(to_physical(ids, mm.replica_map(np.asarray([0, 0, 0, 1]), 2)))
    np.testing.assert_allclose(np.bincount(slots[:, 0], minlength=3), 1000, rtol=0.05)


def test_every_slot_holds_its_expert() -> None:
    parts = cases.float_matrices(CONFIG)["routed"]
    assert parts[0].shape[0] == LOGICAL
    got = mm.dequantize_experts(CONFIG, mm.quantize_experts(CONFIG, *parts))
    plain = cases.config("mxfp8", num_experts=LOGICAL)
    want = mm.dequantize_experts(plain, mm.quantize_experts(plain, *parts))
    for left, right in zip(got, want, strict=True):
        np.testing.assert_array_equal(left, right[np.arange(16) % LOGICAL])


def physical_counts(ids: np.ndarray, held: np.ndarray, per_rank: int) -> np.ndarray:
    """Tokens of each slot; a token's index counts within its rank."""
    counts = np.zeros(len(held), int)
    for token, row in enumerate(ids):
        for logical in row:
            if logical >= 0:
                replicas = np.flatnonzero(held == logical)
                counts[replicas[token % per_rank * 2654435769 % 2**32 % len(replicas)]] += 1
    return counts


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_replicas_change_no_output_and_a_rebalance_does_not_retrace(num_ranks: int) -> None:
    """The layer without replicas, with the initial map, and after experts have moved."""
    x, ids, factors = cases.tokens(CONFIG, TOKENS)
    assert int(ids.max()) == LOGICAL - 1
    plain = cases.config("mxfp8", num_experts=LOGICAL)
    weights = cases.weights(CONFIG)
    logical = jax.tree.map(lambda array: array[:LOGICAL], weights)
    want = mm.mega_moe(x, ids, factors, logical, config=plain, implementation="xla")

    place = dict(mesh=cases.ep_mesh(num_ranks), axis="ep") if num_ranks > 1 else {}
    padded = np.arange(TOKENS) % 16 == 3
    real = np.where(padded[:, None], -1, ids)
    traces = []

    @jax.jit
    def call(weights: mm.ExpertWeights, replicas: mm.ReplicaMap) -> Any:
        traces.append(1)
        options = dict(config=CONFIG, implementation="xla", return_stats=True, padding_mask=padded)
        return mm.mega_moe(x, ids, factors, weights, eplb=replicas, **options, **place)

    rng = np.random.default_rng(5)
    slots = np.arange(16) % LOGICAL
    moves = [slots, rng.permutation(slots), rng.permutation([*range(LOGICAL), 7, 7, 7, 7])]
    for held in moves:
        moved = jax.tree.map(lambda array, held=held: array[held], logical)
        y, counts = call(moved, mm.replica_map(held, LOGICAL))
        np.testing.assert_array_equal(host(y)[~padded], host(want)[~padded])
        assert not host(y)[padded].any()
        expected = physical_counts(real, held, TOKENS // num_ranks)
        np.testing.assert_array_equal(counts, expected)
    assert len(traces) == 1


def test_without_a_map_the_initial_one_is_used() -> None:
    inputs, weights = cases.tokens(CONFIG, TOKENS), cases.weights(CONFIG)
    call = partial(mm.mega_moe, *inputs, weights, config=CONFIG, return_stats=True)
    y, counts = call()
    want, want_counts = call(eplb=initial_map(CONFIG))
    np.testing.assert_array_equal(host(y), host(want))
    np.testing.assert_array_equal(counts, want_counts)
    held = np.arange(16) % LOGICAL
    np.testing.assert_array_equal(counts, physical_counts(np.asarray(inputs[1]), held, TOKENS))


def test_reference_maps_alike() -> None:
    inputs, weights = cases.tokens(CONFIG, TOKENS), cases.weights(CONFIG)
    rng = np.random.default_rng(6)
    held = rng.permutation(np.arange(16) % LOGICAL)
    moved = jax.tree.map(lambda array: array[:LOGICAL][held], weights)
    want = mm.einsum_moe(*inputs, weights, config=CONFIG)
    replicas = mm.replica_map(held, LOGICAL)
    y = mm.einsum_moe(*inputs, moved, config=CONFIG, eplb=replicas)
    np.testing.assert_array_equal(host(y), host(want))
