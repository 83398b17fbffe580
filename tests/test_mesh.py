"""Public functions of arrays that are split over 8 devices: the same numbers, split likewise, and
in the compiled program no collective where no device needs what another has."""

import re
from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_megamoe as mm
from jax_megamoe.mesh import default_device, device_of
from jax_megamoe.nn import storage

TOKENS = 32
KINDS = pytest.mark.parametrize(
    "kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)
COLLECTIVE = r"\b(all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)(?:-start)?\("
ROWS = P("ep")
EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


def mesh_of(kind: AxisType) -> Mesh:
    return cases.ep_mesh(8, kind)


def split(tree: Any, mesh: Mesh, spec: P = ROWS) -> Any:
    return jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, spec)), tree)


def as_loaded(weights: mm.ExpertWeights, mesh: Mesh) -> mm.ExpertWeights:
    """Split as `load_experts` splits them."""
    return cases.sharded(weights, weights.partition_specs("ep"), mesh)


def assert_same(got: Any, want: Any, mesh: Mesh, spec: P = ROWS) -> None:
    """Equal arrays, split over the mesh as said."""
    wanted = NamedSharding(mesh, spec)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a, b.dtype), b)
        assert a.sharding.is_equivalent_to(wanted, a.ndim), a.sharding


def check(
    function: Callable[..., Any], arguments: Any, want: Any, mesh: Mesh, collectives: str = ""
) -> None:
    """Called as it is; over Explicit axes jitted too, with no other collectives than these."""
    assert_same(function(*arguments), want, mesh)
    if AxisType.Explicit not in mesh.axis_types:
        return  # a trace does not know how arrays are split
    compiled = jax.jit(function).lower(*arguments).compile()
    assert_same(compiled(*arguments), want, mesh)
    assert set(re.findall(COLLECTIVE, compiled.as_text())) == set(collectives.split())


@pytest.mark.parametrize(
    ("form", "kind"), [*((form, EXPLICIT) for form in cases.FORMATS), ("nvfp4", AUTO)]
)
def test_matrices_of_split_experts_and_back(form: str, kind: AxisType) -> None:
    cfg, mesh = cases.config(form), mesh_of(kind)
    parts = cases.float_matrices(cfg)["routed"]
    want = mm.quantize_experts(cfg, *parts)
    check(lambda *parts: mm.quantize_experts(cfg, *parts), split(parts, mesh), want, mesh)
    floats = mm.dequantize_experts(cfg, want)
    check(lambda w: mm.dequantize_experts(cfg, w), [as_loaded(want, mesh)], floats, mesh)


@KINDS
def test_replicas_biases_and_input_scales_are_split_as_the_matrices(kind: AxisType) -> None:
    """Replicas are copies of other devices' experts: one gather."""
    cfg, mesh = cases.config("nvfp4", num_logical_experts=8), mesh_of(kind)
    rng = np.random.default_rng(0)
    parts = [part[:8] for part in cases.float_matrices(cfg)["routed"]]
    sizes = (cfg.intermediate_size, cfg.intermediate_size, cfg.hidden_size)
    biases = tuple(rng.standard_normal((8, size)).astype(np.float32) for size in sizes)
    more = dict(biases=biases, w2_input_scale=np.linspace(0.1, 1, 8, dtype=np.float32))

    def quantize(*parts: jax.Array) -> mm.ExpertWeights:
        return mm.quantize_experts(cfg, *parts, **more)

    check(quantize, split(parts, mesh), quantize(*parts), mesh, "all-gather")


@pytest.mark.parametrize(
    ("form", "layout", "kind"),
    [
        ("nvfp4", "interleave8", EXPLICIT),
        ("nvfp4", "interleave8", AUTO),
        ("nvfp4", "flashinfer_nvfp4", EXPLICIT),
        ("mxfp4", "flashinfer_mxfp4", EXPLICIT),
        ("mxfp8", "humming_bf16", EXPLICIT),
    ],
)
def test_layouts_of_split_experts(form: str, layout: str, kind: AxisType) -> None:
    cfg, mesh = cases.config(form), mesh_of(kind)
    weights = cases.weights(cfg, biased=True)
    there = mm.to_layout(weights, layout)
    back = mm.to_layout(there, weights.layout)
    check(lambda w: mm.to_layout(w, layout), [as_loaded(weights, mesh)], there, mesh)
    check(lambda w: mm.to_layout(w, weights.layout), [as_loaded(there, mesh)], back, mesh)


@pytest.mark.parametrize(("form", "kind"), [("mxfp8", EXPLICIT), ("bf16", AUTO)])
def test_folded_biases_of_split_experts(form: str, kind: AxisType) -> None:
    cfg, mesh = cases.config(form), mesh_of(kind)
    weights = cases.filled_up(cfg, 224)
    folded = mm.fold_biases(cfg, weights)
    check(lambda w: mm.fold_biases(cfg, w), [as_loaded(weights, mesh)], folded, mesh)
    plain = mm.unfold_biases(folded)
    check(mm.unfold_biases, [as_loaded(folded, mesh)], plain, mesh)


