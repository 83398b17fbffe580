"""One expert's gated MLP as `xla` computes it: its matrices decoded, its rows multiplied."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16

from jax_megamoe.config import MoEConfig
from jax_megamoe.formats import Recipe
from jax_megamoe.numerics import expert
from jax_megamoe.numerics.tokens import QuantizedTokens
from jax_megamoe.weights.experts import stored_matrix
from jax_megamoe.weights.layout import gate_and_up, join_rows
from jax_megamoe.weights.params import ExpertWeights
from jax_megamoe.weights.regroup import restored_fields


@dataclass(frozen=True)
class Mlp:
    """What an expert computes, apart from its parameters."""

    config: MoEConfig
    recipe: Recipe
    layout: str
    activation_scale: Array | None = None
    stored_layout: str | None = None
    """Of the grouped products, where parameters have it: an expert's are converted as it runs."""


def expert_fields(weights: ExpertWeights, e: Array, mlp: Mlp) -> dict[str, Any]:
    """Expert e's decoded matrices and factors."""
    routed = weights.routed.arrays()
    # The barrier ties the parameters to e: else XLA moves their decoding, of all of them, out of
    # the loop.
    routed, e = lax.optimization_barrier((routed, e))
    one = {name: array[e] for name, array in routed.items()}
    if mlp.stored_layout is not None:
        one = restored_fields(one, mlp.recipe.weights, mlp.stored_layout, mlp.layout)
    bias = one.get("w13_bias")
    fields: dict[str, Any] = {
        "w13": decoded(one, "w13_weight", mlp),
        "w2": decoded(one, "w2_weight", mlp),
        "w13_bias": None if bias is None else join_rows(bias, mlp.layout, axis=-1),
        "w2_bias": one.get("w2_bias"),
    }
    fields["l1_alpha"], fields["l2_alpha"] = None, mlp.activation_scale
    if "w2_weight_scale_2" in one:
        scale = one["w2_weight_scale_2"]
        fields["l1_alpha"] = one["w13_weight_scale_2"]
        fields["l2_alpha"] = scale if mlp.activation_scale is None else scale * mlp.activation_scale
    return fields


def decoded(arrays: dict[str, Array], name: str, mlp: Mlp) -> Array:
    return stored_matrix(
        arrays[name],
        arrays.get(f"{name}_scale"),
        mlp.recipe.weights,
        w13=name == "w13_weight",
        layout=mlp.layout,
    )


def apply(
    tokens: QuantizedTokens, weight: Array, fields: dict[str, Any], mlp: Mlp
) -> BFloat16[Array, "rows hidden"]:
    """One expert's gated MLP on a block of rows with their top-k weights."""
    h = expert.matmul(tokens.decoded(), fields["w13"])
    alpha = fields["l1_alpha"]
    if tokens.token_scale is not None:
        alpha = tokens.token_scale if alpha is None else tokens.token_scale * alpha
        h = h * alpha[:, None]
    elif alpha is not None:
        h = h * alpha
    if fields["w13_bias"] is not None:
        h = h + fields["w13_bias"][None]
    gate, up = gate_and_up(h, mlp.layout, axis=-1)
    act = expert.rounded_activation(gate, up, mlp.config.activation, mlp.recipe)
    early = None if mlp.recipe.rounding.weighs_in_combine else weight[:, None]
    act = expert.second_input(act, early, mlp.recipe, mlp.activation_scale)
    y = expert.matmul(act, fields["w2"])
    if fields["l2_alpha"] is not None:
        y = y * fields["l2_alpha"]
    if fields["w2_bias"] is not None:
        bias = fields["w2_bias"][None]
        y = y + (bias if early is None else bias * early)
    return expert.round_bf16(y).astype(jnp.bfloat16)
