"""One module a kernel family, or what families of a source share; and the registry of families."""

from jax_megamoe import _checks
from jax_megamoe.config import MoEConfig
from jax_megamoe.formats import Recipe
from jax_megamoe.plan.families import (
    flashinfer_sm90_mxfp4_block,
    flashinfer_sm90_nvfp4_block,
    sgl_sm90_fp8_block,
    sgl_sm100_bf16,
    sgl_sm100_mx,
    sgl_sm100_nvfp4,
    vllm_sm100_bf16,
    vllm_sm100_mx,
    vllm_sm100_nvfp4,
)
from jax_megamoe.plan.kernel_family import KernelFamily

FAMILIES: tuple[KernelFamily, ...] = (
    sgl_sm100_mx.FAMILY,
    sgl_sm100_nvfp4.FAMILY,
    sgl_sm100_bf16.FAMILY,
    sgl_sm90_fp8_block.FAMILY,
    vllm_sm100_mx.FAMILY,
    vllm_sm100_nvfp4.FAMILY,
    vllm_sm100_bf16.FAMILY,
    flashinfer_sm90_mxfp4_block.FAMILY,
    flashinfer_sm90_nvfp4_block.FAMILY,
)
"""Every family, of those that run one recipe the preferred one first."""


def sources() -> tuple[str, ...]:
    """Where kernels come from, the preferred source first."""
    return tuple(dict.fromkeys(family.source for family in FAMILIES))


def implementations() -> tuple[str, ...]:
    """Who launches plans, as `mega_moe(implementation=)` names them."""
    return tuple(dict.fromkeys(family.implementation for family in FAMILIES))


def of_recipe(recipe: Recipe) -> tuple[KernelFamily, ...]:
    """The families that run a recipe."""
    return tuple(family for family in FAMILIES if recipe.name in family.recipes)


def candidates(
    config: MoEConfig, source: str | None = None, implementation: str | None = None
) -> tuple[KernelFamily, ...]:
    """The families that may run a config, by its recipe and by what it asks for.

    Args:
        config: the layer.
        source: the only source; None: the config's kernel_source, or any.
        implementation: the only implementation; None: any.

    Raises:
        ValueError: no family has the source.
    """
    asked = source or config.kernel_source
    if asked is not None:
        _checks.one_of("kernel_source" if source is None else "source", asked, sources())
    return tuple(
        family
        for family in of_recipe(config.recipe)
        if asked in (None, family.source) and implementation in (None, family.implementation)
    )


def layouts(recipe: Recipe) -> tuple[str, ...]:
    """The row orders of w13 that kernels of a recipe read, the preferred one's first."""
    return tuple(dict.fromkeys(family.w13_layout for family in of_recipe(recipe)))


def family_reading(config: MoEConfig, layout: str) -> KernelFamily | None:
    """The preferred family that reads weights in this row order."""
    readers = (family for family in candidates(config) if family.w13_layout == layout)
    return next(readers, None)


def default_family(config: MoEConfig) -> KernelFamily | None:
    """The family that new weights of a config are laid out for: the first that has its activation
    and its fused shared expert, or the first of all; None: no family runs the recipe."""
    able = (family for family in candidates(config) if family.unsupported(config) is None)
    return next(able, next(iter(candidates(config)), None))
