"""block.py: `MegaMoEBlock` in one piece, over devices, under transformations of Flax and JAX."""

import functools
import logging
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers_cases
from flax import nnx
from jax.sharding import AxisType
from transformers_cases import CASES

import jax_megamoe as mm

TOKENS = 32
BY_NAME = {case.name: case for case in CASES}
KINDS = pytest.mark.parametrize(
    "kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)


def block_of(name: str, form: str, **options: Any) -> mm.MegaMoEBlock:
    """A block of a case, with drawn parameters."""
    case = BY_NAME[name]
    return mm.MegaMoEBlock.from_config(
        case.hf_config,
        layer_index=case.layer_index,
        max_num_tokens=TOKENS,
        weight_format=form,
        **(dict(rngs=nnx.Rngs(0)) | options),
    )


@functools.cache
def drawn(name: str, form: str) -> mm.MegaMoEBlock:
    """`block_of`, made once; its parameters are not to be changed."""
    return block_of(name, form)


def jitted(block: mm.MegaMoEBlock, **inputs: Any) -> Any:
    """(y, routing) of a compiled call."""
    call = nnx.jit(lambda block, inputs: block(**inputs, return_routing=True))
    return call(block, inputs)


def tokens(block: mm.MegaMoEBlock, num_tokens: int = TOKENS) -> dict[str, Any]:
    """x, and token ids where the router takes them."""
    rng = np.random.default_rng(7)
    x = jnp.asarray(rng.standard_normal((num_tokens, block.hidden_size)), jnp.bfloat16)
    size = block.router.settings.table_size
    ids = jnp.asarray(rng.integers(0, size, num_tokens), jnp.int32) if size else None
    return dict(x=x, token_ids=ids)


def host(array: Any) -> np.ndarray:
    return np.asarray(array, np.float32)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("deepseek_v3", "bf16"),
        ("deepseek_v3", "fp8_block"),
        ("deepseek_v4_hashed", "mxfp8"),
        ("qwen3_next", "mxfp4"),
        ("gpt_oss", "bf16"),
    ],
)
def test_is_its_parts(name: str, form: str) -> None:
    """`route`, then `mega_moe` with the shared expert added."""
    block = drawn(name, form)
    inputs = tokens(block)
    x, token_ids = inputs["x"], inputs["token_ids"]
    routing = mm.route(x, block.router.params, block.router.settings, token_ids=token_ids)
    missing = block.config.hidden_size - block.hidden_size
    wide = jnp.pad(x, ((0, 0), (0, missing)))
    shared = block.shared_expert
    want, want_counts = mm.mega_moe(
        wide,
        *routing,
        block.experts.weights,
        config=block.config,
        shared_experts=None if shared is None else shared,
        return_stats=True,
    )
    y, counts, got = block(**inputs, return_stats=True, return_routing=True)
    np.testing.assert_array_equal(host(y), host(want)[:, : block.hidden_size])
    np.testing.assert_array_equal(counts, want_counts)
    for a, b in zip(got, routing, strict=True):
        np.testing.assert_array_equal(a, b)
    fuses = name == "deepseek_v3" and form == "bf16"
    assert (block.experts.weights.shared is not None) == fuses
    assert (shared is not None) == (not fuses and name != "gpt_oss")


@KINDS
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("deepseek_v3", "fp8_block"),
        ("deepseek_v4_hashed", "mxfp8"),
        ("qwen3_next", "bf16"),
        ("llama4", "bf16"),
    ],
)
def test_over_eight_devices(name: str, form: str, kind: AxisType) -> None:
    single = drawn(name, form)
    spread = block_of(name, form, mesh=cases.ep_mesh(8, kind), axis="ep")
    inputs = tokens(single) | dict(padding_mask=jnp.arange(TOKENS) % 5 == 0)
    (y, routing), (want, want_routing) = jitted(spread, **inputs), jitted(single, **inputs)
    np.testing.assert_array_equal(host(y), host(want))
    np.testing.assert_array_equal(routing.topk_ids, want_routing.topk_ids)
    assert not host(y)[::5].any()


