"""Which kernel a config's calls take: pure, and a refusal where none can."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from jax_megamoe.config import MoEConfig
from jax_megamoe.plan import families
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.kernel_family import KernelFamily, Request
from jax_megamoe.plan.refusal import Refusal, missing


@dataclass(frozen=True)
class Absent:
    """A kernel that could run the calls; its source is not installed.

    Attributes:
        family: of the kernel, the preferred one.
    """

    family: KernelFamily


def refusal(
    family: KernelFamily, config: MoEConfig, device: DeviceSpec, num_ranks: int
) -> Refusal | None:
    """Why a family cannot run every call of a config with 0 to max_num_tokens tokens."""
    return _refusal(family.name, config, device, num_ranks)


@lru_cache(maxsize=1024)
def _refusal(name: str, config: MoEConfig, device: DeviceSpec, num_ranks: int) -> Refusal | None:
    (family,) = (each for each in families.FAMILIES if each.name == name)
    request = Request(config=config, device=device, num_ranks=num_ranks, num_tokens=0)
    return next(family.refusals_of_any(request), None)


def choose(
    config: MoEConfig,
    device: DeviceSpec,
    num_ranks: int,
    *,
    source: str | None = None,
    layout: str | None = None,
    implementation: str | None = None,
    has_source: Callable[[str], bool] | None = None,
) -> KernelFamily | Refusal | Absent:
    """The first family that can run every call of a config.

    Args:
        config: the layer; its num_shared_experts are to be fused.
        device: where.
        num_ranks: expert-parallel ranks.
        source: the only source; None: the config's kernel_source, or any.
        layout: the row order that the weights have, by which families are taken where several
            read different ones and no source is asked for; None: any.
        implementation: the only implementation; None: any.
        has_source: whether a source is installed; None: all count as such.

    Returns:
        The family. Else the refusal of the preferred one, of the device's architecture if there is
        such a one; or an `Absent` where only sources that are not installed have a kernel.

    Raises:
        ValueError: no family has the source.
    """
    asked = source or config.kernel_source
    found = families.candidates(config, source, implementation)
    if not found:
        return _none(config, asked, implementation)
    if asked is None and layout is not None:
        found = tuple(each for each in found if each.w13_layout == layout) or found
    # The device's own architecture first: another one's refusal says little.
    found = tuple(sorted(found, key=lambda family: not family.runs_on(device)))
    refusals = [(each, refusal(each, config, device, num_ranks)) for each in found]
    able = [family for family, broken in refusals if broken is None]
    if not able:
        first = refusals[0][1]
        assert first is not None
        return first
    ready = (family for family in able if has_source is None or has_source(family.source))
    return next(ready, Absent(able[0]))


def _none(config: MoEConfig, source: str | None, implementation: str | None) -> Refusal:
    """No family runs the recipe from this source, or with this implementation."""
    recipe = config.recipe
    known = families.of_recipe(recipe)
    if implementation is not None and implementation not in {each.implementation for each in known}:
        others = " or ".join(dict.fromkeys(each.implementation for each in known)) or "xla"
        return missing("implementation", f"{others} for {recipe.name}", implementation)
    if source is not None and known:
        others = " or ".join(dict.fromkeys(each.source for each in known))
        return missing("source", f"{others} for {recipe.name}", source)
    hint = "grouped and xla run it"
    return missing("weight_format", "a recipe that has a kernel", recipe.name, hint)
