"""Layers of the grouped implementation: cases, operands, and what comes out of them."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

import jax_megamoe as mm
from jax_megamoe.formats import RECIPES as BY_NAME
from jax_megamoe.numerics import expert
from jax_megamoe.numerics.tokens import quantize_tokens
from jax_megamoe.plan.grouped.call import GroupedLayer
from jax_megamoe.plan.grouped.rules import layout_of
from jax_megamoe.weights.drawn import random_experts
from jax_megamoe.weights.experts import dequantize_experts
from jax_megamoe.weights.layout import w13_from_kernel
from jax_megamoe.weights.params import ExpertWeights
from jax_megamoe.weights.regroup import to_grouped

RECIPES = (
    ("fp8_block", "fp8_block"),
    ("mxfp4", "fp8_block"),
    ("mxfp4", "bf16"),
    ("mxfp4", "mxfp8"),
    ("mxfp8", "mxfp8"),
    ("mxfp8", "bf16"),
    ("nvfp4", "nvfp4"),
    ("nvfp4", "bf16"),
    ("bf16", "bf16"),
)
"""Weight formats and activation formats that the products have on Hopper."""

ERROR = {"bf16": 5e-3, "mxfp8": 1.2e-2, "fp8_block": 1.6e-2, "nvfp4": 5e-2}
"""Relative error of a layer against `expected`, by activation format.

The products' results are BF16 (2^-9), gate's and up's as in `expected`, up to the order of sums:
where that or the tensor core's own rounding moves a value over a boundary of its format, its code
changes. Biases are added after that rounding, and the sum is rounded once more: 0.011 of MXFP8 and
0.009 of fp8_block with exact sums (tests/emulator). Nvfp4 rounds gate and up before and after a
token's scale: an error d moves a code of step s with probability d / s, rms sqrt(d s) =
sqrt(2^-9 2^-1) = 0.03."""


def case(weights: str, activations: str, num_tokens: int, **changes: Any) -> GroupedLayer:
    """A small layer for an H200."""
    fields: dict[str, Any] = dict(
        arch=90,
        num_sms=132,
        num_tokens=num_tokens,
        top_k=4,
        num_experts=16,
        num_logical=16,
        hidden_size=512,
        intermediate_size=384,
        weights=weights,
        activations=activations,
        weighs_in_combine=activations == "nvfp4",
    )
    return GroupedLayer(**(fields | changes))


def _config(each: GroupedLayer) -> mm.MoEConfig:
    return mm.MoEConfig(
        num_experts=each.num_experts,
        top_k=each.top_k,
        hidden_size=each.hidden_size,
        intermediate_size=each.intermediate_size,
        max_num_tokens=max(1, each.num_tokens),
        weight_format=each.weights,
    )


def stored_weights(each: GroupedLayer, seed: int = 0) -> ExpertWeights:
    """Random parameters in a mega kernel's layout, biases included where the case has them."""
    weights = random_experts(_config(each), jax.random.key(seed))
    if each.biases:
        first, second = jax.random.split(jax.random.key(seed + 1))
        shape = (each.num_experts, 2 * each.intermediate_size)
        weights = weights.with_routed(
            w13_bias=jax.random.normal(first, shape, jnp.float32),
            w2_bias=jax.random.normal(second, (shape[0], each.hidden_size), jnp.float32),
        )
    return weights


def described(each: GroupedLayer, grouped: ExpertWeights) -> GroupedLayer:
    """The case with what its parameters say of second scales."""
    scales = (grouped.routed.w13_weight_scale_2, grouped.routed.w2_weight_scale_2)
    kinds = ("none" if s is None else "tensor" if s.ndim == 1 else "channel" for s in scales)
    return replace(each, second_scales=tuple(kinds))


def grouped_weights(
    each: GroupedLayer, stored: ExpertWeights, by_row: bool | None = None
) -> ExpertWeights:
    """The parameters as the products read them."""
    layout = layout_of(each.weights, each.activations)
    return stored if layout == stored.layout else to_grouped(stored, layout, by_row=by_row)


