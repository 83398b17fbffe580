"""The custom call: choose the kernel, get its buffer, launch it on each rank."""

import contextlib
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, BFloat16, Bool, Float32, Int32

from jax_megamoe import _checks, symmetric_memory
from jax_megamoe import compile as compiler
from jax_megamoe.config import MoEConfig
from jax_megamoe.launch import launcher
from jax_megamoe.launch.facts import facts
from jax_megamoe.mesh import Axis, axis_names
from jax_megamoe.numerics import expert
from jax_megamoe.plan import SOURCES, check_sizes, plan_mega_moe
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.launch import KernelLaunch, LaunchPlan
from jax_megamoe.plan.staging import Routing
from jax_megamoe.routing.replicas import ReplicaMap
from jax_megamoe.runtime import extension
from jax_megamoe.runtime.devices import device_spec
from jax_megamoe.weights.params import NVFP4_LAYOUTS, SGL_FP4, ExpertWeights, default_layout

_log = logging.getLogger("jax_megamoe")


@dataclass(frozen=True)
class Route:
    """How a config's calls reach the kernel: all that a launch needs beside the arrays.

    Attributes:
        device: the device kind, as far as a plan depends on it.
        source: where the kernel comes from.
        num_ranks: expert-parallel ranks.
        buffer_key: name of the symmetric buffer; the same in every process.
        fuses_shared: the kernel runs the shared expert that the weights hold, if any. Else the
            caller adds it.
    """

    device: DeviceSpec
    source: str
    num_ranks: int
    buffer_key: str
    fuses_shared: bool = True

    def plan(
        self,
        config: MoEConfig,
        num_tokens: int,
        routing: Routing | None = None,
        *,
        with_stats: bool = False,
    ) -> LaunchPlan:
        """The plan of a call with `num_tokens` rows on each rank, staged by this package.

        routing None: logical ids alone, without a padding mask or a replica map.
        """
        return plan_mega_moe(
            config if self.fuses_shared else _unfused(config),
            self.device,
            num_tokens,
            self.num_ranks,
            self.source,
            with_stats=with_stats,
            l2_activation_scale=None,
            routing=routing or Routing(num_logical=config.logical_experts),
            staging_by="jax_megamoe",
        )


def check_supported(config: MoEConfig, device: jax.Device | DeviceSpec, num_ranks: int = 1) -> str:
    """Whether `deep_gemm` can run a config on a device like this one.

    Args:
        config: the layer.
        device: the device of each rank, or what a plan depends on of one that is not here.
        num_ranks: expert-parallel ranks.

    Returns:
        The source of the kernel, ``"sgl"`` or ``"vllm"``.

    Raises:
        NotImplementedError: the device, or the format or activation on it.
        ValueError: sizes out of the kernel's limits, which the message names.
    """
    spec = device if isinstance(device, DeviceSpec) else device_spec(device, config.reserved_sms)
    return _kernel_source(config, spec, num_ranks, default_layout(config))


def allocate_buffers(
    config: MoEConfig, *, mesh: Mesh | None = None, axis: Axis | None = None
) -> None:
    """Allocates the symmetric buffer of a config's calls, before the first one.

    `mega_moe` does this itself where it is told the mesh. Call it where only the caller's
    `shard_map` knows the mesh: on every process, in the same order. A shared expert that the
    kernel does not run (a function, or one beside sgl's NVFP4) is not in the buffer: allocate for
    the config with num_shared_experts 0.

    Args:
        config: the layer.
        mesh: the mesh; None for calls without an axis, on the default device.
        axis: the expert-parallel mesh axis, or several.

    Raises:
        NotImplementedError, ValueError: as `check_supported`.
        RuntimeError: too little memory; the message has the bytes needed and free.
    """
    if mesh is None:
        groups = [[default_device()]]
    elif axis is not None:
        groups = symmetric_memory.groups_of(mesh, axis)
    else:
        raise ValueError(_checks.message("axis", "the expert-parallel axis of the mesh", None))
    find_route(config, groups, axis)


