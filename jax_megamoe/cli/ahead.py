"""`python -m jax_megamoe compile`: kernels compiled into the cache before anything runs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jax_megamoe import _checks
from jax_megamoe.compile import Outcome, compile_many
from jax_megamoe.config import MoEConfig
from jax_megamoe.formats import INTERLEAVE_8
from jax_megamoe.launch import grouped
from jax_megamoe.launch.deep_gemm import Route
from jax_megamoe.launch.runnable import check_supported, in_recipe_with_kernel
from jax_megamoe.nn.hf_config import block_spec, read_hf_config
from jax_megamoe.nn.storage import config_of_spec
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.grouped import rules
from jax_megamoe.plan.kernel import KernelSpec
from jax_megamoe.plan.launch import LaunchPlan
from jax_megamoe.plan.limits import SM90_ARCH
from jax_megamoe.plan.refusal import Refusal
from jax_megamoe.weights.checkpoint.select import runs_as, stored_scheme
from jax_megamoe.weights.drawn import random_experts
from jax_megamoe.weights.params import ExpertWeights
from jax_megamoe.weights.regroup import to_grouped


@dataclass(frozen=True)
class Layer:
    """A layer whose kernels are wanted.

    Attributes:
        config: of the experts.
        has_biases: they have biases, which `grouped` alone adds.
    """

    config: MoEConfig
    has_biases: bool = False


def asked_layers(
    model: Path | None,
    recipes: Sequence[str] | None,
    device: DeviceSpec,
    max_num_tokens: int,
    **fields: Any,
) -> list[Layer]:
    """A layer of each recipe.

    Args:
        model: path of a config.json, for the sizes, activation and biases of its experts; None:
            `fields` have the sizes.
        recipes: their names; None: what the model is stored in, and mxfp8 for 128 x 128 block-FP8
            where the device is no Hopper; fp8_block without a model.
        device: what the layers run on.
        max_num_tokens: see `MoEConfig`.
        **fields: others of it.

    Raises:
        ValueError, NotImplementedError: a model that is not known or does not run.
        OSError: no such file.
    """
    if model is None:
        names = recipes or ("fp8_block",)
        formats: list[dict[str, Any]] = [{"weight_format": name} for name in names]
        most = max_num_tokens
        return [Layer(MoEConfig(max_num_tokens=most, **each, **fields)) for each in formats]
    raw = read_hf_config(model)
    spec = block_spec(raw)
    if recipes is None:
        recipes = [runs_as(stored_scheme(raw), on_hopper=device.arch == SM90_ARCH)]
    configs = [config_of_spec(spec, name, max_num_tokens, **fields) for name in recipes]
    return [Layer(config, spec.has_expert_biases) for config in configs]


def as_they_run(
    layers: Iterable[Layer], device: DeviceSpec, num_ranks: int, say: Callable[[str], object]
) -> list[Layer]:
    """The layers in the recipes of their weights that have a kernel on the device, see
    `in_recipe_with_kernel`; `say` is given a line for each that changes."""
    found: list[Layer] = []
    for layer in layers:
        asked, taken = layer.config, in_recipe_with_kernel(layer.config, device, num_ranks)
        if taken is not asked:
            say(f"{asked.recipe.name} weights run as {taken.recipe.name} there\n")
        found.append(replace(layer, config=taken))
    return found


def kernels(
    layers: Iterable[Layer],
    device: DeviceSpec,
    token_counts: Sequence[int],
    num_ranks: int,
    implementation: str = "deep_gemm",
) -> tuple[KernelSpec, ...]:
    """The distinct kernels that calls of these layers launch.

    Args:
        layers: the layers.
        device: what they run on.
        token_counts: rows of a rank's calls, each at least 1.
        num_ranks: expert-parallel ranks.
        implementation: ``"deep_gemm"`` or ``"grouped"``, which is planned for one rank.

    Raises:
        ValueError: no token counts, one below 1 or over max_num_tokens, sizes out of the kernel's
            limits, several ranks of `grouped`.
        NotImplementedError: a format that has no kernel on the device, biases in deep_gemm.
    """
    if not token_counts:
        raise ValueError(_checks.message("tokens", "at least one number of tokens", "none"))
    for num_tokens in token_counts:
        _checks.integer("tokens", num_tokens, minimum=1)
    make = _grouped_plans if implementation == "grouped" else _fused_plans
    plans = [plan for layer in layers for plan in make(layer, device, token_counts, num_ranks)]
    return tuple(dict.fromkeys(step.kernel for plan in plans for step in plan.launches))


def _fused_plans(
    layer: Layer, device: DeviceSpec, token_counts: Sequence[int], num_ranks: int
) -> list[LaunchPlan]:
    """A plan of `deep_gemm` for each number of tokens."""
    if layer.has_biases:
        hint = "--implementation grouped adds them"
        text = _checks.message("experts", "no biases for deep_gemm", "biases", hint)
        raise NotImplementedError(text)
    config = layer.config
    route = Route(device, check_supported(config, device, num_ranks), num_ranks, "")
    return [route.plan(config, num_tokens) for num_tokens in token_counts]


def _grouped_plans(
    layer: Layer, device: DeviceSpec, token_counts: Sequence[int], num_ranks: int
) -> list[LaunchPlan]:
    """Plans of `grouped` for each number of tokens: two of MXFP4 beside FP8, whose scales may allow
    one factor for a matrix or need one for each row, as the checkpoint will show."""
    config = layer.config
    most = config.max_num_tokens
    if num_ranks != 1:
        hint = "over ranks the first call compiles them"
        raise ValueError(_checks.message("ranks", "1 for grouped", num_ranks, hint))
    if max(token_counts) > most:
        expected = f"at most max_num_tokens = {most}"
        raise ValueError(_checks.message("num_tokens", expected, max(token_counts)))
    layout = grouped.layout_of(config, device.arch)
    if isinstance(layout, Refusal):
        raise layout.error()
    route = grouped.GroupedRoute(rules.planned_arch(device.arch), device.num_sms)
    makes = [partial(_stored, config, layout, layer.has_biases, by_row) for by_row in (False, True)]
    kinds = [jax.eval_shape(make, jax.random.key(0)) for make in makes]
    return [grouped.planned(config, route, each, n) for each in kinds for n in token_counts]


def _stored(
    config: MoEConfig, layout: str, has_biases: bool, by_row: bool, key: jax.Array
) -> ExpertWeights:
    """Parameters in a layout of the products, for their shapes."""
    weights = random_experts(config, key, layout=INTERLEAVE_8, has_biases=has_biases)
    return weights if layout == INTERLEAVE_8 else to_grouped(weights, layout, by_row=by_row)


def compile_ahead(specs: Sequence[KernelSpec], console: Console) -> bool:
    """Compiles kernels with a progress bar, and prints a table of them.

    Returns:
        Whether every kernel is in the cache now.
    """
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("compile", total=len(specs))
        outcomes = compile_many(specs, on_done=lambda _: progress.advance(task))
    console.print(_table(outcomes))
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    for outcome in failed:
        console.print(f"{outcome.spec.symbol}: {outcome.error}", markup=False)
    return not failed


def _table(outcomes: Iterable[Outcome]) -> Table:
    table = Table("kernel", "source", "arch", "seconds", "cubin kB")
    for outcome in outcomes:
        spec = outcome.spec
        size = "failed" if outcome.error else f"{outcome.cubin_bytes / 1e3:.0f}"
        table.add_row(spec.symbol, spec.source, spec.arch, f"{outcome.seconds:.1f}", size)
    return table
