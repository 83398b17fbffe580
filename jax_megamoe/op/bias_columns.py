"""Folded biases in a call: a constant in the tokens' columns, the second biases after the combine.

`weights/folded_biases.py` says what the columns of w13 hold. All implementations add the second
biases alike: to the layer's output in BF16, as the kernels leave it, in float32; the sum is rounded
to BF16 once more. Biases that are not folded are added to each expert's output before that is
rounded: the same numbers but for roundings to BF16.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float32, Int32

from jax_megamoe.mesh import Axis
from jax_megamoe.numerics import expert
from jax_megamoe.plan.folding import COLUMNS, CONSTANTS
from jax_megamoe.weights.params import ExpertWeights


def with_constant(
    x: BFloat16[Array, "tokens hidden"], weights: ExpertWeights
) -> BFloat16[Array, "tokens hidden"]:
    """Tokens with the constant in the columns of the folded biases, whatever was there."""
    return _with(x, weights, CONSTANTS[weights.format])


def without_constant(
    of_x: BFloat16[Array, "tokens hidden"], weights: ExpertWeights
) -> BFloat16[Array, "tokens hidden"]:
    """The gradient of tokens from that of `with_constant`'s: 0 in the columns."""
    return _with(of_x, weights, 0.0)


def _with(rows: Array, weights: ExpertWeights, value: float) -> Array:
    return rows.at[:, -COLUMNS[weights.format] :].set(jnp.asarray(value, rows.dtype))


def plus_second(
    y: BFloat16[Array, "tokens hidden"],
    topk_ids: Int32[Array, "tokens top_k"],
    topk_weights: Float32[Array, "tokens top_k"],
    weights: ExpertWeights,
    axis: Axis | None,
) -> BFloat16[Array, "tokens hidden"]:
    """``y`` plus the sum over k of ``topk_weights[k] * w2_bias[topk_ids[k]]``.

    One float32 matmul of [T, E] with [E, H]: 2 T E H operations. Over ranks the biases are gathered
    first, 4 E H bytes.

    Args:
        y: bfloat16 [T, H], of the experts without second biases.
        topk_ids: int32 [T, K], physical slots, -1 where unrouted.
        topk_weights: float32 [T, K], 0 where unrouted.
        weights: this rank's.
        axis: the manual mesh axis (axes) of expert parallelism; None on one rank.
    """
    bias = _everywhere(weights, axis)
    slots = jnp.arange(bias.shape[0], dtype=jnp.int32).reshape(1, 1, -1)
    chosen = jnp.where(topk_ids[..., None] == slots, topk_weights[..., None], jnp.float32(0))
    sums = jnp.matmul(chosen.sum(axis=1), bias, precision=lax.Precision.HIGHEST)
    # An explicit rounding: XLA may drop a pair of casts.
    return (expert.round_bf16(y.astype(jnp.float32)) + sums).astype(y.dtype)


def gradient_of_second(
    cotangent: Float32[Array, "tokens hidden"],
    topk_ids: Int32[Array, "tokens top_k"],
    weights: ExpertWeights,
    axis: Axis | None,
) -> Float32[Array, "tokens top_k"]:
    """What `plus_second` pulls a cotangent back to, for topk_weights; 0 where unrouted."""
    bias = _everywhere(weights, axis)
    by_expert = jnp.matmul(cotangent, bias.T, precision=lax.Precision.HIGHEST)
    routed = topk_ids >= 0
    taken = jnp.take_along_axis(by_expert, jnp.where(routed, topk_ids, 0), axis=1)
    return jnp.where(routed, taken, 0)


def _everywhere(weights: ExpertWeights, axis: Axis | None) -> Float32[Array, "experts hidden"]:
    """The second biases of all ranks' experts."""
    if axis is None:
        return weights.routed.w2_bias
    return lax.all_gather(weights.routed.w2_bias, axis, axis=0, tiled=True)
