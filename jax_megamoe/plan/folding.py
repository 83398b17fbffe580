"""Where biases of the first matmul fit among its columns: pure sizes, by the layer's recipe.

`weights/folded_biases.py` says how a column holds one.
"""

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

_SIZES = 256
"""Multiples of this are tried for hidden and intermediate size."""


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


def folded_sizes(config: MoEConfig, device: DeviceSpec, sizes: tuple[int, int]) -> MoEConfig | None:
    """The config with the smallest sizes with which a fused kernel runs it, biases folded.

    Args:
        config: the layer.
        device: where.
        sizes: hidden and intermediate size of the model.

    Returns:
        None where no sizes up to 512 larger do.
    """
    if unfoldable(config) is not None:
        return None
    for hidden in _rounded(sizes[0]):
        for inter in _rounded(sizes[1]):
            wide = replace(config, hidden_size=hidden, intermediate_size=inter)
            if hidden - sizes[0] < COLUMNS[config.weight_format.name]:
                continue
            chosen = choose(wide, device, 1)
            if not isinstance(chosen, Refusal | Absent):
                return wide
    return None


def _rounded(size: int) -> range:
    """Sizes that kernels may take, from `size` on."""
    start = -(-size // _SIZES) * _SIZES
    return range(start, start + 2 * _SIZES + 1, _SIZES)