def find_route(
    config: MoEConfig,
    groups: Sequence[Sequence[jax.Device]] | None,
    axis: Axis | None,
    *,
    num_ranks: int = 1,
    weights: ExpertWeights | None = None,
    num_tokens: int = 0,
) -> Route:
    """The route of a config's calls over `groups` of devices, its kernels compiled and its buffer
    allocated.

    Args:
        config: the layer.
        groups: the devices of each expert-parallel group in rank order; None inside a `shard_map`
            whose mesh is not known: the buffer must have been allocated.
        axis: the expert-parallel axis, which names the buffer.
        num_ranks: ranks, where groups is None.
        weights: the parameters, checked before anything is allocated; NVFP4's row order says whose
            kernel they are for, and sgl's leaves a shared expert to the caller, with one line in
            the log. None: any in the config's default order.
        num_tokens: rows of a rank's call, whose kernels are compiled before anything is allocated;
            0: none are yet.

    Raises:
        NotImplementedError, ValueError, RuntimeError: as `allocate_buffers`; parameters that no
            kernel takes.
        ImportError: the compiled module is missing.
        BuildError: a kernel cannot be had; `MissingDependency` where its source or a compiler is
            not installed.
    """
    extension.module()
    device = jax.local_devices()[0] if groups is None else groups[0][0]
    ranks = num_ranks if groups is None else len(groups[0])
    spec = device_spec(device, config.reserved_sms)
    order = default_layout(config) if weights is None else weights.layout
    fuses = _fuses_shared(config, weights)
    routed = config if fuses else _unfused(config)
    source = _kernel_source(routed, spec, ranks, order)
    if weights is not None:
        _check_parameters(config, weights, source)
    source = _found_source(routed, spec, ranks, source)
    if weights is not None and weights.shared is not None and not fuses:
        _log_unfused(config)
    layout = plan_mega_moe(routed, spec, 0, ranks, source).buffer
    names = "+".join(axis_names(axis)) or "none"
    name = f"{names}/{ranks}/{layout.fingerprint(source)}/"
    if groups is None:
        key = _allocated_key(name)
    else:
        ids = [[device.id for device in group] for group in groups]
        key = name + hashlib.sha256(str(ids).encode()).hexdigest()[:16]
    route = Route(spec, source, ranks, key, fuses)
    build = partial(_build, route.plan(config, num_tokens)) if num_tokens else None
    if groups is not None:
        told = partial(facts, routed, source)
        symmetric_memory.allocate(key, layout.num_bytes, groups, facts=told, prepare=build)
    if build is not None:
        build()  # where the buffer was there
    return route


def _build(plan: LaunchPlan) -> None:
    """Has the kernels of a plan compiled, or read from the cache."""
    for step in plan.steps:
        if isinstance(step, KernelLaunch):
            compiler.build(step.kernel)


def runnable_layout(config: MoEConfig, layout: str, device: jax.Device) -> str:
    """The row order that parameters of `layout` should have on this machine.

    Another one than theirs for NVFP4 on a device that runs it, when the kernel source of theirs is
    not installed or cannot, the other can, and the config forces neither.
    """
    if config.weight_format.name != "nvfp4" or config.kernel_source is not None:
        return layout
    for each in (layout, *NVFP4_LAYOUTS.values()):
        with contextlib.suppress(NotImplementedError, ValueError, compiler.MissingDependency):
            spec = device_spec(device, config.reserved_sms)
            compiler.find_source(_kernel_source(_unfused(config), spec, 1, each))
            return each
    return layout


def _fuses_shared(config: MoEConfig, weights: ExpertWeights | None) -> bool:
    """Whether the kernel runs a shared expert: not if there is none in the weights, nor if their
    order is that of sgl's NVFP4 kernel, which fuses none, and the config does not insist on it."""
    if not config.num_shared_experts or weights is None:
        return True
    return weights.shared is not None and (
        weights.layout != SGL_FP4 or config.kernel_source is not None
    )


def _unfused(config: MoEConfig) -> MoEConfig:
    return replace(config, num_shared_experts=0)


@lru_cache
def _log_unfused(config: MoEConfig) -> None:
    """Says once for each config why its shared expert is not fused."""
    _log.warning(
        "%s runs its shared expert unfused: sgl's NVFP4 kernel, whose row order the weights have, "
        "fuses none; vllm's does (python -m jax_megamoe sources fetch vllm, then "
        "jax_megamoe.to_layout(weights, 'interleave8'))",
        config,
    )


def _kernel_source(config: MoEConfig, device: DeviceSpec, num_ranks: int, layout: str) -> str:
    """The source of the kernel, whose NVFP4 row order the weights have."""
    nvfp4, source = config.weight_format.name == "nvfp4", config.kernel_source
    if nvfp4 and source is None:
        source = next(name for name, order in NVFP4_LAYOUTS.items() if order == layout)
    return check_sizes(config, device, num_ranks, source)


def _found_source(config: MoEConfig, device: DeviceSpec, num_ranks: int, first: str) -> str:
    """`first`, or another source that can run the config as well, if that alone is installed.

    Raises:
        MissingDependency: none is; says how to get `first`.
    """
    free = config.kernel_source is None and config.weight_format.name != "nvfp4"
    try:
        compiler.find_source(first)
        return first
    except compiler.MissingDependency as missing:
        for other in SOURCES if free else ():
            try:
                check_sizes(config, device, num_ranks, other)
                compiler.find_source(other)
            except (NotImplementedError, ValueError, compiler.MissingDependency):
                continue
            return other
        if config.weight_format.name == "nvfp4" and config.kernel_source is None:
            other = next(name for name in NVFP4_LAYOUTS if name != first)
            call = f"jax_megamoe.to_layout(weights, {NVFP4_LAYOUTS[other]!r})"
            raise compiler.MissingDependency(f"{missing}; or {call} for {other}'s kernel") from None
        raise


