"""The grouped implementation: which device and layout it takes, and its one custom call."""

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Bool, Float32, Int32

from jax_megamoe import compile as compiler
from jax_megamoe.config import MoEConfig
from jax_megamoe.launch import launcher, measured
from jax_megamoe.launch.runnable import Unavailable, installed_family, unfused
from jax_megamoe.mesh import Axis
from jax_megamoe.numerics import expert
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.grouped import layer, rules
from jax_megamoe.plan.grouped.call import GroupedLayer
from jax_megamoe.plan.grouped.tiles import SHARED_MEMORY
from jax_megamoe.plan.launch import LaunchPlan
from jax_megamoe.plan.refusal import Refusal, missing, unfit
from jax_megamoe.routing.replicas import ReplicaMap
from jax_megamoe.runtime import extension
from jax_megamoe.runtime.devices import spec_of
from jax_megamoe.weights.params import ExpertWeights, recipe_for

_log = logging.getLogger("jax_megamoe")


@dataclass(frozen=True)
class GroupedRoute:
    """What the plan of a call depends on beside its arrays.

    Attributes:
        arch: the device's architecture, one of `product.KNOWN_ARCHS`.
        num_sms: multiprocessors that the products may use.
        num_ranks: expert-parallel ranks.
        shared_memory: most bytes of a thread block; 0: the architecture's.
        early: launches overlap the ends of those before them.
        implementation: as `mega_moe` names it.
    """

    arch: int
    num_sms: int
    num_ranks: int = 1
    shared_memory: int = 0
    early: bool = True
    implementation: str = "grouped"


def layout_of(config: MoEConfig, arch: int) -> str | Refusal:
    """The layout of the weights that the products read, or why none runs the config.

    Args:
        config: the layer.
        arch: compute capability times ten, of any device.
    """
    arch = rules.planned_arch(arch) or arch
    weights, activations = config.weight_format.name, activation_format(config)
    refused = rules.refusal(weights, activations, arch)
    if not refused:
        return rules.layout_of(weights, activations)
    got = f"{weights} weights and {activations} activations on {arch // 10}.{arch % 10}"
    return missing("implementation grouped", refused, got, "use xla")


def activation_format(config: MoEConfig) -> str:
    """Name of what tokens are quantised to."""
    return config.recipe.activations.name


def layer_layout(
    config: MoEConfig,
    device: jax.Device,
    num_ranks: int | None,
    implementation: str | None,
    *,
    adds_biases: bool = False,
) -> str | None:
    """The layout of the products that a layer should hold its parameters in; None: no such.

    Where the implementation is named, that of the device. Where none is, only if the products are
    installed, on what they have run on, one GPU of compute capability 9.0
    (benchmarks/results/grouped_h200.json), and there only if no fused kernel runs the config or if
    the products were faster for every measured number of tokens (`measured`).

    Args:
        config: the layer.
        device: of each rank.
        num_ranks: expert-parallel ranks; None: not known yet.
        implementation: the layer's.
        adds_biases: the experts have biases that are not folded, which no fused kernel adds.
    """
    spec = spec_of(device, config.reserved_sms)
    if isinstance(spec, Refusal) or implementation not in (None, GroupedRoute.implementation):
        return None
    layout = layout_of(config, spec.arch)
    if isinstance(layout, Refusal):
        return None
    if implementation is not None:
        return layout
    why = _why_chosen(config, device, spec, num_ranks, adds_biases=adds_biases)
    if why is None:
        return None
    _log_chosen(config.recipe.name, why)
    return layout


def stands_in(
    config: MoEConfig, device: jax.Device, weights: ExpertWeights, num_ranks: int
) -> bool:
    """Whether a call without an implementation takes the products for weights that lie as a fused
    kernel reads them, by the rules of `layer_layout`."""
    spec = spec_of(device, config.reserved_sms)
    if isinstance(spec, Refusal) or layout_of(config, spec.arch) != weights.layout:
        return False
    adds_biases = weights.routed.w13_bias is not None
    return _why_chosen(config, device, spec, num_ranks, adds_biases=adds_biases) is not None


