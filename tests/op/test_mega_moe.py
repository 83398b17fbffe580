"""op.py: the ways to call `mega_moe`, and padding."""

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

TOKENS = 32
KINDS = pytest.mark.parametrize(
    "kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "reference"])


def host(array: Any) -> np.ndarray:
    return np.asarray(array, np.float32)


def one_device(cfg: mm.MoEConfig, **kwargs: Any) -> Any:
    """The call to compare with: xla on one device."""
    call = partial(mm.mega_moe, config=cfg, implementation="xla", return_stats=True)
    return call(*cases.tokens(cfg, TOKENS), cases.weights(cfg), **kwargs)


# Ways to call.


@KINDS
def test_sharded_arrays_stay_sharded(kind: AxisType) -> None:
    cfg, mesh = cases.config("mxfp4"), cases.ep_mesh(4, kind)
    inputs = cases.sharded(cases.tokens(cfg, TOKENS), (P("ep"), P("ep"), P("ep")), mesh)
    weights = cases.weights(cfg)
    weights = cases.sharded(weights, weights.partition_specs("ep"), mesh)
    y, counts = mm.mega_moe(*inputs, weights, config=cfg, mesh=mesh, axis="ep", return_stats=True)
    want, want_counts = one_device(cfg)
    np.testing.assert_array_equal(host(y), host(want))
    np.testing.assert_array_equal(counts, want_counts)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("ep")), 2)
    assert counts.sharding.is_equivalent_to(NamedSharding(mesh, P("ep")), 1)


@KINDS
def test_current_mesh(kind: AxisType) -> None:
    cfg = cases.config("bf16")
    with jax.set_mesh(cases.ep_mesh(4, kind)):
        call = partial(mm.mega_moe, config=cfg, axis="ep")
        eager = call(*cases.tokens(cfg, TOKENS), cases.weights(cfg))
        jitted = jax.jit(call)(*cases.tokens(cfg, TOKENS), cases.weights(cfg))
    want = host(one_device(cfg)[0])
    np.testing.assert_array_equal(host(eager), want)
    np.testing.assert_array_equal(host(jitted), want)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(("form", "num_shared"), [("nvfp4", 1), ("fp8_block", 0)])
@IMPLEMENTATIONS
def test_inside_the_callers_shard_map(
    check_vma: bool, form: str, num_shared: int, implementation: str
) -> None:
    cfg, mesh = cases.config(form, num_shared_experts=num_shared), cases.ep_mesh(4)
    weights = cases.weights(cfg)

    def local(x: Any, ids: Any, factors: Any, weights: mm.ExpertWeights) -> Any:
        assert weights.routed.w13_weight.shape[0] == cfg.num_experts // 4
        options = dict(axis="ep", return_stats=True, implementation=implementation)
        y, counts = mm.mega_moe(x, ids, factors, weights, config=cfg, **options)
        return 2 * y, counts

    rows = P("ep")
    call = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(rows, rows, rows, weights.partition_specs("ep")),
        out_specs=(rows, rows),
        check_vma=check_vma,
    )
    y, counts = jax.jit(call)(*cases.tokens(cfg, TOKENS), weights)
    want, want_counts = one_device(cfg)
    cases.assert_agree(host(y) / 2, host(want), form, implementation)
    np.testing.assert_array_equal(counts, want_counts)


def test_inside_a_shard_map_over_another_axis_too() -> None:
    """Two data-parallel copies, each with its tokens over two expert-parallel ranks."""
    cfg = cases.config("mxfp8", num_shared_experts=1)
    mesh = jax.make_mesh((2, 2), ("dp", "ep"), axis_types=(AxisType.Auto,) * 2)
    weights, rows = cases.weights(cfg), P(("dp", "ep"))
    call = jax.shard_map(
        partial(mm.mega_moe, config=cfg, axis="ep"),
        mesh=mesh,
        in_specs=(rows, rows, rows, weights.partition_specs("ep")),
        out_specs=rows,
    )
    y = jax.jit(call)(*cases.tokens(cfg, TOKENS), weights)
    np.testing.assert_array_equal(host(y), host(one_device(cfg)[0]))


