"""stats.py: counts from the routing alone, and the callback that is handed the routing."""

from collections.abc import Callable
from functools import partial
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_megamoe as mm
from jax_megamoe.routing.replicas import initial_map

TOKENS = 32
KINDS = pytest.mark.parametrize(
    "kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)


# Counts.


@pytest.mark.parametrize("jitted", [True, False])
def test_counts_equal_those_of_the_call(jitted: bool) -> None:
    """Over ranks, with replicas, padding and ids out of range."""
    cfg = cases.config("bf16", num_logical_experts=12)
    eplb = mm.replica_map(np.asarray([*range(12), 3, 3, 7, 0]), 12)
    x, ids, factors = cases.tokens(cfg, TOKENS)
    ids = jnp.asarray(np.asarray(ids.at[0, 0].set(-1).at[9, 1].set(-1)))
    mask = jnp.arange(TOKENS) % 8 == 7
    place = dict(mesh=cases.ep_mesh(4), axis="ep")
    call = partial(mm.mega_moe, config=cfg, implementation="xla", return_stats=True, **place)
    _, counts = call(x, ids, factors, cases.weights(cfg), padding_mask=mask, eplb=eplb)
    count = partial(mm.moe_stats, config=cfg, num_ranks=4)
    count = jax.jit(count) if jitted else count
    stats = count(ids, padding_mask=mask, eplb=eplb)
    np.testing.assert_array_equal(stats.tokens_per_expert, counts)
    want = cases.counts_of(np.asarray(ids), np.asarray(mask), 12)
    np.testing.assert_array_equal(stats.tokens_per_logical_expert, want)
    np.testing.assert_array_equal(stats.rank_loads, np.asarray(counts).reshape(4, 4).sum(1))
    np.testing.assert_array_equal(
        mm.record_loads(jnp.zeros(12), stats.tokens_per_expert, eplb), want
    )
    assert int(stats.dropped_slots) == 2 and int(stats.padded_rows) == 4
    loads = np.asarray(stats.rank_loads)
    assert stats.imbalance == loads.max() / loads.mean() == mm.imbalance(loads)
    assert {leaf.dtype for leaf in jax.tree.leaves(stats)} == {np.dtype("int32")}


def test_counts_without_a_map_or_a_mask() -> None:
    """Slot p holds expert p % num_logical; traced ids out of range are dropped."""
    cfg = cases.config("bf16", num_logical_experts=8)
    ids = cases.tokens(cfg, TOKENS)[1]
    plain = mm.moe_stats(ids, config=cfg)
    given = mm.moe_stats(ids, config=cfg, eplb=initial_map(cfg))
    jax.tree.map(np.testing.assert_array_equal, plain, given)
    assert plain.rank_loads.shape == (1,) and int(plain.padded_rows) == 0
    outside = jax.jit(partial(mm.moe_stats, config=cfg))(ids.at[0].set(8))
    assert int(outside.dropped_slots) == 4
    assert int(outside.tokens_per_logical_expert.sum()) == (TOKENS - 1) * cfg.top_k


def test_counts_add_up() -> None:
    cfg = cases.config("bf16")
    ids = cases.tokens(cfg, TOKENS)[1]
    halves = (mm.moe_stats(part, config=cfg) for part in (ids[:10], ids[10:]))
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.tree.map(jnp.add, *halves),
        mm.moe_stats(ids, config=cfg),
    )
    nothing = mm.moe_stats(ids[:0], config=cfg, num_ranks=4)
    assert nothing.imbalance == 1.0 and not any(map(np.any, jax.tree.leaves(nothing)))


@KINDS
def test_counts_of_sharded_ids(kind: AxisType) -> None:
    cfg = cases.config("bf16")
    ids, mask = cases.tokens(cfg, TOKENS)[1], jnp.arange(TOKENS) < 5
    rows = NamedSharding(cases.ep_mesh(4, kind), P("ep"))
    count = partial(mm.moe_stats, config=cfg, num_ranks=4)
    want = count(ids, padding_mask=mask)
    for call in (count, jax.jit(count)):
        got = call(jax.device_put(ids, rows), padding_mask=jax.device_put(mask, rows))
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(
    ("shape", "ranks", "text"),
    [
        ((32, 3), 1, r"topk_ids: expected shape \[num_tokens, 4\], got shape \[32, 3\]"),
        ((30, 4), 4, "topk_ids rows: expected a multiple of 4, got 30"),
        ((30, 4), 3, "num_experts: expected a multiple of the 3 expert-parallel ranks, got 16"),
    ],
)
def test_routing_that_does_not_fit(shape: tuple[int, int], ranks: int, text: str) -> None:
    ids = jnp.zeros(shape, jnp.int32)
    with pytest.raises(ValueError, match=f"^{text}"):
        mm.moe_stats(ids, config=cases.config("bf16"), num_ranks=ranks)


def test_a_mask_that_does_not_fit() -> None:
    ids, mask = jnp.zeros((8, 4), jnp.int32), jnp.zeros(4, bool)
    with pytest.raises(ValueError, match=r"^padding_mask: expected shape \[8\], got shape \[4\]"):
        mm.moe_stats(ids, config=cases.config("bf16"), padding_mask=mask)


# Capture.


