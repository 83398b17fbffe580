"""NVFP4's float32 factors as kernels multiply by them, one function a `FactorRule`."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax.numpy as jnp
from jaxtyping import Array

from jax_megamoe.mesh import Axis
from jax_megamoe.numerics import expert
from jax_megamoe.plan.kernel_family import FactorRule
from jax_megamoe.weights.params import ExpertWeights

Rule = Callable[[ExpertWeights, Axis | None], dict[str, Array]]


def _none(weights: ExpertWeights, axis: Axis | None) -> dict[str, Array]:
    del weights, axis
    return {}


def _folded(weights: ExpertWeights, axis: Axis | None) -> dict[str, Array]:
    """w13_weight_scale_2 [E, 2] for gate and up; w2_input_scale [E], the inverse of the one scale
    of second inputs; w2_weight_scale_2 [E], which takes that scale back."""
    scale = expert.input_scale(weights.routed.w2_input_scale, axis)
    first, second = weights.routed.w13_weight_scale_2, weights.routed.w2_weight_scale_2
    return {
        "w13_weight_scale_2": jnp.stack([first, first], axis=-1),
        "w2_input_scale": jnp.ones_like(second) / scale,
        "w2_weight_scale_2": second * scale,
    }


def _input_scale_apart(weights: ExpertWeights, axis: Axis | None) -> dict[str, Array]:
    """l2_activation_scale [1], the one scale of second inputs; w2_weight_scale_2 [E], which takes
    it back."""
    scale = expert.input_scale(weights.routed.w2_input_scale, axis)
    factors = weights.routed.w2_weight_scale_2 * scale
    return {"w2_weight_scale_2": factors, "l2_activation_scale": scale.reshape(1)}


FACTORS: Mapping[FactorRule, Rule] = MappingProxyType(
    {
        "none": _none,
        "as_stored": _none,
        "folded": _folded,
        "input_scale_apart": _input_scale_apart,
    }
)
"""Operands of a launch that replace the weights' own, by rule: from one rank's weights and the
manual mesh axis (axes) of expert parallelism."""
