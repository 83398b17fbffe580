"""layer.py: `MegaMoE` as an nnx module."""

import operator
from pathlib import Path
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_megamoe as mm
from jax_megamoe.weights.params import parameter_shapes

TOKENS = 32
KINDS = pytest.mark.parametrize(
    "kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)


def host(array: Any) -> np.ndarray:
    return np.asarray(array, np.float32)


def layer(cfg: mm.MoEConfig, num_ranks: int = 1, kind: AxisType = AxisType.Auto) -> mm.MegaMoE:
    place = {} if num_ranks == 1 else dict(mesh=cases.ep_mesh(num_ranks, kind), axis="ep")
    return mm.MegaMoE(cfg, cases.weights(cfg), implementation="xla", **place)


def expected(cfg: mm.MoEConfig) -> np.ndarray:
    inputs = cases.tokens(cfg, TOKENS)
    return host(mm.mega_moe(*inputs, cases.weights(cfg), config=cfg, implementation="xla"))


@pytest.mark.parametrize("form", cases.FORMATS)
@KINDS
def test_forwards_to_mega_moe(form: str, kind: AxisType) -> None:
    cfg = cases.config(form, num_shared_experts=int(form in cases.FUSING))
    moe = layer(cfg, 4, kind)
    y = nnx.jit(lambda moe, *inputs: moe(*inputs))(moe, *cases.tokens(cfg, TOKENS))
    np.testing.assert_array_equal(host(y), expected(cfg))


def test_passes_every_argument() -> None:
    cfg = cases.config("mxfp8", num_logical_experts=12)
    weights, inputs = cases.weights(cfg), cases.tokens(cfg, TOKENS)
    options = dict(
        padding_mask=jnp.arange(TOKENS) % 3 == 0,
        eplb=mm.replica_map(np.arange(16) % 12, 12),
        shared_experts=lambda x: x + x,
        return_stats=True,
    )
    y, counts = mm.MegaMoE(cfg, weights)(*inputs, **options)
    want, want_counts = mm.mega_moe(*inputs, weights, config=cfg, **options)
    np.testing.assert_array_equal(host(y), host(want))
    np.testing.assert_array_equal(counts, want_counts)


@KINDS
def test_parameters_are_params_sharded_over_the_axis(kind: AxisType) -> None:
    cfg = cases.config("nvfp4", num_shared_experts=1)
    moe = layer(cfg, 4, kind)
    assert not nnx.to_flat_state(nnx.state(moe, nnx.Param))
    params = nnx.state(moe, mm.ExpertVariable)
    held = {".".join(path): leaf for path, leaf in nnx.to_flat_state(params)}
    shapes = parameter_shapes(cfg).arrays()
    assert set(held) == set(shapes) and "shared.w2_weight" in held
    for name, param in held.items():
        array = param[...]
        assert isinstance(operator.attrgetter(name)(moe), mm.ExpertVariable)
        assert (array.shape, array.dtype) == (shapes[name].shape, shapes[name].dtype)
        spec = P() if name.startswith("shared.") else P("ep")
        wanted = NamedSharding(moe.mesh, spec)
        assert array.sharding.is_equivalent_to(wanted, array.ndim), f"{name}: {array.sharding}"
    assert moe.weights.num_bytes == cases.weights(cfg).num_bytes


def test_split_and_merge_under_jit() -> None:
    cfg = cases.config("mxfp4", num_shared_experts=1)
    graph, state = nnx.split(layer(cfg, 4))
    call = jax.jit(lambda state, *inputs: nnx.merge(graph, state)(*inputs))
    np.testing.assert_array_equal(host(call(state, *cases.tokens(cfg, TOKENS))), expected(cfg))


def test_update_puts_other_parameters_in_without_a_retrace() -> None:
    cfg = cases.config("mxfp8")
    first, second = layer(cfg), mm.MegaMoE(cfg, rngs=nnx.Rngs(0), implementation="xla")
    traces = []

    @nnx.jit
    def call(moe: mm.MegaMoE, *inputs: jax.Array) -> jax.Array:
        traces.append(1)
        return moe(*inputs)

    inputs = cases.tokens(cfg, TOKENS)
    want = call(second, *inputs)
    call(first, *inputs)
    nnx.update(first, nnx.state(second))
    np.testing.assert_array_equal(host(call(first, *inputs)), host(want))
    assert len(traces) == 1


@pytest.mark.parametrize("form", ["bf16", "mxfp4", "nvfp4"])
def test_orbax_saves_and_restores_onto_a_mesh(form: str, tmp_path: Path) -> None:
    cfg = cases.config(form, num_shared_experts=1)
    moe = layer(cfg, 4)
    saved = nnx.state(moe)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.to_pure_dict(saved))
    mesh = cases.ep_mesh(8)
    abstract = nnx.eval_shape(lambda: mm.MegaMoE(cfg, rngs=nnx.Rngs(0), mesh=mesh, axis="ep"))
    target = nnx.to_pure_dict(nnx.state(abstract))
    with ocp.StandardCheckpointer() as checkpointer:
        loaded = checkpointer.restore(tmp_path / "state", target)
    again = mm.MegaMoE(cfg, rngs=nnx.Rngs(5), mesh=mesh, axis="ep", implementation="xla")
    state = nnx.state(again)
    nnx.replace_by_pure_dict(state, loaded)
    nnx.update(again, state)
    for name, array in again.weights.arrays().items():
        np.testing.assert_array_equal(array, moe.weights.arrays()[name], name)
        spec = P() if name.startswith("shared.") else P("ep")
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim), name
    np.testing.assert_array_equal(host(again(*cases.tokens(cfg, TOKENS))), expected(cfg))


