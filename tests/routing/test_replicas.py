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
    got = np.asarray(to_physical(jnp.asarray(ids), mm.replica_map(held, LOGICAL), 16))
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
    slots = np.asarray(to_physical(ids, mm.replica_map(np.asarray([0, 0, 0, 1]), 2), 4))
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


def broken_map() -> mm.ReplicaMap:
    """Expert 1's slot is one too many, 2's negative; 3 has no replica, 4 more than there is room
    for."""
    whole = initial_map(CONFIG)
    slots = np.asarray(whole.logical_to_physical).copy()
    counts = np.asarray(whole.num_replicas).copy()
    slots[1] = 16
    slots[2] = -7
    counts[3], counts[4] = 0, slots.shape[1] + 1
    return mm.ReplicaMap(jnp.asarray(slots), jnp.asarray(counts))


@pytest.mark.parametrize("implementation", ["xla", "reference", "einsum_moe"])
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_what_a_traced_map_has_out_of_range_routes_nowhere(
    implementation: str, num_ranks: int
) -> None:
    x, ids, factors = cases.tokens(CONFIG, TOKENS)
    weights, broken = cases.weights(CONFIG), broken_map()
    place: dict[str, Any] = {}
    if implementation == "einsum_moe":
        if num_ranks > 1:
            pytest.skip("einsum_moe runs on one device")
        call = partial(mm.einsum_moe, config=CONFIG)
    else:
        place = dict(mesh=cases.ep_mesh(num_ranks), axis="ep") if num_ranks > 1 else {}
        call = partial(mm.mega_moe, config=CONFIG, implementation=implementation, **place)
    call = jax.jit(call)
    missing = (np.asarray(ids) >= 1) & (np.asarray(ids) <= 4)
    want = call(x, jnp.where(missing, -1, ids), factors, weights, eplb=initial_map(CONFIG))
    y = call(x, ids, factors, weights, eplb=broken)
    assert missing.any(axis=1).any() and host(want).any()
    np.testing.assert_array_equal(host(y), host(want))


def test_stats_count_what_a_traced_map_has_in_range() -> None:
    ids = jnp.broadcast_to(jnp.arange(LOGICAL, dtype=jnp.int32)[:, None], (LOGICAL, 4))
    counts = jax.jit(
        lambda replicas: mm.moe_stats(ids, config=CONFIG, eplb=replicas).tokens_per_expert
    )(broken_map())
    assert not np.asarray(counts)[1:5].any()
    assert int(counts.sum()) == 4 * (LOGICAL - 4)
    loads = mm.record_loads(jnp.zeros(LOGICAL), jnp.ones(16, jnp.int32), broken_map())
    np.testing.assert_array_equal(loads, [2, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1])


def of_slots(held: Any, counts: Any) -> mm.ReplicaMap:
    return mm.ReplicaMap(jnp.asarray(held), jnp.asarray(counts))


SLOTS, COUNTS = np.arange(16, dtype=np.int32)[:, None], np.ones(16, np.int32)
PLAIN = cases.config("mxfp8")
WRONG_MAPS = {
    "another config's": (
        mm.replica_map(np.arange(32) % 16, 16),
        ValueError,
        r"eplb.logical_to_physical: expected slots in \[0, 16\) for the replicas of each expert, "
        r"got slots from 0 to 31; make the map for this config",
    ),
    "uint8 slots": (
        of_slots(SLOTS.astype(np.uint8), COUNTS),
        TypeError,
        "eplb.logical_to_physical: expected dtype int32, got uint8",
    ),
    "float counts": (
        of_slots(SLOTS, COUNTS.astype(np.float32)),
        TypeError,
        "eplb.num_replicas: expected dtype int32, got float32",
    ),
    "a slot too many": (
        of_slots(np.where(SLOTS == 3, 99, SLOTS), COUNTS),
        ValueError,
        r"eplb.logical_to_physical: expected slots in \[0, 16\) .*, got slots from 0 to 99",
    ),
    "no slot": (
        of_slots(np.where(SLOTS == 3, -1, SLOTS), COUNTS),
        ValueError,
        r"eplb.logical_to_physical: expected slots in \[0, 16\) .*, got slots from -1 to 15",
    ),
    "no replica": (
        of_slots(SLOTS, COUNTS * 0),
        ValueError,
        "eplb.num_replicas: expected 1 to 1 replicas of each expert, got numbers from 0 to 0",
    ),
    "too many replicas": (
        of_slots(SLOTS, COUNTS * 2),
        ValueError,
        "eplb.num_replicas: expected 1 to 1 replicas of each expert, got numbers from 2 to 2",
    ),
    "two experts in a slot": (
        of_slots(np.where(SLOTS == 3, 4, SLOTS), COUNTS),
        ValueError,
        r"eplb.logical_to_physical: expected one expert in each slot, got more in \[4\]",
    ),
    "no room": (
        of_slots(SLOTS[:, :0], COUNTS),
        ValueError,
        "eplb.logical_to_physical: expected room for at least one replica, got none",
    ),
}


@pytest.mark.parametrize("case", WRONG_MAPS)
def test_maps_that_are_not_the_configs(case: str) -> None:
    replicas, error, message = WRONG_MAPS[case]
    inputs, weights = cases.tokens(PLAIN, 8), cases.weights(PLAIN)
    for call in (
        partial(mm.mega_moe, *inputs, weights),
        partial(mm.einsum_moe, *inputs, weights),
        partial(mm.moe_stats, inputs[1]),
    ):
        with pytest.raises(error, match=f"^{message}"):
            call(config=PLAIN, eplb=replicas)


def test_dtypes_of_traced_maps_are_checked() -> None:
    inputs, weights = cases.tokens(PLAIN, 8), cases.weights(PLAIN)
    call = jax.jit(partial(mm.mega_moe, config=PLAIN))
    with pytest.raises(TypeError, match=r"^eplb.logical_to_physical: expected dtype int32"):
        call(*inputs, weights, eplb=of_slots(SLOTS.astype(np.uint8), COUNTS))
