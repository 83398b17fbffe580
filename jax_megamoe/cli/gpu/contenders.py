"""What is timed: our implementations, and layers that a JAX user has without this package."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float32, Int32

from jax_megamoe.cli.gpu.models import BF16_ROWS, Model
from jax_megamoe.config import MoEConfig
from jax_megamoe.formats import GROUPED_LAYOUTS, INTERLEAVE_8
from jax_megamoe.launch import grouped
from jax_megamoe.op.mega_moe import mega_moe
from jax_megamoe.plan.refusal import Refusal
from jax_megamoe.runtime.devices import spec_of
from jax_megamoe.weights.drawn import random_experts
from jax_megamoe.weights.params import ExpertWeights
from jax_megamoe.weights.regroup import to_grouped

IMPLEMENTATIONS = ("deep_gemm", "grouped", "xla")
OWN_KERNELS = ("deep_gemm", "grouped")
"""Those of a few launches, which XLA has nothing to compile of."""


class Prepared(NamedTuple):
    """A layer that can be called, and what makes its parameters; nothing is on the device yet.

    Attributes:
        layer: f(x, ids, factors, parameters) -> y, to be traced.
        make: f(key) -> parameters, a pytree, to be traced.
        weight_bytes: of one expert, by the parameters' shapes.
    """

    layer: Callable[..., Array]
    make: Callable[[Array], Any]
    weight_bytes: Callable[[Any], float]


Prepare = Callable[[Model, str, int], Prepared]
"""Prepares a layer of a model in a recipe for up to so many tokens; raises where it cannot."""


def _ours(implementation: str, model: Model, recipe: str, num_tokens: int) -> Prepared:
    config = model.config(recipe, num_tokens)
    layout = grouped_layout(config) if implementation == "grouped" else None
    call = partial(mega_moe, config=config, implementation=implementation)
    make = partial(random_weights, config, layout, has_biases=model.has_biases)
    return Prepared(call, make, _bytes)


def grouped_layout(config: MoEConfig) -> str:
    """The layout that the grouped products of the default device read.

    Raises:
        NotImplementedError: none of them runs the config there.
    """
    spec = spec_of(jax.devices()[0], implementation="grouped")
    if isinstance(spec, Refusal):
        raise spec.error()
    layout = grouped.layout_of(config, spec.arch)
    if isinstance(layout, Refusal):
        raise layout.error()
    return layout


def random_weights(
    config: MoEConfig, layout: str | None, key: Array, *, has_biases: bool = False
) -> ExpertWeights:
    """Random parameters, in the layout that is asked for or in the config's own."""
    if layout is not None and layout in GROUPED_LAYOUTS:
        drawn = random_experts(config, key, layout=INTERLEAVE_8, has_biases=has_biases)
        # Of random matrices one second scale each is exact, as `to_layout` finds where it may look.
        return to_grouped(drawn, layout, by_row=False)
    return random_experts(config, key, layout=layout, has_biases=has_biases)


def _bytes(weights: ExpertWeights) -> float:
    arrays = weights.routed.arrays()
    found = sum(a.size * a.dtype.itemsize for name, a in arrays.items() if "_weight" in name)
    return found / arrays["w13_weight"].shape[0]


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
    return _of_matrices(ragged_layer, model)


def _tokamax(model: Model, recipe: str, num_tokens: int) -> Prepared:
    import tokamax  # noqa: PLC0415 (may be missing)  # pyright: ignore[reportMissingImports]

    del recipe, num_tokens
    layer = partial(ragged_layer, ragged_dot=tokamax.ragged_dot)
    return _of_matrices(layer, model)


def _of_matrices(layer: Callable[..., Array], model: Model) -> Prepared:
    size = 2.0 * model.weights_of_an_expert
    return Prepared(layer, partial(random_matrices, model, model.num_experts), lambda _: size)


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

TORCH_PEERS = {
    "triton_kernels": (BF16_ROWS,),
    "humming": ("mxfp4_block", BF16_ROWS, "fp8_block"),
}
"""Recipes of the peers that need torch, each of which runs in a process of its own."""

Series = tuple[str, str]
"""Implementation or peer, and recipe."""

FIRST: tuple[Series, ...] = (
    ("grouped", "mxfp4_block"),
    ("humming", "mxfp4_block"),
    ("deep_gemm", "fp8_block"),
    ("grouped", "fp8_block"),
    ("humming", "fp8_block"),
    ("grouped", BF16_ROWS),
    ("humming", BF16_ROWS),
    ("triton_kernels", BF16_ROWS),
    ("deep_gemm", "mxfp4_block"),
    ("grouped", "bf16"),
    ("ragged_dot", "bf16"),
    ("tokamax", "bf16"),
)
"""What is timed first, should there be too little time for all."""


def peers() -> list[Series]:
    """Every peer in each of its recipes."""
    torch = [(name, recipe) for name, recipes in TORCH_PEERS.items() for recipe in recipes]
    return [*((name, "bf16") for name in PEERS), *torch]