def test_inside_the_callers_shard_map() -> None:
    single = drawn("qwen3_next", "bf16")
    inputs = tokens(single)
    mesh = cases.ep_mesh(4)
    block = block_of("qwen3_next", "bf16", axis="ep")
    graph, state = nnx.split(block)
    specs = jax.tree_util.tree_map_with_path(
        lambda path, _: jax.P("ep") if "experts" in str(path[0]) else jax.P(), state
    )
    call = jax.shard_map(
        lambda state, x: nnx.merge(graph, state)(x),
        mesh=mesh,
        in_specs=(specs, jax.P("ep")),
        out_specs=jax.P("ep"),
    )
    y, want = jax.jit(call)(state, inputs["x"]), jitted(single, **inputs)[0]
    np.testing.assert_array_equal(host(y), host(want))


def test_batch_dimensions() -> None:
    block = drawn("deepseek_v4_hashed", "bf16")
    inputs = tokens(block) | dict(padding_mask=jnp.arange(TOKENS) % 3 == 0)
    batched = {name: array.reshape(2, 16, *array.shape[1:]) for name, array in inputs.items()}
    y, _ = jitted(block, **batched)
    assert y.shape == (2, 16, block.hidden_size)
    want = jitted(block, **inputs)[0]
    np.testing.assert_array_equal(host(y).reshape(TOKENS, -1), host(want))


def test_padding_has_no_effect() -> None:
    block = drawn("qwen3_next", "fp8_block")
    x, mask = tokens(block)["x"], jnp.arange(TOKENS) >= 20
    dirty = x.at[20:].set(jnp.nan).at[25:].set(1e30)
    got, want = (host(jitted(block, x=each, padding_mask=mask)[0]) for each in (dirty, x))
    np.testing.assert_array_equal(got, want)
    assert not got[20:].any() and got[:20].any(axis=1).all()


def test_no_tokens() -> None:
    block = drawn("qwen3_next", "bf16")
    assert block(jnp.zeros((0, 256), jnp.bfloat16)).shape == (0, 256)


def test_split_merge_and_one_compile_for_two_layers() -> None:
    case = BY_NAME["deepseek_v3"]
    block = block_of("deepseek_v3", "fp8_block", mesh=cases.ep_mesh(8), axis="ep", rngs=None)
    other = block_of("deepseek_v3", "fp8_block", mesh=cases.ep_mesh(8), axis="ep")
    traces = []

    @nnx.jit
    def call(block: mm.MegaMoEBlock, x: jax.Array, mask: jax.Array) -> jax.Array:
        traces.append(1)
        return block(x, padding_mask=mask)

    x = tokens(block)["x"]
    block.load(transformers_cases.checkpoint(case), 1)
    outputs = [call(block, x, jnp.arange(TOKENS) >= real) for real in (32, 7, 0)]
    random = call(other, x, jnp.zeros(TOKENS, bool))
    block.load(transformers_cases.checkpoint(case), 1)
    again = call(block, x, jnp.zeros(TOKENS, bool))
    assert len(traces) == 1
    np.testing.assert_array_equal(host(again), host(outputs[0]))
    assert (host(random) != host(again)).mean() > 0.9
    graph, state = nnx.split(block)
    merged = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x)
    np.testing.assert_array_equal(host(merged), host(again))


def test_shared_expert_and_router_do_not_wait_for_each_other() -> None:
    """No value of the shared expert is computed from the router's or the experts', nor the other
    way round."""
    block = drawn("qwen3_next", "bf16")
    graph, state = nnx.split(block)
    jaxpr = jax.make_jaxpr(lambda state, x: nnx.merge(graph, state)(x))(state, tokens(block)["x"])
    scopes: dict[Any, set[str]] = {}
    seen: set[str] = set()
    for eqn in jaxpr.eqns:
        stack = str(eqn.source_info.name_stack)
        own = {scope for scope in ("router", "shared") if f"mega_moe_block/{scope}" in stack}
        if eqn.primitive.name in ("jit", "pjit") and not own:
            own = {"experts"}
        seen |= own
        before = {
            scope
            for var in eqn.invars
            if not hasattr(var, "val")
            for scope in scopes.get(var, set())
        }
        if "shared" in own:
            assert before <= {"shared"}, eqn
        if own & {"router", "experts"}:
            assert "shared" not in before, eqn
        for var in eqn.outvars:
            scopes[var] = before | own
    assert seen == {"router", "shared", "experts"}
    assert scopes[jaxpr.jaxpr.outvars[0]] == seen