def test_outside_a_shard_map_over_another_axis() -> None:
    """Manual over "dp" only: the call makes "ep" manual itself."""
    cfg = cases.config("bf16")
    mesh = jax.make_mesh((2, 2), ("dp", "ep"), axis_types=(AxisType.Auto,) * 2)
    weights, rows = cases.weights(cfg), P("dp")
    call = jax.shard_map(
        partial(mm.mega_moe, config=cfg, axis="ep"),
        mesh=mesh,
        in_specs=(rows, rows, rows, jax.tree.map(lambda _: P(), weights)),
        out_specs=rows,
        axis_names={"dp"},
    )
    y = jax.jit(call)(*cases.tokens(cfg, TOKENS), weights)
    np.testing.assert_array_equal(host(y), host(one_device(cfg)[0]))


@KINDS
def test_axis_of_two_mesh_axes(kind: AxisType) -> None:
    cfg = cases.config("mxfp4", num_shared_experts=1)
    mesh = jax.make_mesh((2, 4), ("host", "chip"), axis_types=(kind,) * 2)
    call = jax.jit(
        partial(mm.mega_moe, config=cfg, mesh=mesh, axis=("host", "chip"), return_stats=True)
    )
    y, counts = call(*cases.tokens(cfg, TOKENS), cases.weights(cfg))
    want, want_counts = one_device(cfg)
    np.testing.assert_array_equal(host(y), host(want))
    np.testing.assert_array_equal(counts, want_counts)


def test_axis_of_one_rank() -> None:
    cfg = cases.config("nvfp4")
    for implementation in ("xla", "reference"):
        call = partial(mm.mega_moe, config=cfg, implementation=implementation, return_stats=True)
        y, counts = call(
            *cases.tokens(cfg, TOKENS), cases.weights(cfg), mesh=cases.ep_mesh(1), axis="ep"
        )
        want, want_counts = call(*cases.tokens(cfg, TOKENS), cases.weights(cfg))
        np.testing.assert_array_equal(host(y), host(want))
        np.testing.assert_array_equal(counts, want_counts)


@KINDS
def test_unused_mesh_axis(kind: AxisType) -> None:
    cfg = cases.config("nvfp4")
    mesh = jax.make_mesh((2, 4), ("dp", "ep"), axis_types=(kind,) * 2)
    call = jax.jit(partial(mm.mega_moe, config=cfg, mesh=mesh, axis="ep", return_stats=True))
    y, counts = call(*cases.tokens(cfg, TOKENS), cases.weights(cfg))
    want, want_counts = one_device(cfg)
    np.testing.assert_array_equal(host(y), host(want))
    np.testing.assert_array_equal(counts, want_counts)


@pytest.mark.parametrize("kind", [None, AxisType.Auto, AxisType.Explicit])
def test_scan_over_layers(kind: AxisType | None) -> None:
    cfg = cases.config("mxfp8", num_shared_experts=1)
    first = cases.weights(cfg)
    parts = cases.float_matrices(cfg, seed=9)
    second = mm.quantize_experts(cfg, *parts["routed"], shared=parts["shared"])
    x, ids, factors = cases.tokens(cfg, TOKENS)
    place = {}
    if kind is not None:
        mesh = cases.ep_mesh(4, kind)
        place = dict(mesh=mesh, axis="ep")
        x, ids, factors = cases.sharded((x, ids, factors), (P("ep"),) * 3, mesh)
        first, second = (cases.sharded(w, w.partition_specs("ep"), mesh) for w in (first, second))
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), first, second)
    apply = partial(mm.mega_moe, config=cfg, implementation="xla", **place)

    @jax.jit
    def model(x: Any, layers: mm.ExpertWeights) -> Any:
        return lax.scan(lambda x, layer: (x + apply(x, ids, factors, layer), None), x, layers)[0]

    want, one = x, jax.jit(lambda x, layer: x + apply(x, ids, factors, layer))
    for layer in (first, second):
        want = one(want, layer)
    np.testing.assert_array_equal(host(model(x, layers)), host(want))


