"""What is timed: our implementations, and layers that a JAX user has without this package."""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float32, Int32

from jax_megamoe.cli.gpu.models import Model
from jax_megamoe.config import MoEConfig
from jax_megamoe.launch import grouped
from jax_megamoe.op.mega_moe import mega_moe
from jax_megamoe.plan.refusal import Refusal
from jax_megamoe.runtime.devices import spec_of
from jax_megamoe.weights.drawn import random_experts
from jax_megamoe.weights.params import ExpertWeights
from jax_megamoe.weights.relayout import to_layout

IMPLEMENTATIONS = ("deep_gemm", "grouped", "xla")


class Prepared(NamedTuple):
    """A layer that can be called.

    Attributes:
        layer: f(x, ids, factors, parameters) -> y, to be traced.
        parameters: its pytree.
        weight_bytes: of one expert.
    """

    layer: Callable[..., Array]
    parameters: Any
    weight_bytes: float


Prepare = Callable[[Model, str, int], Prepared]
"""Makes a layer of a model in a recipe for up to so many tokens; raises where it cannot."""


def _ours(implementation: str, model: Model, recipe: str, num_tokens: int) -> Prepared:
    config = model.config(recipe, num_tokens)
    weights = random_experts(config, jax.random.key(0), has_biases=model.has_biases)
    if implementation == "grouped":
        spec = spec_of(jax.devices()[0], implementation="grouped")
        if isinstance(spec, Refusal):
            raise spec.error()
        layout = grouped.layout_of(config, spec.arch)
        if isinstance(layout, Refusal):
            raise layout.error()
        weights = to_layout(weights, layout)
    call = partial(mega_moe, config=config, implementation=implementation)
    return Prepared(call, jax.block_until_ready(weights), _bytes(weights) / config.num_experts)


def _bytes(weights: ExpertWeights) -> int:
    return sum(array.nbytes for name, array in weights.routed.arrays().items() if "_weight" in name)


def ragged_layer(
    x: BFloat16[Array, "tokens hidden"],
    ids: Int32[Array, "tokens top_k"],
    factors: Float32[Array, "tokens top_k"],
    matrices: tuple[Array, Array],
    ragged_dot: Callable[..., Array] = lax.ragged_dot,
) -> BFloat16[Array, "tokens hidden"]:
    """The layer in bfloat16 as a user writes it: sort by expert, two ragged products, add up.

    Args:
        x: the tokens.
        ids: their experts.
        factors: their top-k weights.
        matrices: w13 bfloat16 [E, H, 2I], gate first, and w2 [E, I, H].
        ragged_dot: f(rows, matrices, group_sizes).
    """
    w13, w2 = matrices
    (_, top_k), num_experts = ids.shape, w13.shape[0]
    order = jnp.argsort(ids.reshape(-1))
    token = order // top_k
    counts = jnp.bincount(ids.reshape(-1), length=num_experts).astype(jnp.int32)
    gate, up = jnp.split(ragged_dot(x[token], w13, counts), 2, axis=-1)
    out = ragged_dot(jax.nn.silu(gate) * up, w2, counts)
    weighted = out.astype(jnp.float32) * factors.reshape(-1)[order][:, None]
    return jnp.zeros(x.shape, jnp.float32).at[token].add(weighted).astype(x.dtype)


def _ragged(model: Model, recipe: str, num_tokens: int) -> Prepared:
    del recipe, num_tokens
    return Prepared(ragged_layer, _matrices(model), 2.0 * model.weights_of_an_expert)


def _tokamax(model: Model, recipe: str, num_tokens: int) -> Prepared:
    import tokamax  # noqa: PLC0415 (may be missing)  # pyright: ignore[reportMissingImports]

    del recipe, num_tokens
    layer = partial(ragged_layer, ragged_dot=tokamax.ragged_dot)
    return Prepared(layer, _matrices(model), 2.0 * model.weights_of_an_expert)


def _matrices(model: Model) -> tuple[Array, Array]:
    make = jax.jit(partial(random_matrices, model, model.num_experts))
    return jax.block_until_ready(make(jax.random.key(0)))


def random_matrices(sizes: Model | MoEConfig, num_experts: int, key: Array) -> tuple[Array, Array]:
    """w13 bfloat16 [E, H, 2I] and w2 [E, I, H], normal of variance 1 / fan-in, made an expert at a
    time."""
    hidden, inter = sizes.hidden_size, sizes.intermediate_size

    def one(key: Array) -> tuple[Array, Array]:
        first, second = jax.random.split(key)
        w13 = jax.random.normal(first, (hidden, 2 * inter), jnp.bfloat16)
        w2 = jax.random.normal(second, (inter, hidden), jnp.bfloat16)
        return w13 * jnp.bfloat16(hidden**-0.5), w2 * jnp.bfloat16(inter**-0.5)

    return lax.map(one, jax.random.split(key, num_experts))


OURS: dict[str, Prepare] = {name: partial(_ours, name) for name in IMPLEMENTATIONS}
"""Implementations, run in each recipe."""

PEERS: dict[str, Prepare] = {"ragged_dot": _ragged, "tokamax": _tokamax}
"""Layers in bfloat16 with plain SwiGLU and no biases, by the name of their product."""

_NEEDED = {"tokamax": "tokamax"}
"""The package that a peer needs."""


def peers() -> dict[str, Prepare]:
    """The ones with an installed package."""
    return {
        name: prepare
        for name, prepare in PEERS.items()
        if name not in _NEEDED or importlib.util.find_spec(_NEEDED[name]) is not None
    }
