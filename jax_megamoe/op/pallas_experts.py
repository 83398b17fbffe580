"""All rows of the routed experts at once, with Pallas kernels: what `xla` runs on NVIDIA GPUs."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32, UInt16

from jax_megamoe.formats import INTERLEAVE_8
from jax_megamoe.numerics import expert
from jax_megamoe.numerics.tokens import QuantizedTokens
from jax_megamoe.op import pallas_products
from jax_megamoe.op.one_expert import Mlp
from jax_megamoe.op.pallas_products import Weighed, product, row_blocks, tiles_of
from jax_megamoe.weights.layout import gate_and_up
from jax_megamoe.weights.params import ExpertWeights

FORMATS = ("bf16",)
"""Recipes whose weights the kernel reads."""


def runs(num_slots: int, mlp: Mlp) -> bool:
    """Whether the kernels can run so many rows here; a symbolic number, in jax.export, they cannot:
    it would be a dimension of their grid."""
    return (
        mlp.recipe.name in FORMATS
        and (mlp.layout, mlp.stored_layout) == (INTERLEAVE_8, None)
        and isinstance(num_slots, int)
        and num_slots > 0
        and pallas_products.available()
    )


def outputs(
    tokens: QuantizedTokens,
    ids: Int32[Array, " slots"],
    factors: Float32[Array, " slots"],
    weights: ExpertWeights,
    mlp: Mlp,
) -> UInt16[Array, "slots hidden"]:
    """What the experts make of each slot, BF16 bits; undefined in slots without an expert.

    Peak memory beside the result: 6 n I bytes for n slots.

    Args:
        tokens: T of them; slot s is of token s // (slots / T).
        ids: local experts, E for none.
        factors: top-k weights.
        weights: this rank's experts.
        mlp: what they compute.
    """
    recipe = mlp.recipe
    routed, num_slots, x = weights.routed, ids.shape[0], tokens.decoded()
    num_experts = routed.w13_weight.shape[0]
    tiles = tiles_of(num_slots, num_experts)
    order = jnp.argsort(ids, stable=True).astype(jnp.int32)
    blocks = row_blocks(ids, num_experts, tiles.rows)
    first = None if routed.w13_bias is None else Weighed(routed.w13_bias)
    # Gate and up are rounded to BF16 next.
    assert recipe.rounding.rounds_gate_up
    h = product(
        x, routed.w13_weight, order, blocks, first, tiles=tiles, top_k=num_slots // x.shape[0]
    )
    gate, up = gate_and_up(h.astype(jnp.float32), mlp.layout, axis=-1)
    act = expert.rounded_activation(gate, up, mlp.config.activation, recipe)
    early = None if recipe.rounding.weighs_in_combine else factors
    weight = None if early is None else early[order][:, None]
    act = expert.second_input(act, weight, recipe, None)
    second = None if routed.w2_bias is None else Weighed(routed.w2_bias, early)
    y = product(act, routed.w2_weight, order, blocks, second, tiles=tiles, top_k=None)
    return lax.bitcast_convert_type(y, jnp.uint16)
