"""mega_moe under jax.vmap: a batch becomes rows of one call, and what is refused."""

from functools import partial
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from emulation import MEGA, STAGING, Emulation, config
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_megamoe as mm
from jax_megamoe.routing.replicas import initial_map

BATCH, TOKENS = 3, 8
AXES = (0, 0, 0, None)


def batch(cfg: mm.MoEConfig) -> tuple[jax.Array, ...]:
    """x, topk_ids and topk_weights of BATCH calls."""
    flat = cases.tokens(cfg, BATCH * TOKENS)
    return tuple(array.reshape(BATCH, TOKENS, -1) for array in flat)


def host(array: Any) -> np.ndarray:
    return np.asarray(array, np.float32)


@pytest.mark.parametrize(
    ("form", "implementation", "ranks", "kind"),
    [
        ("mxfp8", "xla", 1, AxisType.Auto),
        ("nvfp4", "xla", 4, AxisType.Auto),
        ("bf16", "xla", 4, AxisType.Explicit),
        ("nvfp4", "reference", 4, AxisType.Auto),
    ],
)
def test_equals_one_call_after_the_other(
    form: str, implementation: str, ranks: int, kind: AxisType
) -> None:
    """With a padding mask, its own for each element, and a shared expert."""
    cfg = cases.config(form, num_shared_experts=1)
    place = {} if ranks == 1 else dict(mesh=cases.ep_mesh(ranks, kind), axis="ep")
    call = partial(mm.mega_moe, config=cfg, implementation=implementation, **place)
    masks = jnp.arange(BATCH * TOKENS).reshape(BATCH, TOKENS) % 5 == 0
    inputs, weights = batch(cfg), cases.weights(cfg)

    def masked(x: Any, ids: Any, factors: Any, mask: Any, weights: Any) -> jax.Array:
        return call(x, ids, factors, weights, padding_mask=mask)

    got = jax.jit(jax.vmap(masked, (0, 0, 0, 0, None)))(*inputs, masks, weights)
    one = jax.jit(masked)
    for i in range(BATCH):
        want = one(*(array[i] for array in inputs), masks[i], weights)
        if form == "bf16":
            # CPUs with AMX multiply BF16 in an order that depends on the number of rows.
            cases.assert_agree(host(got[i]), host(want), form, f"element {i}")
        else:
            np.testing.assert_array_equal(host(got[i]), host(want))
        assert host(want).any()


def test_batches_of_some_arguments_of_other_axes_and_of_batches() -> None:
    cfg = cases.config("bf16")
    x, ids, factors = batch(cfg)
    weights = cases.weights(cfg)
    call = partial(mm.mega_moe, config=cfg, implementation="xla")
    one = jax.jit(call)
    got = jax.vmap(call, (1, None, None, None))(x.swapaxes(0, 1), ids[0], factors[0], weights)
    for i in range(BATCH):
        np.testing.assert_array_equal(host(got[i]), host(one(x[i], ids[0], factors[0], weights)))
    scaled = jax.vmap(call, (None, None, 0, None))(x[0], ids[0], factors, weights)
    np.testing.assert_array_equal(host(scaled[1]), host(one(x[0], ids[0], factors[1], weights)))
    nested = jax.vmap(jax.vmap(call, AXES), AXES)
    two = nested(*(jnp.stack([array, array[::-1]]) for array in (x, ids, factors)), weights)
    np.testing.assert_array_equal(host(two[0, 2]), host(one(x[2], ids[2], factors[2], weights)))
    np.testing.assert_array_equal(host(two[1]), host(two[0, ::-1]))


def test_around_the_callers_shard_map() -> None:
    cfg = cases.config("mxfp4")
    inputs, weights, rows = batch(cfg), cases.weights(cfg), P("ep")
    call = jax.shard_map(
        partial(mm.mega_moe, config=cfg, axis="ep", implementation="xla"),
        mesh=cases.ep_mesh(4),
        in_specs=(rows, rows, rows, weights.partition_specs("ep")),
        out_specs=rows,
    )
    got = jax.jit(jax.vmap(call, AXES))(*inputs, weights)
    want = mm.mega_moe(*(a[2] for a in inputs), weights, config=cfg, implementation="xla")
    np.testing.assert_array_equal(host(got[2]), host(want))