def _why_chosen(
    config: MoEConfig,
    device: jax.Device,
    spec: DeviceSpec,
    num_ranks: int | None,
    *,
    adds_biases: bool,
) -> str | None:
    """Why the products run a config on one device rather than a fused kernel; None: they do not."""
    has_run = spec.arch == 90 and num_ranks == 1
    if not has_run or isinstance(_installed(config), Refusal):
        return None
    fused = installed_family(unfused(config), spec, 1)
    if isinstance(fused, Refusal):
        return "no installed fused kernel runs it on this device"
    if adds_biases:
        return "no fused kernel adds biases"
    able = (fused.implementation, GroupedRoute.implementation)
    kind, tokens = device.device_kind, config.max_num_tokens
    recipe = config.recipe.name
    best = measured.fastest_throughout(measured.table(), kind, recipe, 1, tokens, able)
    if best == GroupedRoute.implementation:
        return "it was faster at every measured number of tokens"
    return None


@lru_cache
def _log_chosen(recipe: str, why: str) -> None:
    """Says once why layers hold parameters for the grouped products."""
    _log.info("%s runs as implementation grouped: %s", recipe, why)


def _installed(config: MoEConfig) -> Unavailable | None:
    """What of a config's products is not here."""
    try:
        extension.module()
        compiler.find_source(rules.source_of(config.weight_format.name))
    except (ImportError, compiler.MissingDependency) as error:
        return Unavailable(str(error), cause=error)
    return None


def try_route(
    config: MoEConfig,
    device: jax.Device,
    weights: ExpertWeights,
    *,
    num_tokens: int = 0,
    num_ranks: int = 1,
) -> GroupedRoute | Refusal:
    """The route of a config's calls on a device, its kernels compiled; or why there is none.

    Args:
        config: the layer.
        device: any of those that run it.
        weights: the parameters, in the products' layout.
        num_tokens: rows of a call on one rank: its kernels are compiled; 0: none are yet.
        num_ranks: expert-parallel ranks.

    Raises:
        BuildError: a kernel does not compile.
    """
    spec = spec_of(device, config.reserved_sms, "grouped")
    if isinstance(spec, Refusal):
        return spec
    layout = layout_of(config, spec.arch)
    if isinstance(layout, Refusal):
        return layout
    if weights.layout != layout:
        hint = f"jax_megamoe.to_layout(weights, {layout!r}) converts them"
        expected = f"{layout!r} for implementation grouped"
        return unfit("weights.layout", expected, repr(weights.layout), hint)
    local = config.experts_per_rank(num_ranks)
    if local > rules.MAX_EXPERTS:
        expected = f"at most {rules.MAX_EXPERTS} for implementation grouped"
        return unfit("experts of a rank", expected, local, "use more ranks, or xla")
    absent = _installed(config)
    if absent is not None:
        return absent
    # 8.6 runs what is compiled for 8.0 and has less room.
    room = SHARED_MEMORY[89] if spec.arch == 86 else 0
    route = GroupedRoute(rules.planned_arch(spec.arch), spec.num_sms, num_ranks, room)
    if num_tokens and num_ranks == 1:
        launcher.build(layer.plan_grouped(_described(config, route, weights, num_tokens)))
    return route


def planned(
    config: MoEConfig,
    route: GroupedRoute,
    weights: ExpertWeights,
    num_tokens: int,
    *,
    padding_mask: bool = False,
) -> LaunchPlan:
    """The plan of a call on one rank, by logical ids, for kernels that are compiled before it.

    Args:
        config, route, weights: as of `moe`.
        num_tokens: rows of the call.
        padding_mask: whether it has a mask.
    """
    described = _described(config, route, weights, num_tokens)
    return layer.plan_grouped(dataclasses.replace(described, padding_mask=padding_mask))


def _described(
    config: MoEConfig, route: GroupedRoute, weights: ExpertWeights, num_tokens: int
) -> GroupedLayer:
    """A call of all experts on one rank, logical ids, nothing optional."""
    recipe, activation = recipe_for(config, weights), config.activation
    return GroupedLayer(
        arch=route.arch,
        num_sms=route.num_sms,
        num_tokens=num_tokens,
        top_k=config.top_k,
        num_experts=weights.routed.w13_weight.shape[0],
        num_logical=config.logical_experts,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        weights=recipe.weights.name,
        activations=activation_format(config),
        second_scales=(
            _second(weights.routed.w13_weight_scale_2),
            _second(weights.routed.w2_weight_scale_2),
        ),
        biases=weights.routed.w13_bias is not None,
        activation=activation.name,
        clamp=activation.clamp,
        alpha=activation.alpha,
        beta=activation.beta,
        rounds=recipe.rounding.rounds_gate_up,
        weighs_in_combine=recipe.rounding.weighs_in_combine,
        shared_memory=route.shared_memory,
        fast_math=config.fast_math,
        early=route.early,
    )


