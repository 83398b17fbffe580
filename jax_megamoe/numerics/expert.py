"""What happens inside one expert between and after its matmuls, rounding where the kernels round.

`xla` and `reference` share these steps. They follow the kernel that the recipe's `Rounding`
describes: the vllm source's or the sgl source's on SM100, the sgl source's SM90 kernel for
fp8_block. The order in a kernel: the first matmul, the activation in float32, the top-k weight, the
rounding of the second matmul's input, the second matmul, its output rounded to BF16, the combine in
float32. A kernel that weighs in the combine applies the top-k weight there. Derivatives take a
rounding as the identity (`straight_through`).
"""

import jax
import jax.numpy as jnp
import ml_dtypes
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jax_megamoe.config import Activation
from jax_megamoe.formats import Recipe
from jax_megamoe.numerics import quantization


@jax.custom_jvp
def straight_through(
    exact: Float[Array, "*shape"], rounded: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """`rounded`, with the derivative of `exact`: the straight-through rule.

    Source: Bengio, Leonard and Courville, arXiv:1308.3432, section 4.
    """
    del exact
    return rounded


@straight_through.defjvp
def _straight_through_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    return primals[1], tangents[0].astype(primals[1].dtype)


def round_bf16(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """`x` rounded to BF16 values, still float32.

    Not a pair of casts: XLA may drop those (xla_allow_excess_precision).
    """
    rounded = lax.reduce_precision(lax.stop_gradient(x), exponent_bits=8, mantissa_bits=7)
    return straight_through(x, rounded)


def matmul(x: Float[Array, "rows k"], w: Float[Array, "n k"]) -> Float32[Array, "rows n"]:
    """x @ w.T accumulated in float32.

    Float32 is multiplied as such, where a GPU would round it to TF32 and a TPU to BF16: it is
    decoded fp8_block values, which neither holds.
    """
    wide = jnp.float32 in (x.dtype, w.dtype)
    if wide:
        x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    precision = lax.Precision.HIGHEST if wide else None
    contract = (((x.ndim - 1,), (w.ndim - 1,)), ((), ()))
    return lax.dot_general(x, w, contract, precision=precision, preferred_element_type=jnp.float32)


def activate(
    gate: Float32[Array, "*shape"], up: Float32[Array, "*shape"], activation: Activation
) -> Float32[Array, "*shape"]:
    """The gated activation in float32.

    SwiGLU: gate * sigmoid(alpha * gate) * (up + beta). SiTU: alpha * tanh(gate / alpha) *
    sigmoid(gate) * beta * tanh(up / beta), or * up where beta is 0. A clamp limits gate from above
    and up from both sides first.
    """
    if activation.clamp is not None:
        gate = jnp.minimum(gate, activation.clamp)
        up = jnp.clip(up, -activation.clamp, activation.clamp)
    if activation.name == "situ":
        alpha, beta = activation.alpha, activation.beta
        linear = beta * jnp.tanh(up / beta) if beta else up
        return alpha * jnp.tanh(gate / alpha) * _sigmoid(gate) * linear
    return gate * _sigmoid(activation.alpha * gate) * (up + activation.beta)


_LARGEST_EXPONENT = 88.72283
"""The largest float32 with an exponential of one."""


@jax.custom_jvp
def _sigmoid(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    # Below -88.72 the exponential overflows and 1 / inf is 0: said without an infinity, which
    # jax_debug_infs would take for a fault.
    overflows = x < -_LARGEST_EXPONENT
    return jnp.where(overflows, 0.0, 1.0 / (1.0 + jnp.exp(-jnp.maximum(x, -_LARGEST_EXPONENT))))


@_sigmoid.defjvp
def _sigmoid_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    # The derivative by the chain rule is 0 * inf where the exponential overflows.
    y = _sigmoid(*primals)
    return y, y * (1.0 - y) * tangents[0]


def rounded_activation(
    gate: Float32[Array, "*shape"],
    up: Float32[Array, "*shape"],
    activation: Activation,
    recipe: Recipe,
) -> Float32[Array, "*shape"]:
    """`activate` as the recipe's kernel does it: SM100 rounds its inputs and the clamp to BF16."""
    if not recipe.rounding.rounds_gate_up:
        return activate(gate, up, activation)
    if activation.clamp is not None:
        clamp = float(ml_dtypes.bfloat16(activation.clamp))
        activation = Activation(
            activation.name, clamp=clamp, alpha=activation.alpha, beta=activation.beta
        )
    return activate(round_bf16(gate), round_bf16(up), activation)


def second_input(
    act: Float32[Array, "*rows inter"],
    weight: Float32[Array, "*rows one"] | None,
    recipe: Recipe,
    activation_scale: Float32[Array, ""] | None,
) -> Float[Array, "*rows inter"]:
    """The second matmul's input: weighted, quantised as the kernel does and decoded again.

    The result holds the decoded values, bfloat16 where those are exact (NVFP4: without the global
    activation scale, which the kernel folds into the output's factor), float32 for fp8_block
    activations.

    Args:
        act: `rounded_activation`.
        weight: top-k weights that multiply here; None where the recipe weighs in the combine, and
            for a shared expert.
        recipe: the formats, and where the kernel rounds.
        activation_scale: `input_scale` where the activation format has one.
    """
    rounding, kind = recipe.rounding, recipe.activations.name
    if kind == "nvfp4" and not rounding.floors_scales:
        # One factor, as the kernel has it: it divides by the scale when it weighs.
        assert activation_scale is not None
        inverse = jnp.ones_like(activation_scale) / activation_scale
        act, activation_scale = act * (inverse if weight is None else weight * inverse), None
    elif weight is not None:
        act = act * weight
    exact, fixed = act, lax.stop_gradient(act)
    if kind == "bf16":
        rounded = fixed.astype(jnp.bfloat16)
    elif kind == "mxfp8":
        quantised = quantization.requantize_l2_mxfp8(fixed)
        rounded = quantization.dequantize_mxfp8(*quantised).astype(jnp.bfloat16)
    elif kind == "nvfp4":
        exact = act if activation_scale is None else act / activation_scale
        quantised = quantization.requantize_l2_nvfp4(fixed, activation_scale)
        rounded = quantization.dequantize_nvfp4(*quantised, jnp.float32(1)).astype(jnp.bfloat16)
    elif rounding.power_of_two_scales:
        quantised = quantization.requantize_l2_fp8_power(fixed)
        rounded = quantization.dequantize_mxfp8(*quantised)
    else:
        quantised = quantization.requantize_l2_fp8_block(fixed)
        rounded = quantization.dequantize_tokens_fp8_block(*quantised)
    return straight_through(exact, rounded)


def input_scale(
    w2_input_scale: Float32[Array, " experts"], axis: str | tuple[str, ...] | None
) -> Float32[Array, ""]:
    """NVFP4's one scale of every second matmul's input: the largest, or 1 when all are 0.

    Args:
        w2_input_scale: float32 [E], of this rank's experts.
        axis: the manual mesh axis (axes) over which the largest is sought; None on one rank.
    """
    largest = jnp.max(w2_input_scale)
    largest = lax.pmax(largest, axis) if axis else largest
    return jnp.where(largest > 0, largest, jnp.float32(1))


def combine(
    slots: Float[Array, "tokens top_k hidden"],
    topk_weights: Float32[Array, "tokens top_k"] | None,
    shared: Float32[Array, "tokens hidden"] | None,
) -> Float32[Array, "tokens hidden"]:
    """The sum over a token's experts in slot order, the shared expert first.

    Args:
        slots: each expert's output, zero where unrouted.
        topk_weights: factors of the slots for formats that weigh in the combine, else None.
        shared: the shared expert's output.
    """
    total = jnp.zeros((slots.shape[0], slots.shape[2]), jnp.float32) if shared is None else shared
    for k in range(slots.shape[1]):
        term = slots[:, k].astype(jnp.float32)
        total = total + (term if topk_weights is None else term * topk_weights[:, k, None])
    return total


def count_tokens(topk_ids: Int32[Array, "tokens top_k"], num_experts: int) -> Int32[Array, " e"]:
    """Tokens routed to each expert; ids outside [0, num_experts) are not counted."""
    ids = jnp.where(topk_ids < 0, num_experts, topk_ids).reshape(-1)
    return jnp.zeros(num_experts, jnp.int32).at[ids].add(1, mode="drop")


def varying_zero(*arrays: jax.Array) -> Float32[Array, ""]:
    """A zero that varies over every mesh axis the arrays vary over.

    Inside `shard_map` a loop's carry must start with the type it ends with.
    """
    firsts = [jnp.sum(array.reshape(-1)[:1].astype(jnp.float32)) for array in arrays]
    zeros = [jnp.where(jnp.isnan(first), jnp.float32(0), jnp.float32(0)) for first in firsts]
    return sum(zeros[1:], start=zeros[0])