def test_gradients_of_a_batch_and_a_batch_of_gradients() -> None:
    cfg = cases.config("mxfp8", num_shared_experts=1)
    x, ids, factors = batch(cfg)
    weights, mesh = cases.weights(cfg), cases.ep_mesh(4)
    call = partial(mm.mega_moe, config=cfg, implementation="xla", mesh=mesh, axis="ep")

    def loss(x: Any, ids: Any, factors: Any, weights: Any) -> jax.Array:
        return (call(x, ids, factors, weights).astype(jnp.float32) ** 2).sum()

    def sum_of_losses(x: Any, ids: Any, factors: Any, weights: Any) -> jax.Array:
        return jax.vmap(loss, AXES)(x, ids, factors, weights).sum()

    one = jax.jit(jax.grad(loss, argnums=(0, 2)))
    want = [one(x[i], ids[i], factors[i], weights) for i in range(BATCH)]
    of_batch = jax.jit(jax.grad(sum_of_losses, argnums=(0, 2)))(x, ids, factors, weights)
    each = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 2)), AXES))(x, ids, factors, weights)
    for index, limit in enumerate(tolerances.GRADIENTS_OVER_RANKS):
        wanted = np.stack([host(gradient[index]) for gradient in want])
        assert cases.relative_error(of_batch[index], wanted) <= limit
        assert cases.relative_error(each[index], wanted) <= limit


def test_einsum_moe() -> None:
    cfg = cases.config("nvfp4")
    inputs, weights = batch(cfg), cases.weights(cfg)
    call = partial(mm.einsum_moe, config=cfg)
    got = jax.vmap(call, AXES)(*inputs, weights)
    cases.assert_agree(got[1], call(*(a[1] for a in inputs), weights), "nvfp4", "einsum_moe")


def test_the_kernels_are_launched_once_for_all_rows(emulation: Emulation) -> None:
    cfg = config()
    weights, place = cases.weights(cfg), dict(mesh=cases.ep_mesh(4), axis="ep")
    call = partial(mm.mega_moe, config=cfg, implementation="deep_gemm", **place)
    flat = cases.tokens(cfg, BATCH * TOKENS)
    jax.block_until_ready(call(*flat, weights))

    def described(entry: str) -> dict[int, tuple[Any, ...]]:
        launches = emulation.launches(entry).items()
        keys = ("kernel", "grid", "block", "smem")
        return {device: tuple(str(each.get(key)) for key in keys) for device, each in launches}

    want = described(STAGING), described(MEGA)
    emulation.driver.clear()
    y = jax.block_until_ready(jax.vmap(call, AXES)(*batch(cfg), weights))
    assert y.shape == (BATCH, TOKENS, cfg.hidden_size)
    assert (described(STAGING), described(MEGA)) == want and len(want[0]) == 4


# What is refused.


def refusal(text: str, *inputs: Any, axes: Any = AXES, **kwargs: Any) -> None:
    for implementation in ("xla", "reference"):
        call = partial(mm.mega_moe, implementation=implementation, **kwargs)
        for each in (call, jax.jit(call)):
            with pytest.raises((NotImplementedError, ValueError), match=f"^{text}"):
                jax.vmap(each, axes)(*inputs)


def test_a_batch_of_weights() -> None:
    cfg = cases.config("bf16")
    weights = jax.tree.map(lambda a: jnp.stack([a] * BATCH), cases.weights(cfg))
    text = (
        "weights and eplb: expected the same for all elements of jax.vmap, got a batch; "
        r"call mega_moe for one after the other \(jax.lax.map\)"
    )
    refusal(text, *batch(cfg), weights, config=cfg, axes=0)


def test_a_batch_of_replica_maps() -> None:
    cfg = cases.config("bf16", num_logical_experts=8)
    maps = jax.tree.map(lambda a: jnp.stack([a] * BATCH), initial_map(cfg))
    call = partial(mm.mega_moe, config=cfg, implementation="xla")
    inputs = *batch(cfg), cases.weights(cfg)
    with pytest.raises(NotImplementedError, match=r"^weights and eplb: expected the same"):
        jax.vmap(lambda eplb, *args: call(*args, eplb=eplb), (0, *AXES))(maps, *inputs)


def test_stats() -> None:
    cfg = cases.config("bf16")
    text = "return_stats: expected False under jax.vmap, got True; count with jax_megamoe.moe_stats"
    refusal(text, *batch(cfg), cases.weights(cfg), config=cfg, return_stats=True)


def test_more_rows_than_a_rank_takes() -> None:
    cfg = cases.config("bf16", max_num_tokens=BATCH * TOKENS - 1)
    text = "num_tokens of all of jax.vmap: expected at most max_num_tokens = 23, got 24"
    refusal(text, *batch(cfg), cases.weights(cfg), config=cfg)


def test_a_batch_of_nothing() -> None:
    cfg = cases.config("bf16")
    inputs = (array[:0] for array in batch(cfg))
    text = "jax.vmap: expected at least one element, got 0"
    refusal(text, *inputs, cases.weights(cfg), config=cfg)