def _second(scale: Array | None) -> str:
    if scale is None:
        return "none"
    return "tensor" if scale.ndim == 1 else "channel"


def moe(
    x: BFloat16[Array, "tokens hidden"],
    topk_ids: Int32[Array, "tokens top_k"],
    topk_weights: Float32[Array, "tokens top_k"],
    weights: ExpertWeights,
    *,
    config: MoEConfig,
    route: GroupedRoute,
    padding_mask: Bool[Array, " tokens"] | None = None,
    eplb: ReplicaMap | None = None,
    with_stats: bool = False,
) -> tuple[BFloat16[Array, "tokens hidden"], Int32[Array, " experts"] | None]:
    """The routed experts on one rank that holds all of them, in one custom call.

    Args:
        x: bfloat16 [T, H].
        topk_ids: int32 [T, K], logical ids.
        topk_weights: float32 [T, K].
        weights: in the layout that `layout_of` names.
        config: the layer.
        route: from `try_route`.
        padding_mask: bool [T], True for rows that are no tokens.
        eplb: where replicas are; None: slot p holds logical expert p % num_logical_experts.
        with_stats: count tokens of each expert.

    Returns:
        bfloat16 [T, H], 0 for a token without experts, and int32 [E] or None.
    """
    described = _described(config, route, weights, x.shape[0])
    described = dataclasses.replace(
        described,
        padding_mask=padding_mask is not None,
        max_replicas=0 if eplb is None else eplb.logical_to_physical.shape[1],
        stats=with_stats,
    )
    operands = launcher.token_operands(x, topk_ids, topk_weights, padding_mask, eplb)
    out = launch_layer(described, operands | _parameters(weights, config, None))
    return out["y"], out.get("stats")


def rows(
    x: BFloat16[Array, "rows hidden"],
    expert_ids: Int32[Array, " rows"],
    row_weights: Float32[Array, " rows"],
    weights: ExpertWeights,
    *,
    config: MoEConfig,
    route: GroupedRoute,
    axis: Axis,
) -> BFloat16[Array, "rows hidden"]:
    """Each row through one local expert: a rank's part between two exchanges.

    Args:
        x: rows from all ranks.
        expert_ids: int32, local; out of range for rows that are none, which come out 0.
        row_weights: the top-k weight; multiplies where the recipe weighs before the second matmul.
        weights, config, route: as of `moe`; one rank's experts.
        axis: the manual mesh axis (axes) of expert parallelism.
    """
    local = weights.routed.w13_weight.shape[0]
    described = dataclasses.replace(
        _described(config, route, weights, x.shape[0]), top_k=1, num_logical=local
    )
    if described.weighs_in_combine:
        row_weights = jnp.ones_like(row_weights)
    operands = launcher.token_operands(x, expert_ids[:, None], row_weights[:, None])
    return launch_layer(described, operands | _parameters(weights, config, axis))["y"]


def _parameters(weights: ExpertWeights, config: MoEConfig, axis: Axis | None) -> dict[str, Array]:
    """The parameters by operand, where second inputs have one scale with it in their factor."""
    routed = weights.routed
    arrays = routed.arrays()
    if recipe_for(config, weights).activations.has_global_scale:
        scale = expert.input_scale(routed.w2_input_scale, axis)
        arrays["w2_weight_scale_2"] = routed.w2_weight_scale_2 * scale
        arrays["w2_input_scale"] = scale.reshape(1)
    return arrays


def launch_layer(described: GroupedLayer, operands: Mapping[str, Array]) -> dict[str, Array]:
    """One call by its operands; the plan's scratch is among the results."""
    counted = described.num_experts if described.stats else 0
    return launcher.launch_layer(layer.plan_grouped(described), operands, counted_experts=counted)
