"""A layer and a block in every mode that JAX has: the numbers are those without the mode."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

import jax_megamoe as mm

TOKENS = 8
SIZES = dict(num_experts=8, top_k=2, hidden_size=128, intermediate_size=128, max_num_tokens=TOKENS)
ROUTERS = {
    "softmax": mm.Router(num_experts=8, top_k=2, renormalize=True),
    "grouped": mm.Router(
        num_experts=8,
        top_k=2,
        scoring="sigmoid",
        num_groups=4,
        top_groups=2,
        has_correction_bias=True,
        renormalize=True,
    ),
    "hashed": mm.Router(num_experts=8, top_k=2, scoring="sqrtsoftplus", table_size=32),
    "topk_softmax": mm.Router(num_experts=8, top_k=2, scoring="topk_softmax", has_bias=True),
}

Run = Callable[[Callable[..., Any], Any], Any]


def jitted(function: Callable[..., Any], *arguments: Any) -> Any:
    return jax.jit(function)(*arguments)


def checked(function: Callable[..., Any], *arguments: Any) -> Any:
    """With every check that checkify has."""
    error, y = jax.jit(checkify.checkify(function, errors=checkify.all_checks))(*arguments)
    error.throw()
    return y


def guarded(function: Callable[..., Any], *arguments: Any) -> Any:
    """On arrays that are on the device, nothing goes to it or comes from it."""
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(*arguments))
    with jax.transfer_guard("disallow"):
        return jax.block_until_ready(compiled(*arguments))


def unchecked_ranks(function: Callable[..., Any], *arguments: Any) -> Any:
    """In a shard_map of the caller's that does not follow what varies."""
    mapped = jax.shard_map(
        function,
        mesh=cases.ep_mesh(1),
        in_specs=jax.tree.map(lambda _: P(), arguments),
        out_specs=P(),
        check_vma=False,
    )
    return jax.jit(mapped)(*arguments)


MODES: dict[str, tuple[Callable[[], Any], Run]] = {
    "x64": (lambda: jax.enable_x64(True), jitted),
    "strict promotion": (lambda: jax.numpy_dtype_promotion("strict"), jitted),
    "debug_nans": (lambda: jax.debug_nans(True), jitted),
    "debug_infs": (lambda: jax.debug_infs(True), jitted),
    "disable_jit": (jax.disable_jit, lambda function, *arguments: function(*arguments)),
    "disable_jit, debug_nans, debug_infs": (
        lambda: stacked(jax.disable_jit(), jax.debug_nans(True), jax.debug_infs(True)),
        lambda function, *arguments: function(*arguments),
    ),
    "checkify": (contextlib.nullcontext, checked),
    "transfer_guard": (contextlib.nullcontext, guarded),
    "no vma": (contextlib.nullcontext, unchecked_ranks),
}


@contextlib.contextmanager
def stacked(*contexts: Any) -> Any:
    with contextlib.ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


@functools.cache
def config(form: str) -> mm.MoEConfig:
    return mm.MoEConfig(weight_format=form, **SIZES)


def host(array: Any) -> np.ndarray:
    return np.asarray(array, np.float32)


def layer_call(form: str, implementation: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    graph, state = nnx.split(
        mm.MegaMoE(config(form), cases.weights(config(form)), implementation=implementation)
    )
    inputs = cases.tokens(config(form), TOKENS)
    return lambda state, *inputs: nnx.merge(graph, state)(*inputs), (state, *inputs)


def block_call(router: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Made in the mode, like its inputs."""
    settings = ROUTERS[router]
    block = mm.MegaMoEBlock(
        config("mxfp8"), settings, shared_size=192, rngs=nnx.Rngs(0), implementation="xla"
    )
    graph, state = nnx.split(block)
    x = jnp.asarray(cases.tokens(config("mxfp8"), TOKENS)[0])
    ids = jnp.arange(TOKENS, dtype=jnp.int32) if settings.table_size else None

    def call(state: Any, x: jax.Array) -> Any:
        return nnx.merge(graph, state)(x, token_ids=ids)

    return call, (state, x)


@functools.cache
def plain(kind: str, name: str) -> np.ndarray:
    function, arguments = block_call(name) if kind == "block" else layer_call(name, kind)
    return host(jax.jit(function)(*arguments))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ["nvfp4", "fp8_block"])
def test_layer(form: str, mode: str) -> None:
    for implementation in ("xla",) if "disable_jit" in mode else ("xla", "reference"):
        want = plain(implementation, form)
        context, run = MODES[mode]
        with context():
            function, arguments = layer_call(form, implementation)
            got = host(run(function, *arguments))
        cases.assert_agree(got, want, form, f"{implementation} in {mode}")


@pytest.mark.parametrize("mode", MODES)
def test_block(mode: str) -> None:
    # One operation at a time is slow.
    for router in ("grouped",) if "disable_jit" in mode else ROUTERS:
        want = plain("block", router)
        context, run = MODES[mode]
        with context():
            function, arguments = block_call(router)
            got = host(run(function, *arguments))
        cases.assert_agree(got, want, "mxfp8", f"{router} in {mode}")
