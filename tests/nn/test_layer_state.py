"""What moves a layer's arrays into another one: the same numbers afterwards, or an error.

Row orders of NVFP4 differ by machine, input scales and replica maps by layer: all are in the state.
"""

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cases
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_megamoe as mm

TOKENS = 16
CONFIG = cases.config("nvfp4")
ORDERS = ("sgl_fp4", "interleave8")


def layer(order: str, seed: int = 0, **options: Any) -> mm.MegaMoE:
    """A layer of one row order, with input scales of its own."""
    scales = np.random.default_rng(seed).uniform(0.02, 0.5, 16).astype(np.float32)
    parts = cases.float_matrices(CONFIG, seed, gain=4.0)["routed"]
    weights = mm.quantize_experts(CONFIG, *parts, w2_input_scale=jnp.asarray(scales))
    return mm.MegaMoE(CONFIG, mm.to_layout(weights, order), implementation="xla", **options)


def host(array: Any) -> np.ndarray:
    return np.asarray(array, np.float32)


def output(moe: mm.MegaMoE) -> np.ndarray:
    return host(moe(*cases.tokens(CONFIG, TOKENS)))


def by_update(source: mm.MegaMoE, target: mm.MegaMoE) -> mm.MegaMoE:
    nnx.update(target, nnx.state(source))
    return target


def by_pure_dict(source: mm.MegaMoE, target: mm.MegaMoE) -> mm.MegaMoE:
    state = nnx.state(target)
    nnx.replace_by_pure_dict(state, nnx.to_pure_dict(nnx.state(source)))
    nnx.update(target, state)
    return target


def by_msgpack(source: mm.MegaMoE, target: mm.MegaMoE) -> mm.MegaMoE:
    data = flax.serialization.msgpack_serialize(
        jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(source)))
    )
    state = nnx.state(target)
    restored = flax.serialization.msgpack_restore(data)
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, restored))
    nnx.update(target, state)
    return target


def by_pickle(source: mm.MegaMoE, target: mm.MegaMoE) -> mm.MegaMoE:
    state = pickle.loads(pickle.dumps(jax.tree.map(np.asarray, nnx.state(source))))
    nnx.update(target, jax.tree.map(jnp.asarray, state))
    return target


def by_leaves(source: mm.MegaMoE, target: mm.MegaMoE) -> mm.MegaMoE:
    """A tree of the target's structure with the source's leaves."""
    graph, state = nnx.split(target)
    leaves = jax.tree.leaves(nnx.split(source)[1])
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), leaves))


def by_tree_map(source: mm.MegaMoE, target: mm.MegaMoE) -> mm.MegaMoE:
    graph, state = nnx.split(target)
    return nnx.merge(graph, jax.tree.map(lambda _, new: new, state, nnx.split(source)[1]))


MOVES = (by_update, by_pure_dict, by_msgpack, by_pickle, by_leaves, by_tree_map)


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("order", ORDERS)
def test_arrays_of_either_order_move_into_a_layer_of_the_other(
    order: str, move: Callable[[mm.MegaMoE, mm.MegaMoE], mm.MegaMoE]
) -> None:
    (other,) = set(ORDERS) - {order}
    source, target = layer(order, seed=1), layer(other)
    want = output(source)
    assert cases.relative_error(output(target), want) > 0.1
    moved = move(source, target)
    np.testing.assert_array_equal(output(moved), want)
    assert moved.layout == order
    traced = nnx.jit(lambda moe, *inputs: moe(*inputs))(moved, *cases.tokens(CONFIG, TOKENS))
    np.testing.assert_array_equal(np.asarray(traced, np.float32), want)


def test_a_state_of_another_dtype_is_refused() -> None:
    target = mm.MegaMoE(cases.config("bf16"), cases.weights(cases.config("bf16")))
    nnx.update(target, jax.tree.map(lambda a: a.astype(jnp.float32), nnx.state(target)))
    message = r"expected dtypes and shapes of one .* \['interleave8'\], got w13_weight float32"
    with pytest.raises(ValueError, match=message):
        _ = target.weights


def test_tabulate() -> None:
    """Flax traces every public method for it: a table, and a layer that works as before."""
    cfg = cases.config("bf16")
    moe, inputs = mm.MegaMoE(cfg, cases.weights(cfg)), cases.tokens(cfg, TOKENS)
    want = np.asarray(moe(*inputs), np.float32)
    table = nnx.tabulate(moe, *inputs, console_kwargs=dict(width=200))
    assert "w13_weight: bfloat16" in table.replace("\x1b[2m", "").replace("\x1b[0m", "")
    router = mm.Router(num_experts=16, top_k=4)
    block = mm.MegaMoEBlock(cfg, router, shared_size=128, rngs=nnx.Rngs(0))
    table = nnx.tabulate(block, inputs[0], console_kwargs=dict(width=200))
    assert "MegaMoEBlock Summary" in table and "router" in table
    np.testing.assert_array_equal(np.asarray(moe(*inputs), np.float32), want)