@pytest.mark.parametrize("form", cases.FORMATS)
@IMPLEMENTATIONS
def test_no_tokens(form: str, implementation: str) -> None:
    cfg = cases.config(form, num_shared_experts=int(form in cases.FUSING))
    x, ids, factors = (array[:0] for array in cases.tokens(cfg, 1))
    for place in ({}, dict(mesh=cases.ep_mesh(8), axis="ep")):
        call = partial(mm.mega_moe, config=cfg, implementation=implementation, **place)
        y, counts = jax.jit(partial(call, return_stats=True))(x, ids, factors, cases.weights(cfg))
        assert y.shape == (0, cfg.hidden_size) and y.dtype == jnp.bfloat16
        assert counts.shape == (cfg.num_experts,) and counts.dtype == jnp.int32
        assert not np.asarray(counts).any()


def test_numpy_arrays_are_taken() -> None:
    cfg = cases.config("bf16")
    inputs = [np.asarray(array) for array in cases.tokens(cfg, TOKENS)]
    np.testing.assert_array_equal(
        host(mm.mega_moe(*inputs, cases.weights(cfg), config=cfg)), host(one_device(cfg)[0])
    )


def test_result_without_stats_is_y_alone() -> None:
    cfg = cases.config("bf16")
    y = mm.mega_moe(*cases.tokens(cfg, TOKENS), cases.weights(cfg), config=cfg)
    assert isinstance(y, jax.Array) and y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(host(y), host(one_device(cfg)[0]))


def test_traced_ids_out_of_range_are_unrouted() -> None:
    cfg = cases.config("mxfp8")
    x, ids, factors = cases.tokens(cfg, TOKENS)
    call = partial(mm.mega_moe, config=cfg, implementation="xla", return_stats=True)
    for place in ({}, dict(mesh=cases.ep_mesh(4), axis="ep")):
        run = jax.jit(partial(call, **place))
        y, counts = run(
            x, ids.at[0].set(16).at[1, 2].set(-7).at[2, 0].set(10**9), factors, cases.weights(cfg)
        )
        want = run(
            x, ids.at[0].set(-1).at[1, 2].set(-1).at[2, 0].set(-1), factors, cases.weights(cfg)
        )
        np.testing.assert_array_equal(host(y), host(want[0]))
        np.testing.assert_array_equal(counts, want[1])
        assert int(counts.sum()) == TOKENS * cfg.top_k - 6


def test_unfused_shared_expert_is_added_once() -> None:
    """Not once a rank, and to rows without experts too (vllm#37856)."""
    cfg = cases.config("mxfp8")
    x, ids, factors = cases.tokens(cfg, TOKENS)
    call = partial(mm.mega_moe, x, jnp.full_like(ids, -1), factors, cases.weights(cfg), config=cfg)
    for place in ({}, dict(mesh=cases.ep_mesh(4), axis="ep")):
        y = call(shared_experts=lambda x: 3 * x, **place)
        np.testing.assert_array_equal(host(y), host(3 * x))


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_fused_shared_expert_is_added_once_and_without_top_k_weight(num_ranks: int) -> None:
    """A token without routed experts gets the shared expert alone (kvcache-ai/sglang#86)."""
    cfg = cases.config("bf16", num_shared_experts=1)
    plain = cases.config("bf16", num_experts=1, top_k=1)
    shared = cases.float_matrices(cfg, gain=4.0)["shared"]
    alone = mm.quantize_experts(plain, *(part[None] for part in shared))
    x, ids, factors = cases.tokens(cfg, TOKENS)
    zeros, ones = jnp.zeros((TOKENS, 1), jnp.int32), jnp.ones((TOKENS, 1), jnp.float32)
    want = mm.mega_moe(x, zeros, ones, alone, config=plain, implementation="xla")
    place = dict(mesh=cases.ep_mesh(4), axis="ep") if num_ranks == 4 else {}
    call = partial(mm.mega_moe, config=cfg, implementation="xla", **place)
    y = call(x, jnp.full_like(ids, -1), factors, cases.weights(cfg))
    np.testing.assert_array_equal(host(y), host(want))


# Padding.


