"""Layer and block over 8 devices: where tokens and parameters are, and how many of them."""

import functools
import operator
import subprocess
import sys
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_megamoe as mm

TOKENS = 32
KINDS = pytest.mark.parametrize(
    "kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)


def host(array: Any) -> np.ndarray:
    return np.asarray(array, np.float32)


def grid(data: int, ep: int, kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((data, ep), ("data", "ep"), axis_types=(kind,) * 2)


def block(**options: Any) -> mm.MegaMoEBlock:
    """Softmax router, 16 experts, an unfused shared expert."""
    cfg = cases.config("mxfp8", max_num_tokens=TOKENS)
    router = mm.Router(num_experts=16, top_k=4, renormalize=True)
    defaults = dict(shared_size=192, rngs=nnx.Rngs(0), implementation="xla")
    return mm.MegaMoEBlock(cfg, router, **(defaults | options))


@functools.cache
def single() -> mm.MegaMoEBlock:
    return block()


def x_of(num_tokens: int) -> jax.Array:
    rng = np.random.default_rng(7)
    return jnp.asarray(rng.standard_normal((num_tokens, 256)), jnp.bfloat16)


def jitted(moe: Any, *inputs: Any, **options: Any) -> Any:
    return nnx.jit(lambda moe, inputs: moe(*inputs, **options))(moe, inputs)


# Tokens over several axes.


@KINDS
@pytest.mark.parametrize(("data", "ep"), [(2, 4), (4, 2), (8, 1)])
def test_each_data_group_works_on_its_own_tokens(data: int, ep: int, kind: AxisType) -> None:
    cfg, mesh = cases.config("mxfp4", num_shared_experts=1), grid(data, ep, kind)
    inputs, weights = cases.tokens(cfg, TOKENS), cases.weights(cfg)
    moe = mm.MegaMoE(
        cfg, weights, mesh=mesh, axis="ep", token_axes=("data", "ep"), implementation="xla"
    )
    want, counts = mm.mega_moe(
        *inputs, weights, config=cfg, implementation="xla", return_stats=True
    )
    rows = NamedSharding(mesh, P(("data", "ep")))
    spread = [jax.device_put(array, rows) for array in inputs]
    graph, state = nnx.split(moe)
    call = jax.jit(lambda state, *inputs: nnx.merge(graph, state)(*inputs, return_stats=True))
    compiled = call.lower(state, *spread).compile()
    text = compiled.as_text()
    assert "all-gather" not in text
    assert ("all-to-all" in text) == (ep > 1)
    y, got_counts = compiled(state, *spread)
    np.testing.assert_array_equal(host(y), host(want))
    np.testing.assert_array_equal(got_counts, counts)
    assert y.sharding.is_equivalent_to(rows, 2)
    # No device has more rows than its share: the rows of x in the program.
    assert f"bf16[{TOKENS // 8},256]" in text and f"bf16[{TOKENS},256]" not in text


@KINDS
def test_gradients_of_tokens_over_several_axes(kind: AxisType) -> None:
    cfg = cases.config("mxfp8")
    inputs, weights = cases.tokens(cfg, TOKENS), cases.weights(cfg)

    def loss(x: jax.Array, factors: jax.Array, **place: Any) -> jax.Array:
        y = mm.mega_moe(x, inputs[1], factors, weights, config=cfg, implementation="xla", **place)
        return (y.astype(jnp.float32) ** 2).sum()

    want = jax.grad(loss, (0, 1))(inputs[0], inputs[2])
    place = dict(mesh=grid(2, 4, kind), axis="ep", token_axes=("data", "ep"))
    got = jax.jit(jax.grad(functools.partial(loss, **place), (0, 1)))(inputs[0], inputs[2])
    for a, b in zip(got, want, strict=True):
        assert cases.relative_error(host(a), host(b)) < 1e-3


@KINDS
def test_a_block_with_tokens_over_several_axes(kind: AxisType) -> None:
    spread = block(mesh=grid(2, 4, kind), axis="ep", token_axes=("data", "ep"))
    x = x_of(TOKENS).reshape(4, 8, 256)
    np.testing.assert_array_equal(host(jitted(spread, x)), host(jitted(single(), x)))


@pytest.mark.parametrize("given", ["mesh", "axis"])
@KINDS
def test_inside_shard_map_over_a_data_axis(kind: AxisType, given: str) -> None:
    """The caller's data parallelism; the layer's mesh is the one outside."""
    cfg, mesh = cases.config("mxfp8"), grid(2, 4, kind)
    weights, inputs = cases.weights(cfg), cases.tokens(cfg, TOKENS)
    place = dict(axis="ep") if given == "axis" else dict(mesh=mesh, axis="ep")
    call = functools.partial(mm.mega_moe, config=cfg, implementation="xla", **place)
    split = jax.device_put(inputs, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        weights = jax.device_put(weights, NamedSharding(mesh, P()))
        specs = dict(in_specs=(*[P("data")] * 3, P()), out_specs=P("data"), axis_names={"data"})
        y = jax.jit(jax.shard_map(call, **specs))(*split, weights)
    want = mm.mega_moe(*inputs, cases.weights(cfg), config=cfg, implementation="xla")
    np.testing.assert_array_equal(host(y), host(want))


@pytest.mark.parametrize(
    "kinds", [(AxisType.Explicit, AxisType.Auto), (AxisType.Auto, AxisType.Explicit)]
)
def test_a_mesh_with_axes_of_both_kinds(kinds: tuple[AxisType, AxisType]) -> None:
    cfg = cases.config("mxfp8")
    mesh = jax.make_mesh((2, 4), ("data", "ep"), axis_types=kinds)
    weights, inputs = cases.weights(cfg), cases.tokens(cfg, TOKENS)
    want = mm.mega_moe(*inputs, weights, config=cfg, implementation="xla")
    call = functools.partial(mm.mega_moe, config=cfg, implementation="xla", mesh=mesh)
    for options in (dict(axis="ep", token_axes=("data", "ep")), dict(axis=("data", "ep"))):
        np.testing.assert_array_equal(host(call(*inputs, weights, **options)), host(want))


# Any batch.


@KINDS
@pytest.mark.parametrize("num_tokens", [0, 1, 4, 27])
def test_any_number_of_tokens(num_tokens: int, kind: AxisType) -> None:
    """Layer and block, with stats, a mask, a function as shared expert, and a captured routing."""
    cfg = cases.config("mxfp8", num_logical_experts=12)
    weights = cases.weights(cfg)
    inputs = cases.tokens(cfg, num_tokens)
    options: dict[str, Any] = dict(
        return_stats=True,
        shared_experts=lambda x: x + x,
        padding_mask=jnp.arange(num_tokens) % 5 == 4,
    )
    heard: list[np.ndarray] = []
    spread, alone = (
        mm.MegaMoE(cfg, weights, implementation="xla", **place)
        for place in (dict(mesh=cases.ep_mesh(8, kind), axis="ep"), {})
    )
    with mm.capture_routing(lambda name, ids, mask: heard.append(ids)):
        y, counts = jitted(spread, *inputs, **options)
        jax.block_until_ready(y)
    want, want_counts = alone(*inputs, **options)
    np.testing.assert_array_equal(host(y), host(want))
    assert counts.sum() == want_counts.sum()
    (ids,) = heard
    np.testing.assert_array_equal(ids, inputs[1])
    x = x_of(num_tokens)
    both = block(mesh=cases.ep_mesh(8, kind), axis="ep")
    y, routing = jitted(both, x, return_routing=True)
    want, want_routing = jitted(single(), x, return_routing=True)
    np.testing.assert_array_equal(host(y), host(want))
    np.testing.assert_array_equal(routing.topk_ids, want_routing.topk_ids)


def test_gradients_of_a_padded_batch() -> None:
    spread = block(mesh=cases.ep_mesh(8), axis="ep")

    def loss(moe: mm.MegaMoEBlock, x: jax.Array) -> jax.Array:
        return (moe(x).astype(jnp.float32) ** 2).sum()

    x = x_of(5)
    got, want = (nnx.grad(loss, argnums=1)(moe, x) for moe in (spread, single()))
    assert cases.relative_error(host(got), host(want)) < 2e-3


# The current mesh.


@KINDS
def test_the_current_mesh_counts_when_a_layer_is_made(kind: AxisType) -> None:
    cfg, mesh = cases.config("mxfp4", num_shared_experts=1), cases.ep_mesh(8, kind)
    inputs = cases.tokens(cfg, TOKENS)
    want = mm.MegaMoE(cfg, rngs=nnx.Rngs(0), implementation="xla")
    with jax.set_mesh(mesh):
        moe = mm.MegaMoE(cfg, rngs=nnx.Rngs(0), axis="ep", implementation="xla")
        abstract = nnx.eval_shape(
            lambda: mm.MegaMoE(cfg, rngs=nnx.Rngs(0), axis="ep", implementation="xla")
        )
        y = jitted(moe, *inputs)
    for name, array in moe.weights.arrays().items():
        spec = P() if name.startswith("shared.") else P("ep")
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim), name
        np.testing.assert_array_equal(array, want.weights.arrays()[name], name)
        leaf = operator.attrgetter(name)(abstract).get_value()
        assert (leaf.shape, leaf.dtype) == (array.shape, array.dtype)
        assert leaf.sharding.is_equivalent_to(NamedSharding(leaf.sharding.mesh, spec), leaf.ndim)
    np.testing.assert_array_equal(host(y), host(jitted(want, *inputs)))


@KINDS
def test_the_current_mesh_counts_when_a_block_is_made(kind: AxisType) -> None:
    x = x_of(TOKENS)
    with jax.set_mesh(cases.ep_mesh(8, kind)):
        spread = block(axis="ep")
        y = jitted(spread, x)
    np.testing.assert_array_equal(host(y), host(jitted(single(), x)))
    assert len(spread.experts.weights.routed.w13_weight.sharding.device_set) == 8
    assert len(spread.router.weight.get_value().sharding.device_set) == 8


@KINDS
def test_a_fused_shared_expert_is_drawn_on_every_device(kind: AxisType) -> None:
    """Of a mesh that is given, not the current one."""
    cfg, mesh = cases.config("bf16", num_shared_experts=1), cases.ep_mesh(8, kind)
    want = mm.MegaMoE(cfg, rngs=nnx.Rngs(0)).weights.shared
    got = mm.MegaMoE(cfg, rngs=nnx.Rngs(0), mesh=mesh, axis="ep").weights.shared
    assert want is not None and got is not None
    for name, array in got.arrays().items():
        np.testing.assert_array_equal(host(array), host(want.arrays()[name]), name)
        assert array.sharding.is_fully_replicated and len(array.sharding.device_set) == 8


PEAK = """
import resource
import jax
jax.config.update("jax_num_cpu_devices", 8)
from flax import nnx
import jax_megamoe as mm

def make(num_experts):
    config = mm.MoEConfig(num_experts=num_experts, top_k=2, hidden_size=1024,
                          intermediate_size=1024, max_num_tokens=8, weight_format="bf16")
    mesh = jax.make_mesh((8,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        return mm.MegaMoE(config, axis="ep", rngs=nnx.Rngs(0), implementation="xla")

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

make(8)  # what compiling costs
before = peak()
moe = make(64)
jax.block_until_ready(moe.weights)
print(moe.weights.num_bytes, peak() - before)
"""


def test_nothing_is_on_one_device_first() -> None:
    """384 MiB of parameters; through one device first they would be there twice."""
    out = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    num_bytes, grown = map(int, out.stdout.split())
    assert num_bytes == 64 * 3 * 1024 * 1024 * 2
    assert grown < 1.5 * num_bytes, f"{grown / num_bytes:.2f} times the parameters"


# Frozen experts.


@pytest.mark.parametrize("form", cases.FORMATS)
def test_gradients_and_optimisers_leave_experts_alone(form: str) -> None:
    """A step of adamw with weight decay, over every parameter that Flax trains by default."""
    cfg = cases.config(form, num_experts=8, top_k=2, max_num_tokens=TOKENS)
    router = mm.Router(num_experts=8, top_k=2)
    moe = mm.MegaMoEBlock(cfg, router, shared_size=192, rngs=nnx.Rngs(0), implementation="xla")
    # optax's bias correction mixes a float and an int.
    with jax.numpy_dtype_promotion("standard"):
        optimizer = nnx.Optimizer(moe, optax.adamw(1e-2, weight_decay=0.1), wrt=nnx.Param)
    before = jax.tree.map(np.asarray, nnx.state(moe))

    def loss(moe: mm.MegaMoEBlock, x: jax.Array) -> jax.Array:
        return (moe(x).astype(jnp.float32) ** 2).mean()

    grads = nnx.jit(nnx.grad(loss))(moe, x_of(8))
    with jax.numpy_dtype_promotion("standard"):
        optimizer.update(moe, grads)
    after = nnx.to_flat_state(nnx.state(moe))
    for (path, new), (_, old) in zip(after, nnx.to_flat_state(before), strict=True):
        same = np.array_equal(np.asarray(new.get_value()), np.asarray(old.get_value()))
        assert same == (path[0] == "experts"), path


# What is not there.


def test_a_layer_without_arrays_says_so() -> None:
    cfg = cases.config("bf16")
    abstract = nnx.eval_shape(lambda: mm.MegaMoE(cfg, rngs=nnx.Rngs(0)))
    message = r"^the layer's parameters: expected arrays: call load\(\), .*, got shapes alone"
    with pytest.raises(ValueError, match=message):
        abstract(*cases.tokens(cfg, 8))
    traced = nnx.jit(lambda x: abstract(x, *cases.tokens(cfg, 8)[1:]))
    with pytest.raises(ValueError, match=message):
        traced(cases.tokens(cfg, 8)[0])


def test_a_layer_whose_arrays_were_donated_says_so() -> None:
    cfg = cases.config("bf16")
    moe = mm.MegaMoE(cfg, rngs=nnx.Rngs(0))
    jax.jit(lambda state: state, donate_argnums=0)(nnx.split(moe)[1])
    message = "^the layer's parameters: expected arrays, got deleted or donated ones; keep the"
    with pytest.raises(ValueError, match=message):
        moe(*cases.tokens(cfg, 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(token_axes="data"), r"token_axes: expected distinct axes with .*\['ep'\] among"),
        (dict(token_axes=("ep", "ep")), "token_axes: expected distinct axes with"),
        (dict(token_axes=("ep", "tp")), r"token_axes: expected one of \['data', 'ep'\], got"),
        (dict(token_axes=()), r"token_axes: expected one of \['data', 'ep'\], got \(\)"),
        (dict(axis=None, token_axes="ep", mesh=None), "axis: expected the expert-parallel axis"),
    ],
)
def test_token_axes_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    cfg = cases.config("bf16")
    defaults = dict(mesh=grid(2, 4), axis="ep")
    with pytest.raises(ValueError, match=f"^{message}"):
        mm.mega_moe(
            *cases.tokens(cfg, TOKENS), cases.weights(cfg), config=cfg, **(defaults | options)
        )


def test_tokens_over_axes_that_are_not_named() -> None:
    cfg, mesh = cases.config("bf16"), grid(2, 4)
    rows = NamedSharding(mesh, P(("data", "ep")))
    x, ids, factors = (jax.device_put(a, rows) for a in cases.tokens(cfg, TOKENS))
    message = r"^x: expected split over \['ep'\] .*; name the axes in token_axes="
    with pytest.raises(ValueError, match=message):
        mm.mega_moe(x, ids, factors, cases.weights(cfg), config=cfg, mesh=mesh, axis="ep")
