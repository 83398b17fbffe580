"""All rows of the routed experts at once, with Pallas kernels: what `xla` runs on NVIDIA GPUs."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32, UInt16

from jax_megamoe.formats import INTERLEAVE_8, Recipe
from jax_megamoe.numerics import expert, quantization
from jax_megamoe.numerics.tokens import QuantizedTokens
from jax_megamoe.op.one_expert import Mlp
from jax_megamoe.op.pallas_products import (
    Matrix,
    Rows,
    Weighed,
    addressable,
    available,
    halves,
    product,
    row_blocks,
    tiles_of,
)
from jax_megamoe.weights.layout import gate_and_up
from jax_megamoe.weights.params import ExpertWeights

FORMATS = ("bf16", "mxfp8", "mxfp4", "mxfp4_bf16", "fp8_block")
"""Recipes whose weights the kernel reads."""


def runs(num_slots: int, weights: ExpertWeights, mlp: Mlp) -> bool:
    """Whether the kernels can run so many rows here; a symbolic number, in jax.export, they cannot:
    it would be a dimension of their grid."""
    return (
        mlp.recipe.name in FORMATS
        and (mlp.layout, mlp.stored_layout) == (INTERLEAVE_8, None)
        and isinstance(num_slots, int)
        and num_slots > 0
        and all(map(addressable, weights.routed.arrays().values()))
        and available()
    )


def outputs(
    tokens: QuantizedTokens,
    ids: Int32[Array, " slots"],
    factors: Float32[Array, " slots"],
    weights: ExpertWeights,
    mlp: Mlp,
) -> UInt16[Array, "slots hidden"]:
    """What the experts make of each slot, BF16 bits; undefined in slots without an expert.

    Peak memory beside the result, for n slots: 6 n I bytes, up to 14 n I in fp8_block.

    Args:
        tokens: T of them; slot s is of token s // (slots / T).
        ids: local experts, E for none.
        factors: top-k weights.
        weights: this rank's experts.
        mlp: what they compute.
    """
    routed, recipe, num_slots = weights.routed, mlp.recipe, ids.shape[0]
    w13 = Matrix(routed.w13_weight, routed.w13_weight_scale)
    w2 = Matrix(routed.w2_weight, routed.w2_weight_scale)
    num_experts = w13.weight.shape[0]
    tiles = tiles_of(num_slots, num_experts, decoded=w13.scale is not None)
    order = jnp.argsort(ids, stable=True).astype(jnp.int32)
    blocks = row_blocks(ids, num_experts, tiles.rows)
    first = None if routed.w13_bias is None else Weighed(routed.w13_bias)
    top_k = num_slots // tokens.values.shape[0]
    h = product(
        rows_of(tokens, w13), w13, order, blocks, first,
        tiles=tiles, top_k=top_k, interleaved=True,
        # Rounded to BF16 next, or not at all.
        dtype=jnp.bfloat16 if recipe.rounding.rounds_gate_up else jnp.float32,
    )  # fmt: skip
    gate, up = gate_and_up(h.astype(jnp.float32), mlp.layout, axis=-1)
    act = expert.rounded_activation(gate, up, mlp.config.activation, recipe)
    early = None if recipe.rounding.weighs_in_combine else factors
    act = act if early is None else act * early[order][:, None]
    second = None if routed.w2_bias is None else Weighed(routed.w2_bias, early)
    y = product(second_rows(act, recipe, w2), w2, order, blocks, second, tiles=tiles, top_k=None)
    return lax.bitcast_convert_type(y, jnp.uint16)


def rows_of(tokens: QuantizedTokens, matrix: Matrix) -> Rows:
    """Tokens as the kernel multiplies them: codes beside a scale of their own, or decoded."""
    if tokens.scale is not None and tokens.scale.dtype == jnp.float32:
        return Rows(tokens.values.astype(jnp.bfloat16), tokens.scale)
    values = tokens.decoded()
    return Rows(halves(values) if matrix.weight.dtype == jnp.uint8 else values)


def second_rows(act: Float32[Array, "rows inter"], recipe: Recipe, matrix: Matrix) -> Rows:
    """The second matmul's input, as `expert.second_input` has it."""
    if recipe.activations.scale == "float32":
        values, scale = quantization.requantize_l2_fp8_block(act)
        return rows_of(QuantizedTokens(values, scale), matrix)
    return rows_of(QuantizedTokens(expert.second_input(act, None, recipe, None)), matrix)