def alone(state: dict[str, Any]) -> dict[str, Any]:
    return dict(w13_weight=state["routed"]["w13_weight"])


def test_orbax_restores_into_shapes_of_the_same_order(tmp_path: Path) -> None:
    """Onto more devices; the other order is refused."""
    mesh, sources = cases.ep_mesh(8), dict(sgl_fp4="sgl", interleave8="vllm")
    abstract: dict[str, mm.MegaMoE] = {}
    for order, source in sources.items():
        cfg = cases.config("nvfp4", kernel_source=source)
        make = partial(mm.MegaMoE, cfg, mesh=mesh, axis="ep", implementation="xla")
        abstract[order] = nnx.eval_shape(lambda make=make: make(rngs=nnx.Rngs(0)))
        assert abstract[order].layout == order
    for order, other in zip(ORDERS, ORDERS[::-1], strict=True):
        source, state = layer(order, seed=1), nnx.state(abstract[order])
        saved = nnx.to_pure_dict(nnx.state(source))
        # Orbax abandons reads that run when it refuses an array; a lone array has none.
        other_state = nnx.to_pure_dict(nnx.state(abstract[other]))
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / order, saved)
            checkpointer.save(tmp_path / f"{order}_alone", alone(saved))
        with ocp.StandardCheckpointer() as checkpointer:
            with pytest.raises(ValueError, match="shape"):
                checkpointer.restore(tmp_path / f"{order}_alone", alone(other_state))
            restored = checkpointer.restore(tmp_path / order, nnx.to_pure_dict(state))
        nnx.replace_by_pure_dict(state, restored)
        nnx.update(abstract[order], state)
        np.testing.assert_array_equal(output(abstract[order]), output(source))


def test_a_stack_of_layers_with_their_own_input_scales_is_compiled_once() -> None:
    layers = [layer("interleave8", seed) for seed in range(3)]
    inputs = cases.tokens(CONFIG, TOKENS)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(moe.weights for moe in layers))
    traces = []

    @jax.jit
    def model(x: jax.Array, weights: mm.ExpertWeights) -> jax.Array:
        def step(x: jax.Array, one: mm.ExpertWeights) -> tuple[jax.Array, None]:
            traces.append(1)
            return mm.mega_moe(x, *inputs[1:], one, config=CONFIG, implementation="xla"), None

        return jax.lax.scan(step, x, weights)[0]

    want = inputs[0]
    for moe in layers:
        want = moe(want, *inputs[1:])
    got = np.asarray(model(inputs[0], stacked), np.float32)
    np.testing.assert_array_equal(got, np.asarray(want, np.float32))
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("form", "source"),
    [
        *((form, None) for form in cases.FORMATS if form != "nvfp4"),
        ("nvfp4", "sgl"),
        ("nvfp4", "vllm"),
    ],
)
def test_a_stack_is_restored_onto_a_mesh_and_scanned(
    form: str, source: str | None, tmp_path: Path
) -> None:
    """Shapes, a checkpoint of layers on one device, a mesh of eight: the same numbers."""
    cfg, mesh = cases.config(form, kernel_source=source), cases.ep_mesh(8)
    inputs, traces = cases.tokens(cfg, TOKENS), []

    def made(**options: Any) -> mm.MegaMoE:
        return mm.MegaMoE(cfg, implementation="xla", **options)

    def weights(seed: int) -> mm.ExpertWeights:
        scales = None
        if form == "nvfp4":
            drawn = np.random.default_rng(seed).uniform(0.02, 0.5, 16)
            scales = jnp.asarray(drawn, jnp.float32)
        parts = cases.float_matrices(cfg, seed, gain=4.0)["routed"]
        return mm.quantize_experts(cfg, *parts, w2_input_scale=scales)

    layers = [made(weights=weights(seed)) for seed in range(2)]
    states = [nnx.to_pure_dict(nnx.state(moe)) for moe in layers]
    with ocp.StandardCheckpointer() as checkpointer:
        stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
        checkpointer.save(tmp_path / "stack", stack)
    abstract = nnx.eval_shape(lambda: made(mesh=mesh, axis="ep", rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    rows = NamedSharding(mesh, P(None, "ep"))
    wanted = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype, sharding=rows),
        nnx.to_pure_dict(state),
    )
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "stack", wanted)
    nnx.replace_by_pure_dict(state, restored)

    @jax.jit
    def model(x: jax.Array, state: nnx.State) -> jax.Array:
        def step(x: jax.Array, one: nnx.State) -> tuple[jax.Array, None]:
            traces.append(1)
            return nnx.merge(graph, one)(x, *inputs[1:]), None

        return jax.lax.scan(step, x, state)[0]

    want = inputs[0]
    for moe in layers:
        want = moe(want, *inputs[1:])
    np.testing.assert_array_equal(host(model(inputs[0], state)), host(want))
    assert len(traces) == 1
    for leaf in jax.tree.leaves(state):
        assert leaf.sharding.is_equivalent_to(rows, leaf.ndim)
