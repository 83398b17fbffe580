"""Recording loads, solving for a placement, and moving the experts of a running layer."""

import re
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_megamoe as mm
from jax_megamoe.routing.replicas import initial_map

LOGICAL, SLOTS, RANKS, TOKENS = 16, 20, 4, 128
INITIAL = np.arange(SLOTS) % LOGICAL


def sharded(weights: mm.ExpertWeights, mesh: jax.sharding.Mesh) -> mm.ExpertWeights:
    """A copy over the mesh, that a rebalance may use up."""
    sharding = NamedSharding(mesh, PartitionSpec("ep"))
    return jax.tree.map(lambda array: jax.device_put(np.array(array), sharding), weights)


def skewed_ids(rng: np.random.Generator, top_k: int) -> np.ndarray:
    """Distinct experts for each token, high numbers more often by far."""
    keys = rng.gumbel(size=(TOKENS, LOGICAL)) - 1.5 * np.log1p(np.arange(LOGICAL)[::-1])
    return np.argsort(-keys, axis=1)[:, :top_k].astype(np.int32)


def per_rank(counts: Any) -> np.ndarray:
    return np.asarray(counts).reshape(RANKS, -1).sum(axis=1)


@pytest.mark.parametrize("form", ["mxfp8", "nvfp4"])
def test_a_skewed_layer_is_rebalanced(rng: np.random.Generator, form: str) -> None:
    """16 experts and 4 replicas over 4 ranks: the same output, even loads, one compilation."""
    config = cases.config(form, num_experts=SLOTS, num_logical_experts=LOGICAL)
    plain = cases.config(form, num_experts=LOGICAL)
    x, _, factors = cases.tokens(config, TOKENS)
    ids = skewed_ids(rng, config.top_k)
    mesh = cases.ep_mesh(RANKS)
    place = dict(mesh=mesh, axis="ep", implementation="xla", return_stats=True)
    logical = cases.weights(plain)
    want, tokens = mm.mega_moe(x, ids, factors, sharded(logical, mesh), config=plain, **place)
    traces = []

    @jax.jit
    def layer(weights: mm.ExpertWeights, replicas: mm.ReplicaMap) -> Any:
        traces.append(1)
        return mm.mega_moe(x, ids, factors, weights, config=config, eplb=replicas, **place)

    weights = sharded(cases.weights(config), mesh)
    replicas = initial_map(config)
    y, counts = layer(weights, replicas)
    np.testing.assert_array_equal(np.float32(y), np.float32(want))
    loads = mm.record_loads(jnp.zeros(LOGICAL), counts, replicas)
    np.testing.assert_array_equal(loads, tokens)
    before = mm.imbalance(per_rank(counts))

    placement = mm.solve_placement(loads, SLOTS, RANKS)
    given_up = weights
    weights, replicas = mm.rebalance(config, weights, INITIAL, placement, mesh=mesh, axis="ep")
    assert all(array.is_deleted() for array in given_up.arrays().values())
    for name, array in weights.arrays().items():
        expert = np.asarray(logical.arrays()[name])
        assert np.asarray(array).tobytes() == expert[placement].tobytes(), name
        assert array.sharding == NamedSharding(mesh, PartitionSpec("ep"))
    y, counts = layer(weights, replicas)
    np.testing.assert_array_equal(np.float32(y), np.float32(want))
    assert len(traces) == 1
    np.testing.assert_array_equal(mm.record_loads(jnp.zeros(LOGICAL), counts, replicas), loads)
    assert before > 1.5
    assert mm.imbalance(mm.rank_loads(loads, placement, RANKS)) < 1.05
    assert mm.imbalance(per_rank(counts)) < 1.1


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_there_and_back(rng: np.random.Generator, kind: AxisType) -> None:
    """Every routed field moves, biases too; a fused shared expert stays."""
    config = cases.config(
        "mxfp4", num_experts=SLOTS, num_logical_experts=LOGICAL, num_shared_experts=1
    )
    want = cases.weights(config, biased=True)
    routed = want.routed.arrays()
    assert len(routed) == 6
    mesh = cases.ep_mesh(RANKS, kind)
    specs = want.partition_specs("ep")
    weights = jax.tree.map(
        lambda a, spec: jax.device_put(np.array(a), NamedSharding(mesh, spec)), want, specs
    )
    traces = []

    @jax.jit
    def layer(weights: mm.ExpertWeights) -> jax.Array:
        traces.append(1)
        return weights.routed.w2_bias

    layer(weights)
    new = rng.permutation([*range(LOGICAL), 3, 3, 3, 9])
    weights, replicas = mm.rebalance(config, weights, INITIAL, new, mesh=mesh, axis="ep")
    for name, array in routed.items():
        np.testing.assert_array_equal(getattr(weights.routed, name), np.asarray(array)[new], name)
    layer(weights)
    assert len(traces) == 1
    np.testing.assert_array_equal(
        replicas.logical_to_physical, mm.replica_map(new, LOGICAL).logical_to_physical
    )
    split = NamedSharding(mesh, PartitionSpec("ep"))
    counts = jax.device_put(np.arange(SLOTS, dtype=np.int32), split)
    got = mm.record_loads(jnp.zeros(LOGICAL), counts, replicas)
    np.testing.assert_array_equal(got, np.bincount(new, np.arange(SLOTS)))
    weights, _ = mm.rebalance(config, weights, new, INITIAL, mesh=mesh, axis="ep")
    for name, array in want.arrays().items():
        assert np.asarray(weights.arrays()[name]).tobytes() == np.asarray(array).tobytes(), name