def test_named_scopes_reach_the_compiled_program() -> None:
    block = drawn("qwen3_next", "bf16")
    graph, state = nnx.split(block)
    call = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    text = call.lower(state, tokens(block)["x"]).compile().as_text()
    for scope in ("mega_moe_block/router", "mega_moe_block/shared", "mega_moe/staging"):
        assert scope in text, scope


def test_gradients_reach_x_the_router_and_the_shared_expert() -> None:
    """And nothing that a padded row holds reaches them."""
    block = block_of("qwen3_next", "bf16", implementation="xla")
    graph, floats, rest = nnx.split(block, nnx.Param, ...)

    def loss(floats: Any, x: jax.Array) -> jax.Array:
        y = nnx.merge(graph, floats, rest)(x, padding_mask=jnp.arange(TOKENS) == 5)
        return (y.astype(jnp.float32) ** 2).sum()

    dirty = tokens(block)["x"].at[5].set(jnp.nan)
    grads, dx = jax.grad(loss, (0, 1))(floats, dirty)
    for grad in [*jax.tree.leaves(grads), dx]:
        assert np.isfinite(host(grad)).all() and host(grad).any()
    assert {path[-1] for path, _ in nnx.to_flat_state(grads)} == {
        "weight",
        "gate_proj",
        "up_proj",
        "down_proj",
        "output_gate",
    }


def test_routing_is_captured_under_the_calls_name() -> None:
    block = drawn("deepseek_v3", "bf16")
    heard: list[tuple[str, np.ndarray]] = []

    def hear(name: str, ids: np.ndarray, mask: np.ndarray | None) -> None:
        assert mask is None
        heard.append((name, ids))

    with mm.capture_routing(hear):
        _, routing = block(**tokens(block), name="layer 3", return_routing=True)
    ((name, ids),) = heard
    assert name == "layer 3"
    np.testing.assert_array_equal(ids, routing.topk_ids)


def test_replicas_hold_logical_experts() -> None:
    """20 physical experts of 16: the router knows 16, the output is the same."""
    plain = block_of("deepseek_v3", "mxfp8", rngs=None)
    replicated = block_of("deepseek_v3", "mxfp8", rngs=None, num_experts=20)
    checkpoint = transformers_cases.checkpoint(BY_NAME["deepseek_v3"])
    for block in (plain, replicated):
        block.load(checkpoint, 1)
    assert replicated.config.logical_experts == replicated.router.settings.num_experts == 16
    inputs = tokens(plain)
    np.testing.assert_array_equal(host(replicated(**inputs)), host(plain(**inputs)))
    eplb = mm.replica_map(np.arange(20) % 16, 16)
    y, counts = replicated(**inputs, eplb=eplb, return_stats=True)
    assert counts.shape == (20,) and int(counts.sum()) == TOKENS * 4
    np.testing.assert_array_equal(host(y), host(plain(**inputs)))


