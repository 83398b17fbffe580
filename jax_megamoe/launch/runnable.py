"""Whose kernel a config's calls take on this machine, as a value: a family, or why there is none.

Nothing is compiled or allocated here.
"""

import logging
from dataclasses import dataclass, replace
from functools import lru_cache

import jax

from jax_megamoe import compile as compiler
from jax_megamoe.config import MoEConfig, check_config
from jax_megamoe.formats import RECIPES
from jax_megamoe.plan import families, folding
from jax_megamoe.plan.choice import Absent, choose
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.kernel_family import KernelFamily
from jax_megamoe.plan.refusal import Refusal, missing, unfit
from jax_megamoe.runtime import extension
from jax_megamoe.runtime.devices import spec_of
from jax_megamoe.weights.params import ExpertWeights, default_layout

_log = logging.getLogger("jax_megamoe")


@dataclass(frozen=True)
class Unavailable(Refusal):
    """Something is not installed.

    Attributes:
        cause: the exception of an edge.
    """

    cause: Exception | None = None

    def error(self) -> Exception:
        """The cause."""
        return self.cause or super().error()


def check_supported(config: MoEConfig, device: jax.Device | DeviceSpec, num_ranks: int = 1) -> str:
    """Whether a fused kernel can run a config on a device like this one.

    Args:
        config: the layer.
        device: the device of each rank, or what a plan depends on of one that is not here.
        num_ranks: expert-parallel ranks.

    Returns:
        The source of the kernel, as `MoEConfig.kernel_source` names it.

    Raises:
        NotImplementedError: the device, or the format or activation on it.
        ValueError: sizes out of the kernel's limits, which the message names.
    """
    check_config(config, MoEConfig)
    chosen = supported(config, device, num_ranks)
    if isinstance(chosen, Refusal):
        raise chosen.error()
    return chosen.source


def supported(
    config: MoEConfig, device: jax.Device | DeviceSpec, num_ranks: int = 1
) -> KernelFamily | Refusal:
    """`check_supported` as a value: the kernel's family, installed or not, or why there is none."""
    spec = device if isinstance(device, DeviceSpec) else spec_of(device, config.reserved_sms)
    if isinstance(spec, Refusal):
        return spec
    chosen = choose(config, spec, num_ranks, layout=default_layout(config))
    assert not isinstance(chosen, Absent)
    return chosen


def in_recipe_with_kernel(
    config: MoEConfig, device: jax.Device | DeviceSpec, num_ranks: int = 1
) -> MoEConfig:
    """The config, or one of the same weights with other activations, where a fused kernel of the
    device runs that and none its own recipe: MXFP4 and NVFP4 weights on Hopper.

    One line in the log says so. A config that names its activation format stays as it is, as does
    one with a fused shared expert.

    `mxfp4_bf16` is never the result: it has no fused kernel, and `grouped` runs `mxfp4` wherever it
    runs `mxfp4_bf16`. It costs time for tokens that are not rounded, which the user asks for.

    Args:
        config: the layer.
        device: of each rank.
        num_ranks: expert-parallel ranks.
    """
    if config.activation_format is not None or config.num_shared_experts:
        return config
    others = [
        recipe
        for recipe in RECIPES.values()
        if recipe.weights is config.weight_format and config.activation.name in recipe.functions
    ]
    if not isinstance(supported(config, device, num_ranks), Refusal):
        return config
    for recipe in others:
        other = replace(config, activation_format=recipe.activations)
        if not isinstance(supported(other, device, num_ranks), Refusal):
            _log_recipe(config.recipe.name, recipe.name)
            return other
    return config


def config_that_folds(
    config: MoEConfig, device: jax.Device, num_ranks: int, hidden_size: int
) -> MoEConfig:
    """The config, filled up further where a fused kernel of the device runs it so with folded
    biases, see `folding.folded_sizes`. One line in the log says by how much."""
    spec = spec_of(device, config.reserved_sms)
    if isinstance(spec, Refusal):
        return config
    wide = folding.folded_sizes(config, spec, num_ranks, hidden_size)
    if wide is None:
        return config
    _log_wider(hidden_size, wide.hidden_size)
    return wide


@lru_cache
def _log_wider(stored: int, filled: int) -> None:
    """Says once what folded biases cost."""
    _log.info(
        "hidden size %d is filled up to %d (%.1f %% more weights): the last columns hold the "
        "experts' biases; jax_megamoe.folding_cost has bytes and operations",
        *(stored, filled, 100 * (filled / stored - 1)),
    )


@lru_cache
def _log_recipe(default: str, taken: str) -> None:
    """Says once that weights run in another recipe than the default of their format."""
    _log.info("%s weights run as %s: this device has a kernel of that alone", default, taken)