def test_on_one_device(rng: np.random.Generator) -> None:
    config = cases.config("bf16", num_logical_experts=12)
    want = cases.weights(config)
    new = rng.permutation(np.arange(16) % 12)
    got, _ = mm.rebalance(config, jax.tree.map(jnp.copy, want), np.arange(16) % 12, new)
    np.testing.assert_array_equal(got.routed.w13_weight, want.routed.w13_weight[new])


def test_recorded_loads_fade() -> None:
    replicas = mm.replica_map(np.asarray([1, 0, 1]), 2)
    first = mm.record_loads(jnp.zeros(2), jnp.asarray([5, 7, 6], jnp.int32), replicas)
    np.testing.assert_array_equal(first, [7, 11])
    again = mm.record_loads(first, jnp.asarray([1, 0, 0], jnp.int32), replicas, decay=0.5)
    np.testing.assert_array_equal(again, [3.5, 6.5])


@pytest.mark.parametrize(
    ("loads", "counts", "text"),
    [
        ((1,), (3,), "loads: expected shape [2], got shape [1]"),
        ((2,), (1,), "counts: expected a count of each physical expert, at least 2, got 1"),
        ((2,), (1, 3), "counts: expected shape [num_experts], got shape [1, 3]"),
    ],
)
def test_loads_of_another_layer_are_refused(
    loads: tuple[int, ...], counts: tuple[int, ...], text: str
) -> None:
    replicas = mm.replica_map(np.asarray([1, 0, 1]), 2)
    with pytest.raises(ValueError, match=re.escape(text)):
        mm.record_loads(jnp.zeros(loads), jnp.ones(counts, jnp.int32), replicas)


def test_rank_loads_and_imbalance() -> None:
    loads = mm.rank_loads(np.asarray([8, 2, 2]), np.asarray([0, 1, 0, 2]), 2)
    np.testing.assert_array_equal(loads, [6, 6])
    np.testing.assert_array_equal(mm.rank_loads(np.asarray([8, 2]), np.asarray([0, 1]), 2), [8, 2])
    assert mm.imbalance(loads) == 1
    assert mm.imbalance(np.asarray([9, 0, 0])) == 3
    assert mm.imbalance(np.zeros(3)) == 1


@pytest.mark.parametrize(
    "loads, slots, ranks, want",
    [
        # The heaviest expert is halved over both ranks, the light ones fill up.
        ([8, 2, 2], 4, 2, [0, 1, 0, 2]),
        # Three of four ranks have half of 6, the last the three light ones.
        ([6, 6, 1, 1, 1, 1], 8, 4, [0, 2, 0, 3, 1, 4, 1, 5]),
        # Without replicas: longest first.
        ([5, 4, 3, 2], 4, 2, [0, 3, 1, 2]),
        # No load at all: every expert gets as many, and no rank one twice.
        ([0, 0, 0, 0], 8, 2, [0, 1, 2, 3, 0, 1, 2, 3]),
        # A third replica would share a rank with another of its own: the light one gets it.
        ([9, 1], 4, 2, [0, 1, 0, 1]),
        # Nothing else is left.
        ([9], 4, 2, [0, 0, 0, 0]),
    ],
)
def test_solved_by_hand(loads: list[int], slots: int, ranks: int, want: list[int]) -> None:
    got = mm.solve_placement(np.asarray(loads), slots, ranks)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, want)