class Recorder:
    """Keeps what a routing callback is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, np.ndarray, np.ndarray | None]] = []

    def __call__(self, name: str, topk_ids: np.ndarray, padding_mask: np.ndarray | None) -> None:
        self.calls.append((name, topk_ids, padding_mask))


def layer(cfg: mm.MoEConfig, **kwargs: Any) -> Callable[..., jax.Array]:
    """mega_moe by xla, of x, topk_ids, topk_weights and a weight tree."""
    return partial(mm.mega_moe, config=cfg, implementation="xla", **kwargs)


@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize("kind", [None, AxisType.Auto, AxisType.Explicit])
def test_the_callback_sees_logical_ids(jitted: bool, kind: AxisType | None) -> None:
    """Before replicas are chosen, whole though the call runs over ranks."""
    cfg = cases.config("bf16", num_logical_experts=8)
    inputs, mask = cases.tokens(cfg, TOKENS), jnp.arange(TOKENS) < 3
    place = {} if kind is None else dict(mesh=cases.ep_mesh(4, kind), axis="ep")
    if kind is not None:
        rows = NamedSharding(place["mesh"], P("ep"))
        *inputs, mask = (jax.device_put(array, rows) for array in (*inputs, mask))
    call = layer(cfg, name="layers.3", **place)
    call = jax.jit(call) if jitted else call
    record = Recorder()
    with mm.capture_routing(record):
        y = call(*inputs, cases.weights(cfg), padding_mask=mask)
        call(*inputs, cases.weights(cfg))
    masked, plain = sorted(record.calls, key=lambda each: each[2] is None)
    for name, ids, _ in (masked, plain):
        assert name == "layers.3" and isinstance(ids, np.ndarray)
        np.testing.assert_array_equal(ids, inputs[1])
    np.testing.assert_array_equal(masked[2], mask)
    assert plain[2] is None
    want = layer(cfg)(*cases.tokens(cfg, TOKENS), cases.weights(cfg), padding_mask=np.asarray(mask))
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(want, np.float32))


def test_each_step_of_a_scan_and_of_a_vmap() -> None:
    cfg = cases.config("bf16")
    x, ids, factors = cases.tokens(cfg, TOKENS)
    weights, record = cases.weights(cfg), Recorder()
    shifted = (ids[None] + jnp.arange(3, dtype=jnp.int32)[:, None, None]) % 16

    @jax.jit
    def model(x: jax.Array) -> jax.Array:
        def step(x: jax.Array, ids: jax.Array) -> tuple[jax.Array, None]:
            return layer(cfg)(x, ids, factors, weights), None

        return lax.scan(step, x, shifted)[0]

    with mm.capture_routing(record):
        model(x)
        jax.vmap(layer(cfg), (None, 0, None, None))(x[:8], shifted[:, :8], factors[:8], weights)
    for start, rows in ((0, TOKENS), (3, 8)):
        seen = sorted(int(ids[0, 0]) for _, ids, _ in record.calls[start : start + 3])
        assert seen == sorted(int(each[0, 0]) for each in shifted)
        assert all(ids.shape == (rows, 4) for _, ids, _ in record.calls[start : start + 3])
    assert {name for name, _, _ in record.calls} == {"mega_moe"} and len(record.calls) == 6


def test_gradients_capture_once() -> None:
    cfg = cases.config("bf16")
    x, ids, factors = cases.tokens(cfg, TOKENS)
    weights, record = cases.weights(cfg), Recorder()

    def loss(x: jax.Array) -> jax.Array:
        return layer(cfg)(x, ids, factors, weights).astype(jnp.float32).sum()

    with mm.capture_routing(record):
        jax.jit(jax.grad(loss))(x)
    assert len(record.calls) == 1


def test_each_rank_inside_the_callers_shard_map() -> None:
    cfg = cases.config("bf16")
    inputs, weights, rows = cases.tokens(cfg, TOKENS), cases.weights(cfg), P("ep")
    call = jax.shard_map(
        layer(cfg, axis="ep"),
        mesh=cases.ep_mesh(4),
        in_specs=(rows, rows, rows, weights.partition_specs("ep")),
        out_specs=rows,
    )
    record = Recorder()
    with mm.capture_routing(record):
        jax.jit(call)(*inputs, weights)
    seen = sorted(ids.tolist() for _, ids, _ in record.calls)
    assert seen == sorted(np.asarray(inputs[1]).reshape(4, 8, 4).tolist())


def test_outside_nothing_is_captured_and_nothing_is_in_the_program() -> None:
    """A function compiled before, inside and after: one compile each for with and without."""
    cfg = cases.config("bf16")
    inputs, weights, record = cases.tokens(cfg, TOKENS), cases.weights(cfg), Recorder()
    traced = []

    @jax.jit
    def call(*args: Any) -> jax.Array:
        traced.append(None)
        return layer(cfg)(*args)

    for _ in range(2):
        call(*inputs, weights)
        with mm.capture_routing(record):
            call(*inputs, weights)
            text = call.lower(*inputs, weights).as_text()
    assert len(record.calls) == 2 and len(traced) == 2
    assert "callback" in text
    assert "callback" not in call.lower(*inputs, weights).as_text()


def test_a_callback_that_raises_is_heard_of() -> None:
    cfg = cases.config("bf16")
    inputs, weights = cases.tokens(cfg, TOKENS), cases.weights(cfg)

    def fail(name: str, ids: np.ndarray, mask: np.ndarray | None) -> None:
        raise LookupError(f"{name} is not wanted")

    with pytest.raises(Exception, match="mega_moe is not wanted"), mm.capture_routing(fail):
        jax.block_until_ready(jax.jit(layer(cfg))(*inputs, weights))