def runnable(config: MoEConfig, device: jax.Device, num_ranks: int = 1) -> KernelFamily | Refusal:
    """The family of the kernel that a config's calls take here, installed and all; or why none."""
    try:
        extension.module()
    except ImportError as error:
        return Unavailable(str(error), cause=error)
    spec = spec_of(device, config.reserved_sms)
    if isinstance(spec, Refusal):
        return spec
    return installed_family(config, spec, num_ranks)


def runnable_layout(config: MoEConfig, layout: str, device: jax.Device) -> str:
    """The row order that parameters of `layout` should have on this machine.

    Another one than theirs where kernels of the recipe read several, on a device that runs it, when
    the kernel of theirs is not installed or cannot, another can, and the config forces none.
    """
    spec = spec_of(device, config.reserved_sms)
    if config.kernel_source is not None or isinstance(spec, Refusal):
        return layout
    for each in dict.fromkeys((layout, *families.layouts(config.recipe))):
        chosen = choose(unfused(config), spec, 1, layout=each, has_source=compiler.has_source)
        if not isinstance(chosen, Refusal | Absent) and chosen.w13_layout == each:
            return each
    return layout


def installed_family(
    config: MoEConfig,
    device: DeviceSpec,
    num_ranks: int,
    weights: ExpertWeights | None = None,
    *,
    order: str | None = None,
    implementation: str | None = None,
) -> KernelFamily | Refusal:
    """The family of the kernel: able, installed, and of the weights' row order.

    Args:
        config: the layer.
        device: where.
        num_ranks: expert-parallel ranks.
        weights: the parameters; None: none yet.
        order: the row order that they have or will have; None: any.
        implementation: the only one that may launch; None: any.
    """
    chosen = choose(
        config,
        device,
        num_ranks,
        layout=order,
        implementation=implementation,
        has_source=compiler.has_source,
    )
    if isinstance(chosen, Refusal):
        return chosen
    family = chosen.family if isinstance(chosen, Absent) else chosen
    if weights is not None:
        broken = _parameter_refusal(config, weights, family)
        if broken is not None:
            return broken
    return _absent(config, family) if isinstance(chosen, Absent) else family


def _absent(config: MoEConfig, family: KernelFamily) -> Unavailable:
    """How to get a source, or which row order another one's kernel reads."""
    try:
        compiler.find_source(family.source)
    except compiler.MissingDependency as missing:
        text = str(missing)
        for other in families.candidates(config):
            if other.w13_layout != family.w13_layout:
                call = f"jax_megamoe.to_layout(weights, {other.w13_layout!r})"
                text = f"{text}; or {call} for {other.source}'s kernel"
        return Unavailable(text, cause=compiler.MissingDependency(text))
    raise AssertionError(f"{family.source} is there after all")


def _parameter_refusal(
    config: MoEConfig, weights: ExpertWeights, family: KernelFamily
) -> Refusal | None:
    """What a kernel asks of parameters beyond their shapes."""
    has_biases = weights.routed.w13_bias is not None or weights.routed.w2_bias is not None
    if has_biases and not weights.folds_biases:
        expected = f"no biases for implementation {family.implementation}, or folded ones"
        hint = "jax_megamoe.fold_biases(config, weights) folds them; or use xla"
        return missing("weights", expected, "w13_bias and w2_bias", hint)
    if weights.layout != family.w13_layout:
        return unfit(
            "weights.layout",
            f"{family.w13_layout!r} for the kernel source {family.source}",
            repr(weights.layout),
            f"jax_megamoe.to_layout(weights, {family.w13_layout!r}) moves them",
        )
    return None


def fuses_shared(config: MoEConfig, weights: ExpertWeights | None) -> bool:
    """Whether the kernel runs a shared expert: not if there is none in the weights, nor if no
    kernel of their row order fuses it, and the config does not insist on one."""
    if not config.num_shared_experts or weights is None:
        return True
    if weights.shared is None:
        return False
    able = (
        family.unsupported(config) is None
        for family in families.candidates(config)
        if family.w13_layout == weights.layout
    )
    return config.kernel_source is not None or any(able)


def unfused(config: MoEConfig) -> MoEConfig:
    """The config of the kernel where it leaves the shared expert to the caller."""
    return replace(config, num_shared_experts=0)


@lru_cache
def log_unfused(config: MoEConfig, layout: str) -> None:
    """Says once for each config why its shared expert is not fused."""
    own = families.family_reading(config, layout)
    others = (each for each in families.candidates(config) if each.unsupported(config) is None)
    other = next(others, None)
    hint = ""
    if other is not None:
        hint = (
            f"; {other.source}'s does (python -m jax_megamoe sources fetch {other.source}, then "
            f"jax_megamoe.to_layout(weights, {other.w13_layout!r}))"
        )
    _log.warning(
        "%s runs its shared expert unfused: %s's %s kernel, whose row order the weights have, "
        "fuses none%s",
        config,
        "no" if own is None else own.source,
        config.recipe.name,
        hint,
    )