@pytest.mark.parametrize("form", cases.FORMATS)
def test_abstract_construction_makes_no_arrays(form: str) -> None:
    """2.6 TB of parameters in bfloat16, on a mesh."""
    cfg = mm.MoEConfig(
        num_experts=4096,
        top_k=8,
        hidden_size=8192,
        intermediate_size=8192,
        max_num_tokens=64,
        weight_format=form,
    )
    mesh = cases.ep_mesh(8)
    abstract = nnx.eval_shape(lambda: mm.MegaMoE(cfg, rngs=nnx.Rngs(0), mesh=mesh, axis="ep"))
    shapes = parameter_shapes(cfg).routed.arrays()
    held = abstract.routed.matrices(lambda variable: variable).arrays()
    assert set(held) == set(shapes) and abstract.shared is None
    for name, param in held.items():
        leaf = param.get_value()
        assert isinstance(leaf, jax.ShapeDtypeStruct), name
        assert (leaf.shape, leaf.dtype) == (shapes[name].shape, shapes[name].dtype)
        assert leaf.sharding is not None and leaf.sharding.spec == P("ep"), f"{name}: {leaf}"


def test_rngs_draw_parameters_of_unit_gain() -> None:
    cfg = cases.config("bf16", num_shared_experts=2)
    moe = mm.MegaMoE(cfg, rngs=nnx.Rngs(0))
    gate, up, down = mm.dequantize_experts(cfg, moe.weights)
    for part in (gate, up, down):
        np.testing.assert_allclose(part.std() * part.shape[-1] ** 0.5, 1, rtol=0.02)
        assert abs(float(jnp.corrcoef(part[0].ravel(), part[1].ravel())[0, 1])) < 0.05
    assert moe.weights.shared is not None
    same = mm.MegaMoE(cfg, rngs=nnx.Rngs(0)).weights
    other = mm.MegaMoE(cfg, rngs=nnx.Rngs(1)).weights
    np.testing.assert_array_equal(same.routed.w2_weight, moe.weights.routed.w2_weight)
    assert (
        np.asarray(other.routed.w2_weight) != np.asarray(moe.weights.routed.w2_weight)
    ).mean() > 0.9


def test_replicas_of_drawn_parameters_are_alike() -> None:
    cfg = cases.config("mxfp4", num_logical_experts=12)
    weights = mm.MegaMoE(cfg, rngs=nnx.Rngs(0)).weights
    for name, array in weights.arrays().items():
        np.testing.assert_array_equal(array[12:], array[:4], name)


@KINDS
def test_no_parameter_is_gathered_and_a_second_call_does_not_retrace(kind: AxisType) -> None:
    cfg = cases.config("mxfp4", num_shared_experts=1)
    moe = layer(cfg, 8, kind)
    traces = []

    @nnx.jit
    def call(moe: mm.MegaMoE, *inputs: jax.Array) -> jax.Array:
        traces.append(1)
        return moe(*inputs)

    rows = NamedSharding(moe.mesh, P("ep"))
    inputs = [jax.device_put(array, rows) for array in cases.tokens(cfg, TOKENS)]
    graph, state = nnx.split(moe)
    pure = jax.jit(lambda state, *inputs: nnx.merge(graph, state)(*inputs))
    text = pure.lower(state, *inputs).compile().as_text()
    assert "all-to-all" in text and "all-gather" not in text
    first = call(moe, *inputs)
    second = call(moe, *inputs)
    np.testing.assert_array_equal(host(first), host(second))
    assert len(traces) == 1
    assert first.sharding.is_equivalent_to(rows, 2)


class TestErrors:
    def test_neither_weights_nor_rngs(self) -> None:
        message = r"weights: expected an ExpertWeights, or rngs to draw them, got None"
        with pytest.raises(ValueError, match=message):
            mm.MegaMoE(cases.config("bf16"))

    def test_weights_of_another_format(self) -> None:
        message = r"weights.format: expected 'bf16' \(config.weight_format\), got 'mxfp8'"
        with pytest.raises(ValueError, match=message):
            mm.MegaMoE(cases.config("bf16"), cases.weights(cases.config("mxfp8")))

    def test_mesh_without_axis(self) -> None:
        cfg = cases.config("bf16")
        message = r"axis: expected the expert-parallel axis of the mesh, got None"
        with pytest.raises(ValueError, match=message):
            mm.MegaMoE(cfg, cases.weights(cfg), mesh=cases.ep_mesh(4))

    def test_axis_that_the_mesh_has_not(self) -> None:
        cfg = cases.config("bf16")
        message = r"axis: expected one of \['ep'\], got 'tp'"
        with pytest.raises(ValueError, match=message):
            mm.MegaMoE(cfg, cases.weights(cfg), mesh=cases.ep_mesh(4), axis="tp")

    def test_experts_that_do_not_divide(self) -> None:
        cfg = cases.config("bf16", num_experts=18)
        message = r"num_experts: expected a multiple of the 4 expert-parallel ranks, got 18"
        with pytest.raises(ValueError, match=message):
            mm.MegaMoE(cfg, cases.weights(cfg), mesh=cases.ep_mesh(4), axis="ep")