def parameters(each: GroupedLayer, grouped: ExpertWeights) -> dict[str, Array]:
    """The parameters by operand; NVFP4's second inputs are scaled by 0.25."""
    arrays = grouped.routed.arrays()
    if each.activations == "nvfp4":
        arrays["w2_weight_scale_2"] = grouped.routed.w2_weight_scale_2 * 0.25
        arrays["w2_input_scale"] = jnp.full(1, 0.25, jnp.float32)
    return arrays


def tokens(each: GroupedLayer, seed: int = 1) -> dict[str, Array]:
    """Normal tokens and a random routing, distinct in a token, with a few slots that go nowhere."""
    first, second, third = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(first, (each.num_tokens, each.hidden_size), jnp.bfloat16)
    logits = jax.random.normal(second, (each.num_tokens, each.num_logical))
    factors, ids = lax.top_k(jax.nn.softmax(logits), each.top_k)
    routed = jax.random.uniform(third, ids.shape) > 0.1
    factors = (factors / factors.sum(-1, keepdims=True)).astype(jnp.float32)
    return {
        "x": x,
        "topk_ids": jnp.where(routed, ids, -1).astype(jnp.int32),
        "topk_weights": factors,
    }


def expected(
    each: GroupedLayer, stored: ExpertWeights, call: dict[str, Array], rows: int = 0
) -> np.ndarray:
    """The layer with exact sums, rounding where the recipe does: float32 [T, H].

    Args:
        rows: tokens that are computed, so that several cases share a compilation; 0: as many as
            there are.
    """
    padding = [(0, max(0, rows - each.num_tokens)), (0, 0)]
    padded = {
        name: jnp.pad(array, padding, constant_values=-1 if name == "topk_ids" else 0)
        for name, array in call.items()
    }
    halves = None
    if stored.routed.w13_bias is not None:
        halves = jnp.split(
            w13_from_kernel(stored.routed.w13_bias, stored.layout, axis=-1), 2, axis=-1
        )
    return np.asarray(_exact(replace(each, num_tokens=0), stored, halves, padded))[
        : each.num_tokens
    ]


@partial(jax.jit, static_argnums=0)
def _exact(
    each: GroupedLayer, stored: ExpertWeights, biases: list[Array] | None, call: dict[str, Array]
) -> Array:
    scale = jnp.float32(0.25) if each.activations == "nvfp4" else None
    recipe = BY_NAME[each.activations]
    activation = mm.Activation(each.activation, clamp=each.clamp, alpha=each.alpha, beta=each.beta)
    plain = stored.with_routed(w13_bias=None, w2_bias=None)
    gate, up, down = dequantize_experts(_config(each), plain)
    quantised = quantize_tokens(call["x"], recipe)
    x = quantised.decoded().astype(jnp.float32)
    if quantised.token_scale is not None:
        x = x * quantised.token_scale[:, None]
    ids, factors = call["topk_ids"], call["topk_weights"]
    product = partial(jnp.matmul, precision=lax.Precision.HIGHEST)

    def one(slots: Array, e: Array) -> tuple[Array, None]:
        here = ids == e
        factor = jnp.sum(jnp.where(here, factors, 0), axis=1, keepdims=True)
        g, u = product(x, gate[e].T), product(x, up[e].T)
        if biases is not None:
            g, u = g + biases[0][e][None], u + biases[1][e][None]
        if each.rounds:
            g, u = expert.round_bf16(g), expert.round_bf16(u)
        act = expert.activate(g, u, activation)
        weight = None if each.weighs_in_combine else factor
        act = expert.second_input(act, weight, recipe, scale)
        y = product(act.astype(jnp.float32), down[e].T)
        y = y if scale is None else y * scale
        if stored.routed.w2_bias is not None:
            y = y + stored.routed.w2_bias[e][None] * (1 if each.weighs_in_combine else factor)
        return jnp.where(here[..., None], expert.round_bf16(y)[:, None], slots), None

    empty = jnp.zeros((*ids.shape, each.hidden_size), jnp.float32)
    slots = lax.scan(one, empty, jnp.arange(each.num_experts))[0]
    return (slots * factors[..., None] if each.weighs_in_combine else slots).sum(axis=1)