@settings(max_examples=60, deadline=None, derandomize=True)
@example(loads=[0.0] * 7, ranks=3, spare=5)
@given(
    loads=st.lists(st.floats(0, 1e6), min_size=1, max_size=24),
    ranks=st.integers(1, 6),
    spare=st.integers(0, 8),
)
def test_a_solution_holds_everything(loads: list[float], ranks: int, spare: int) -> None:
    """Every expert has a slot, the more loaded of two no fewer than the other, and none more than
    one a rank while others have fewer."""
    load = np.asarray(loads)
    slots = -(-(load.size + spare) // ranks) * ranks
    held = mm.solve_placement(load, slots, ranks)
    counts = np.bincount(held, minlength=load.size)
    assert counts.size == load.size and counts.all() and counts.sum() == slots
    np.testing.assert_array_equal(held, mm.solve_placement(load * 2, slots, ranks))
    for lighter, heavier in zip(np.argsort(load)[:-1], np.argsort(load)[1:], strict=True):
        if load[lighter] < load[heavier]:
            assert counts[lighter] <= counts[heavier]
    assert counts.max() <= max(ranks, counts.min() + ranks)


def test_the_solution_beats_the_initial_placement() -> None:
    rng = np.random.default_rng(7)
    for _ in range(20):
        loads = rng.gamma(0.5, size=64)
        solved = mm.solve_placement(loads, 80, 8)
        ratio = mm.imbalance(mm.rank_loads(loads, solved, 8))
        assert ratio < 1.1
        assert ratio < mm.imbalance(mm.rank_loads(loads, np.arange(80) % 64, 8))
        for rank in solved.reshape(8, -1):
            assert np.unique(rank).size == rank.size


@pytest.mark.parametrize(
    "loads, slots, ranks, text",
    [
        ([1, -1], 2, 1, r"loads: expected finite numbers >= 0 of shape \[num_logical_experts\]"),
        ([1, np.nan], 2, 1, "loads: expected finite numbers"),
        ([[1, 2]], 2, 1, "loads: expected finite numbers"),
        ([], 2, 1, "loads: expected finite numbers"),
        ([1, 2, 3], 2, 1, "num_physical: expected an integer >= 3, got 2"),
        ([1, 2, 3], 4, 0, "num_ranks: expected an integer >= 1, got 0"),
        (
            [1, 2, 3],
            4,
            3,
            "num_physical: expected a multiple of 3, got 4; every rank has equally many slots",
        ),
    ],
)
def test_what_cannot_be_solved(loads: list[Any], slots: int, ranks: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        mm.solve_placement(np.asarray(loads, float), slots, ranks)


@pytest.mark.parametrize(
    "changes, text",
    [
        (
            dict(new_placement=np.zeros(16, int)),
            "new_placement: expected every logical expert in at least one slot, got none for",
        ),
        (
            dict(old_placement=np.arange(12)),
            r"old_placement: expected shape \[16\], got shape \[12\]",
        ),
        (
            dict(new_placement=np.arange(16)),
            r"new_placement: expected ids in \[0, 12\) of shape \[num_experts\]",
        ),
        (dict(axis="ep"), "mesh and axis: expected both or neither, got mesh None, axis 'ep'"),
        (
            dict(mesh=2, axis="rank"),
            r"axis: expected one of \['ep'\], got 'rank'",
        ),
        (
            dict(weights=2),
            "mesh and axis: expected the weights' own: they are on 2 devices, got None",
        ),
        (
            dict(mesh=3, axis="ep"),
            "num_experts: expected a multiple of the 3 expert-parallel ranks, got 16",
        ),
    ],
)
def test_refused(changes: dict[str, Any], text: str) -> None:
    config = cases.config("mxfp8", num_logical_experts=12)
    weights = cases.weights(config)
    if "weights" in changes:
        weights = sharded(weights, cases.ep_mesh(changes["weights"]))
    if "mesh" in changes:
        changes = changes | dict(mesh=cases.ep_mesh(changes["mesh"]))
    initial = np.arange(16) % 12
    options = dict(old_placement=initial, new_placement=initial) | changes
    with pytest.raises(ValueError, match=text):
        mm.rebalance(config=config, **(options | dict(weights=weights)))
    assert not weights.routed.w13_weight.is_deleted()


def test_ids_are_integers() -> None:
    text = "physical_to_logical: expected integer ids, got float64"
    with pytest.raises(TypeError, match=text):
        mm.replica_map(np.asarray([0.0, 1.0]), 2)