def _allocated_key(name: str) -> str:
    """The one buffer of that name, over whichever devices."""
    keys = symmetric_memory.keys(name)
    if len(keys) == 1:
        return keys[0]
    got, hint = f"None, and {len(keys)} meshes with buffers", "pass mesh= too"
    if not keys:
        call = "jax_megamoe.allocate_buffers(config, mesh=mesh, axis=axis)"
        got, hint = "None", f"{hint}, or call {call} once before"
    expected = "the mesh of the shard_map around this call"
    raise ValueError(_checks.message("mesh", expected, got, hint))


def default_device() -> jax.Device:
    """The device of calls without an axis whose arrays do not say."""
    chosen: jax.Device | str | None = getattr(jax.config, "jax_default_device")
    if isinstance(chosen, jax.Device):
        return chosen
    return jax.local_devices(backend=chosen)[0]


def _check_parameters(config: MoEConfig, weights: ExpertWeights, source: str) -> None:
    """Checks what the kernels ask of parameters beyond their shapes."""
    if weights.w13_bias is not None or weights.w2_bias is not None:
        expected = "no biases for implementation deep_gemm"
        raise NotImplementedError(
            _checks.message("weights", expected, "w13_bias and w2_bias", "use xla")
        )
    if config.weight_format.name == "nvfp4":
        layout = NVFP4_LAYOUTS[source]
        if weights.layout != layout:
            raise ValueError(
                _checks.message(
                    "weights.layout",
                    f"{layout!r} for the kernel source {source}",
                    repr(weights.layout),
                    f"jax_megamoe.to_layout(weights, {layout!r}) moves them",
                )
            )


def moe(
    x: BFloat16[Array, "tokens hidden"],
    topk_ids: Int32[Array, "tokens top_k"],
    topk_weights: Float32[Array, "tokens top_k"],
    weights: ExpertWeights,
    *,
    config: MoEConfig,
    route: Route,
    axis: Axis | None = None,
    padding_mask: Bool[Array, " tokens"] | None = None,
    eplb: ReplicaMap | None = None,
    with_stats: bool = False,
) -> tuple[BFloat16[Array, "tokens hidden"], Int32[Array, " experts"] | None]:
    """One staging launch and one kernel launch on one rank.

    The staging kernel is this package's: it masks padding and ids out of range and chooses
    replicas while it quantises, so that XLA runs nothing before it (staging_h200.md has its times
    beside sgl's).

    Args:
        x: bfloat16 [T, H].
        topk_ids: int32 [T, K], logical ids.
        topk_weights: float32 [T, K].
        weights: this rank's parameters.
        config: the layer.
        route: from `find_route`.
        axis: the manual mesh axis (axes) of expert parallelism; None on one rank.
        padding_mask: bool [T], True for rows that are no tokens.
        eplb: where replicas are; None: slot p holds logical expert p % num_logical_experts.
        with_stats: count tokens of each local expert.

    Returns:
        bfloat16 [T, H], and int32 [E] or None.
    """
    arrays = weights.arrays()
    if not route.fuses_shared:
        arrays = {name: a for name, a in arrays.items() if not name.startswith("shared_")}
    operands = {"x": x, "topk_ids": topk_ids, "topk_weights": topk_weights} | arrays
    if padding_mask is not None:
        operands["padding_mask"] = padding_mask
    if eplb is not None:
        operands["logical_to_physical"] = eplb.logical_to_physical
        operands["num_replicas"] = eplb.num_replicas
    if config.weight_format.weight.has_global_scale:
        operands |= _factors(weights, route.source, axis)
    results = {"y": jax.ShapeDtypeStruct(x.shape, x.dtype)}
    if with_stats:
        operands["stats"] = jnp.zeros(weights.w13_weight.shape[0], jnp.int32)
        results["stats"] = jax.ShapeDtypeStruct(operands["stats"].shape, jnp.int32)
    routing = Routing(
        num_logical=config.logical_experts,
        padding_mask=padding_mask is not None,
        max_replicas=0 if eplb is None else eplb.logical_to_physical.shape[1],
    )
    plan = route.plan(config, x.shape[0], routing, with_stats=with_stats)
    results |= {name: jax.ShapeDtypeStruct(*like) for name, *like in plan.scratch}
    _build(plan)
    out = launcher.launch(plan, operands, results, buffer_key=route.buffer_key, command_buffer=True)
    return out["y"], out.get("stats")


def _factors(weights: ExpertWeights, source: str, axis: Axis | None) -> dict[str, Array]:
    """NVFP4's float32 factors as a source's kernels multiply by them.

    w2_weight_scale_2 [E] takes back the one scale of second inputs. sgl also: w13_weight_scale_2
    [E, 2] for gate and up; w2_input_scale [E], the inverse of that scale. vllm also:
    l2_activation_scale [1], the scale itself.
    """
    scale = expert.input_scale(weights.w2_input_scale, axis)
    first, second = weights.w13_weight_scale_2, weights.w2_weight_scale_2
    if source == "vllm":
        return {"w2_weight_scale_2": second * scale, "l2_activation_scale": scale.reshape(1)}
    return {
        "w13_weight_scale_2": jnp.stack([first, first], axis=-1),
        "w2_input_scale": jnp.ones_like(second) / scale,
        "w2_weight_scale_2": second * scale,
    }