@KINDS
@pytest.mark.parametrize("rows", [ROWS, P()], ids=["split", "whole"])
def test_einsums_of_split_experts(rows: P, kind: AxisType) -> None:
    """The experts stay; tokens go everywhere and outputs are added up."""
    cfg, mesh = cases.config("nvfp4", num_shared_experts=1), mesh_of(kind)
    tokens, weights = cases.tokens(cfg, TOKENS), cases.weights(cfg)
    mask = jnp.arange(TOKENS) % 7 == 3

    def einsum(w: mm.ExpertWeights, mask: jax.Array, *tokens: jax.Array) -> jax.Array:
        return mm.einsum_moe(*tokens, w, config=cfg, padding_mask=mask)

    want = einsum(weights, mask, *tokens)
    given = (as_loaded(weights, mesh), *split((mask, *tokens), mesh, rows))
    assert_same(einsum(*given), want, mesh, rows)
    if kind != AxisType.Explicit:
        return
    compiled = jax.jit(einsum).lower(*given).compile()
    assert_same(compiled(*given), want, mesh, rows)
    text = compiled.as_text()
    assert f"u8[16,{cfg.hidden_size}" not in text and f"f32[16,{cfg.hidden_size}" not in text
    gathers = {"all-gather"} if rows == ROWS else set()
    assert set(re.findall(COLLECTIVE, text)) == {"all-reduce", *gathers}


def test_gradients_of_einsums_of_split_experts() -> None:
    cfg, mesh = cases.config("mxfp8"), mesh_of(EXPLICIT)
    (x, ids, factors), weights = cases.tokens(cfg, TOKENS), cases.weights(cfg)

    def loss(x: jax.Array, factors: jax.Array, ids: jax.Array, w: mm.ExpertWeights) -> jax.Array:
        return (mm.einsum_moe(x, ids, factors, w, config=cfg).astype(jnp.float32) ** 2).sum()

    want = jax.grad(loss, (0, 1))(x, factors, ids, weights)
    given = (*split((x, factors, ids), mesh), as_loaded(weights, mesh))
    assert_same(jax.jit(jax.grad(loss, (0, 1)))(*given), want, mesh)


@pytest.mark.parametrize(("groups", "kind"), [(4, EXPLICIT), (1, AUTO)])
def test_routers_of_split_tokens(groups: int, kind: AxisType) -> None:
    router = mm.Router(
        num_experts=16,
        top_k=4,
        scoring="sigmoid",
        num_groups=groups,
        top_groups=min(groups, 2),
        has_correction_bias=True,
    )
    rng, mesh = np.random.default_rng(0), mesh_of(kind)
    weight = jnp.asarray(rng.standard_normal((16, 256)), jnp.bfloat16)
    params = mm.RouterParams(weight, correction_bias=jnp.zeros(16, jnp.float32))
    x = jnp.asarray(rng.standard_normal((TOKENS, 256)), jnp.bfloat16)
    want = jax.jit(lambda x: mm.route(x, params, router))(x)
    check(lambda x: mm.route(x, params, router), [split(x, mesh)], want, mesh)


def test_the_default_device_is_jaxs() -> None:
    """Of calls, layers and formats alike; an abstract mesh has none of its own."""
    devices = jax.devices()
    mesh = Mesh(np.array(devices[3:5]), ("ep",))
    for named, device in ((devices[5], devices[5]), ("cpu", devices[0]), (None, devices[0])):
        with jax.default_device(named):
            assert default_device() is device
            assert device_of(None) is device_of(mesh.abstract_mesh) is device
            assert device_of(mesh) is devices[3]


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_layers_recipe_is_of_its_device(
    ranks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, asked = jax.devices(), []
    mesh = None if ranks is None else Mesh(np.array(devices[3 : 3 + ranks]), ("ep",))
    monkeypatch.setattr(storage, "in_recipe_with_kernel", lambda *args: asked.append(args[1:]))
    with jax.default_device(devices[5]):
        storage.config_in_place(cases.config("mxfp4"), mesh, mesh and "ep", False)
    assert asked == [(devices[5], 1) if ranks is None else (devices[3], ranks)]


@KINDS
def test_counts_of_split_tokens(kind: AxisType) -> None:
    """Stats and loads, which every device gets whole."""
    cfg, mesh = cases.config("mxfp8", num_logical_experts=12), mesh_of(kind)
    tokens, weights = cases.tokens(cfg, TOKENS), cases.weights(cfg)
    stats = mm.moe_stats(split(tokens[1], mesh), config=cfg, num_ranks=8)
    want = mm.moe_stats(tokens[1], config=cfg, num_ranks=8)
    jax.tree.map(np.testing.assert_array_equal, stats, want)
    _, counts = mm.mega_moe(
        *split(tokens, mesh),
        as_loaded(weights, mesh),
        config=cfg,
        mesh=mesh,
        axis="ep",
        implementation="xla",
        return_stats=True,
    )
    replicas = mm.replica_map(np.arange(16) % 12, 12)
    loads = mm.record_loads(jnp.zeros(12, jnp.float32), counts, replicas)
    np.testing.assert_array_equal(loads, want.tokens_per_logical_expert)
