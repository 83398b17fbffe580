"""Where biases of the first matmul fit among its columns: pure sizes, by the layer's recipe.

`weights/folded_biases.py` says how a column holds one.
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from jax_megamoe.config import ExpertSpec, MoEConfig
from jax_megamoe.plan.choice import Absent, choose
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.refusal import Refusal, missing

COLUMNS: Mapping[str, int] = MappingProxyType({"mxfp4": 32, "mxfp8": 32, "bf16": 1})
"""Columns of a bias by weight format: a scale group's, or one where weights have no scales."""

CONSTANTS: Mapping[str, float] = MappingProxyType({"mxfp4": 2.0**-5, "mxfp8": 2.0**-5, "bf16": 1.0})
"""What tokens have in those columns, by weight format."""

_EXACT = ("mxfp8", "bf16")
"""Activation formats that hold the constants exactly, whatever else is in the token."""

_HIDDEN_STEP, _INTER_STEP = 256, 128
"""Sizes that are tried: the kernels' steps. A kernel with a larger one refuses those between."""

_FURTHER = 512
"""How far beyond the rounded sizes others are tried."""


def unfoldable(config: ExpertSpec) -> Refusal | None:
    """Why a config's recipe holds no bias exactly in columns; None where it does.

    fp8_block weights have one scale for 128 rows of biases, NVFP4 weights an E4M3 one under a
    float32. NVFP4 activations have a float32 scale a token, fp8_block ones a float32 scale for 128
    values, amax / 448: no power of two.
    """
    recipe = config.recipe
    if recipe.weights.name in COLUMNS and recipe.activations.name in _EXACT:
        return None
    expected = f"{' or '.join(COLUMNS)}, which hold biases exactly in columns"
    hint = "leave the biases as they are: xla and grouped add them"
    return missing("recipe", expected, recipe.name, hint)


def fits(config: MoEConfig, hidden_size: int) -> bool:
    """Whether a config has columns for biases beyond the model's hidden size."""
    if unfoldable(config) is not None:
        return False
    return config.hidden_size - hidden_size >= COLUMNS[config.weight_format.name]


def kernel_sizes(config: MoEConfig, device: DeviceSpec, num_ranks: int) -> MoEConfig | None:
    """`folded_sizes` of a layer without biases."""
    return folded_sizes(config, device, num_ranks, 0)


def folded_sizes(
    config: MoEConfig, device: DeviceSpec, num_ranks: int, hidden_size: int
) -> MoEConfig | None:
    """The config with the smallest sizes with which a fused kernel runs it, biases folded.

    Args:
        config: the layer.
        device: where.
        num_ranks: expert-parallel ranks.
        hidden_size: of the model.

    Returns:
        None where no sizes up to 512 beyond the rounded ones do.
    """
    hiddens = _rounded(config.hidden_size, _HIDDEN_STEP)
    inters = _rounded(config.intermediate_size, _INTER_STEP)
    for hidden, inter in itertools.product(hiddens, inters):
        wide = replace(config, hidden_size=hidden, intermediate_size=inter)
        if fits(wide, hidden_size) and not isinstance(
            choose(wide, device, num_ranks), Refusal | Absent
        ):
            return wide
    return None


def _rounded(size: int, step: int) -> range:
    """Sizes that kernels may take, from `size` on."""
    start = -(-size // step) * step
    return range(start, start + _FURTHER + 1, step)
