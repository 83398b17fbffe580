"""MegaMoE under a server: parameters, replica map and counts change together, uncompiled."""

from typing import Any

import cases
import jax
import numpy as np
import pytest
from flax import nnx

import jax_megamoe as mm

TOKENS = 16
CONFIG = cases.config("mxfp8", num_experts=16, num_logical_experts=12)


def host(array: Any) -> np.ndarray:
    return np.asarray(array, np.float32)


def test_a_rebalance_changes_no_number_and_compiles_nothing() -> None:
    """Also where the caller never passes a map."""
    inputs, mesh = cases.tokens(CONFIG, TOKENS), cases.ep_mesh(4)
    fresh = dict(implementation="xla", mesh=mesh, axis="ep")
    moe = mm.MegaMoE(CONFIG, rngs=nnx.Rngs(0), **fresh)
    traces = []

    @nnx.jit
    def call(moe: mm.MegaMoE, *inputs: jax.Array) -> Any:
        traces.append(1)
        return moe(*inputs, return_stats=True)

    want, _ = call(moe, *inputs)
    assert moe.placement.tolist() == [*range(12), 0, 1, 2, 3]
    for loads in (np.arange(12), np.arange(12)[::-1] ** 2):
        placement = moe.rebalance(loads=loads)
        np.testing.assert_array_equal(moe.placement, placement)
        np.testing.assert_array_equal(placement, mm.solve_placement(loads, 16, 4))
        y, counts = call(moe, *inputs)
        np.testing.assert_array_equal(host(y), host(want))
        held = np.bincount(placement, np.asarray(counts), minlength=12)
        np.testing.assert_array_equal(held, np.bincount(np.ravel(inputs[1]), minlength=12))
    assert len(traces) == 1
    moe.replace(mm.MegaMoE(CONFIG, rngs=nnx.Rngs(1), **fresh).weights)
    other, _ = call(moe, *inputs)
    assert moe.placement.tolist() == [*range(12), 0, 1, 2, 3]
    assert cases.relative_error(host(other), host(want)) > 0.1
    assert len(traces) == 1


def test_a_thousand_steps_with_twenty_rebalances() -> None:
    """As a server runs: one trace, and after each rebalance the numbers of a fresh layer."""
    cfg = cases.config("bf16", num_experts=12, num_logical_experts=8, top_k=2, max_num_tokens=8)
    parts, mesh = [each[:8] for each in cases.float_matrices(cfg)["routed"]], cases.ep_mesh(4)
    rng, traces = np.random.default_rng(0), []
    batches = [cases.tokens(cfg, 16, seed) for seed in range(4)]

    def layer(slots: np.ndarray) -> mm.MegaMoE:
        weights = mm.quantize_experts(cfg, *(part[slots] for part in parts))
        replicas = mm.replica_map(slots, 8)
        place = dict(mesh=mesh, axis="ep", implementation="xla")
        return mm.MegaMoE(cfg, weights, eplb=replicas, **place)

    @nnx.jit
    def call(moe: mm.MegaMoE, *inputs: jax.Array) -> jax.Array:
        traces.append(1)
        return moe(*inputs)

    served = layer(np.arange(12) % 8)
    want = [host(call(served, *batch)) for batch in batches]
    for turn in range(20):
        served.rebalance(loads=rng.integers(0, 100, 8))
        for step in range(50):
            y = call(served, *batches[step % 4])
            np.testing.assert_array_equal(host(y), want[step % 4])
        fresh = layer(served.placement)
        np.testing.assert_array_equal(host(call(fresh, *batches[turn % 4])), want[turn % 4])
    assert len(traces) == 1


def test_replaced_parameters_that_do_not_fit_change_nothing() -> None:
    moe = mm.MegaMoE(CONFIG, rngs=nnx.Rngs(0), implementation="xla")
    before = moe.weights
    biased = cases.weights(CONFIG, biased=True)
    with pytest.raises(
        ValueError, match=r"^weights.routed.w13_bias: expected None: the layer has none, got"
    ):
        moe.replace(biased)
    wrong = mm.replica_map(np.arange(32) % 12, 12)
    with pytest.raises(ValueError, match=r"^eplb.logical_to_physical: expected slots in \[0, 16\)"):
        moe.replace(cases.weights(CONFIG), wrong)
    with pytest.raises(
        ValueError, match=r"^placement and loads: expected one of the two, got neither$"
    ):
        moe.rebalance()
    for name, array in before.arrays().items():
        assert moe.weights.arrays()[name] is array, name