@pytest.mark.parametrize("form", cases.FORMATS)
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_padding_changes_no_bit_of_real_rows(form: str, num_ranks: int) -> None:
    cfg = cases.config(form, num_shared_experts=int(form in cases.FUSING))
    place = dict(mesh=cases.ep_mesh(4), axis="ep") if num_ranks == 4 else {}
    padded = np.arange(TOKENS) % 8 >= 5
    x, ids, factors = cases.tokens(cfg, TOKENS)
    for implementation in ("xla", "reference"):
        call = partial(mm.mega_moe, config=cfg, implementation=implementation, **place)
        run = jax.jit(partial(call, return_stats=True))
        want, want_counts = run(x, ids, factors, cases.weights(cfg), padding_mask=padded)
        expected = cases.counts_of(np.asarray(ids), padded, cfg.num_experts)
        np.testing.assert_array_equal(want_counts, expected)
        for garbage in (np.nan, 1e30, -np.inf):
            dirty = jnp.where(padded[:, None], jnp.bfloat16(garbage), x)
            y, counts = run(
                dirty,
                jnp.where(padded[:, None], 99, ids),
                jnp.where(padded[:, None], jnp.float32(garbage), factors),
                cases.weights(cfg),
                padding_mask=padded,
            )
            where = f"{implementation}, padding {garbage}"
            np.testing.assert_array_equal(host(y), host(want), where)
            assert not host(y)[padded].any(), where
            np.testing.assert_array_equal(counts, expected, where)


@pytest.mark.parametrize("form", cases.FORMATS)
def test_real_rows_are_those_of_a_call_without_padding(form: str) -> None:
    """32 rows, 8 real: as a call with 8 (vllm#50759)."""
    cfg = cases.config(form, num_shared_experts=int(form in cases.FUSING))
    x, ids, factors = cases.tokens(cfg, TOKENS)
    call = jax.jit(partial(mm.mega_moe, config=cfg, implementation="xla", return_stats=True))
    short, short_counts = call(x[:8], ids[:8], factors[:8], cases.weights(cfg))
    padded = np.arange(TOKENS) >= 8
    x = jnp.where(padded[:, None], jnp.bfloat16(jnp.nan), x)
    y, counts = call(x, ids, factors, cases.weights(cfg), padding_mask=padded)
    np.testing.assert_array_equal(host(y[:8]), host(short))
    np.testing.assert_array_equal(counts, short_counts)
    assert int(counts.sum()) == 8 * cfg.top_k


@pytest.mark.parametrize("form", cases.FORMATS)
@IMPLEMENTATIONS
def test_garbage_in_unrouted_rows_changes_no_bit_of_the_others(
    form: str, implementation: str
) -> None:
    """Ids -1 without a mask: row 3 is 0, whatever it holds."""
    cfg = cases.config(form)
    x, ids, factors = cases.tokens(cfg, TOKENS)
    ids = ids.at[3].set(-1)
    call = jax.jit(partial(mm.mega_moe, config=cfg, implementation=implementation))
    want = call(x, ids, factors, cases.weights(cfg))
    for garbage in (jnp.nan, 1e30):
        y = call(x.at[3].set(garbage), ids, factors, cases.weights(cfg))
        np.testing.assert_array_equal(host(y), host(want))
    assert not host(want)[3].any()


@pytest.mark.parametrize("form", cases.RECIPES)
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_nan_in_a_real_token_stays_in_that_token(form: str, num_ranks: int) -> None:
    cfg = cases.config(form, num_shared_experts=int(form in cases.FUSING))
    place = dict(mesh=cases.ep_mesh(4), axis="ep") if num_ranks == 4 else {}
    x, ids, factors = cases.tokens(cfg, TOKENS)
    others = np.arange(TOKENS) != 6
    for implementation in ("xla", "reference"):
        call = jax.jit(partial(mm.mega_moe, config=cfg, implementation=implementation, **place))
        want = host(call(x, ids, factors, cases.weights(cfg)))
        y = host(call(x.at[6, 40].set(jnp.nan), ids, factors, cases.weights(cfg)))
        np.testing.assert_array_equal(y[others], want[others], implementation)
        assert np.isnan(y[6]).all(), implementation


@pytest.mark.parametrize("form", cases.FORMATS)
def test_an_overflowing_expert_stays_in_its_tokens(form: str) -> None:
    """Weight 0 does not mask it, the id -1 does (TE#3494)."""
    cfg = cases.config(form)
    weights = cases.weights(cfg)
    x, ids, factors = cases.tokens(cfg, TOKENS)
    x = x.at[:4].set(3e38)
    ids = ids.at[0].set(-1)
    y = host(mm.mega_moe(x, ids, jnp.zeros_like(factors), weights, config=cfg))
    assert not y[0].any() and not y[4:].any()
    assert not np.isfinite(y[1:4]).all()