@pytest.mark.parametrize(
    ("form", "changes", "reason"),
    [
        ("fp8_block", {}, "fp8_block kernels fuse none"),
        ("mxfp8", dict(has_shared_gate=True), "a gate weighs its output"),
        ("mxfp8", dict(shared_size=192), "its size 192 is no multiple of intermediate_size 128"),
        ("mxfp8", dict(stored_sizes=(250, 128)), "the model's sizes are rounded up"),
        (
            "mxfp4",
            dict(shared_stored="bf16"),
            "it is stored as bf16, and mxfp4 kernels would fuse it as mxfp8",
        ),
        ("nvfp4", dict(kernel_source="sgl"), "sgl's nvfp4 kernel fuses none"),
    ],
)
def test_says_why_a_shared_expert_is_not_fused(
    form: str, changes: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    changes = dict(changes)
    source = changes.pop("kernel_source", None)
    cfg = cases.config(form, kernel_source=source, max_num_tokens=len(reason))
    router = mm.Router(num_experts=16, top_k=4)
    with caplog.at_level(logging.INFO, "jax_megamoe"):
        for _ in range(2):
            block = nnx.eval_shape(
                lambda: mm.MegaMoEBlock(
                    cfg, router, **(dict(shared_size=128) | changes), rngs=nnx.Rngs(0)
                )
            )
    assert block.shared_expert is not None and block.config.num_shared_experts == 0
    lines = [record.getMessage() for record in caplog.records if "unfused" in record.getMessage()]
    assert len(lines) == 1 and lines[0].endswith(f"adds its shared expert unfused: {reason}")


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                dict(router=dict(num_experts=8)),
                "router num_experts: expected 16, the config's, got 8",
            ),
            (dict(router=dict(top_k=2)), "router top_k: expected 4, the config's, got 2"),
            (
                dict(stored_sizes=(300, 128)),
                "stored_sizes hidden_size: expected at most config.hidden_size = 256, got 300",
            ),
            (
                dict(has_shared_gate=True),
                "has_shared_gate: expected False where there is no shared expert, got True",
            ),
            (dict(shared_size=-1), "shared_size: expected an integer >= 0, got -1"),
            (
                dict(num_shared_experts=2, shared_size=128),
                "shared_size: expected 256, the config's 2 experts, got 128",
            ),
        ],
    )
    def test_sizes(self, options: dict[str, Any], message: str) -> None:
        options = dict(options)
        shared = options.pop("num_shared_experts", 0)
        settings = dict(num_experts=16, top_k=4) | options.pop("router", {})
        cfg = cases.config("bf16", num_shared_experts=shared)
        with pytest.raises(ValueError, match=message):
            mm.MegaMoEBlock(cfg, mm.Router(**settings), **options, rngs=nnx.Rngs(0))

    def test_ranks(self) -> None:
        message = "num_experts: expected a multiple of the 3 expert-parallel ranks, got 16"
        with pytest.raises(ValueError, match=message):
            block_of("qwen3_moe", "bf16", mesh=cases.ep_mesh(3), axis="ep")

    @pytest.mark.parametrize(
        ("inputs", "kind", "message"),
        [
            (
                dict(x=jnp.zeros((4, 128), jnp.bfloat16)),
                ValueError,
                r"x: expected shape \[batch, 256\], got shape \[4, 128\]",
            ),
            (dict(x=jnp.zeros((4, 256))), TypeError, "x: expected dtype bfloat16"),
            (dict(x=jnp.zeros((33, 256), jnp.bfloat16)), ValueError, "max_num_tokens = 32, got 33"),
            (
                dict(x=jnp.zeros((4, 256), jnp.bfloat16), padding_mask=jnp.zeros((2, 2), bool)),
                ValueError,
                r"padding_mask: expected shape \[4\], got shape \[2, 2\]",
            ),
            (
                dict(x=jnp.zeros((4, 256), jnp.bfloat16), token_ids=jnp.zeros(4, jnp.int32)),
                ValueError,
                "token_ids: expected None: this router has no table",
            ),
        ],
    )
    def test_calls(self, inputs: dict[str, Any], kind: type[Exception], message: str) -> None:
        with pytest.raises(kind, match=message):
            drawn("qwen3_moe", "bf16")(**inputs)

    def test_not_loaded(self) -> None:
        block = block_of("qwen3_moe", "bf16", rngs=None)
        message = r"the router's parameters: expected arrays: call load\(\), put a state in, or"
        with pytest.raises(ValueError, match=message):
            block(jnp.zeros((4, 256), jnp.bfloat16))
