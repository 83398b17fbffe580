"""The custom call: choose the kernel, get its buffer, launch it on each rank."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
from jax.sharding import Mesh
from jaxtyping import Array, BFloat16, Bool, Float32, Int32

from jax_megamoe import _checks, symmetric_memory
from jax_megamoe import compile as compiler
from jax_megamoe.config import MoEConfig, check_config
from jax_megamoe.launch import launcher
from jax_megamoe.launch.factors import FACTORS
from jax_megamoe.launch.facts import facts
from jax_megamoe.launch.runnable import (
    Unavailable,
    fuses_shared,
    installed_family,
    log_unfused,
    unfused,
)
from jax_megamoe.mesh import Axis, axis_names, default_device
from jax_megamoe.plan import families, plan_mega_moe
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.kernel_family import KernelFamily
from jax_megamoe.plan.launch import LaunchPlan
from jax_megamoe.plan.refusal import Refusal, unfit
from jax_megamoe.plan.staging import Routing
from jax_megamoe.plan.symmetric_buffer import BufferLayout
from jax_megamoe.routing.replicas import ReplicaMap
from jax_megamoe.runtime import extension
from jax_megamoe.runtime.devices import spec_of
from jax_megamoe.weights.params import ExpertWeights, default_layout

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
        implementation: who launches, as `mega_moe` names it.
    """

    device: DeviceSpec
    source: str
    num_ranks: int
    buffer_key: str
    fuses_shared: bool = True
    implementation: str = "deep_gemm"

    def family(self, config: MoEConfig) -> KernelFamily:
        """The family of the kernel."""
        found = families.candidates(config, self.source, self.implementation)
        return next(each for each in found if each.runs_on(self.device))

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
            config if self.fuses_shared else unfused(config),
            self.device,
            num_tokens,
            self.num_ranks,
            self.source,
            with_stats=with_stats,
            l2_activation_scale=None,
            routing=routing or Routing(num_logical=config.logical_experts),
            staging_by="jax_megamoe",
        )


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
    check_config(config, MoEConfig)
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
    implementation: str | None = None,
) -> Route:
    """`try_route`, with an exception for a refusal.

    Raises:
        NotImplementedError, ValueError, RuntimeError: as `allocate_buffers`; parameters that no
            kernel takes.
        ImportError: the compiled module is missing.
        BuildError: a kernel cannot be had; `MissingDependency` where its source or a compiler is
            not installed.
    """
    route = try_route(
        config,
        groups,
        axis,
        num_ranks=num_ranks,
        weights=weights,
        num_tokens=num_tokens,
        implementation=implementation,
    )
    if isinstance(route, Refusal):
        raise route.error()
    return route


def try_route(
    config: MoEConfig,
    groups: Sequence[Sequence[jax.Device]] | None,
    axis: Axis | None,
    *,
    num_ranks: int = 1,
    weights: ExpertWeights | None = None,
    num_tokens: int = 0,
    implementation: str | None = None,
) -> Route | Refusal:
    """The route of a config's calls over `groups` of devices, its kernels compiled and its buffer
    allocated; or why no kernel runs them.

    Args:
        config: the layer.
        groups: the devices of each expert-parallel group in rank order; None inside a `shard_map`
            whose mesh is not known: the buffer must have been allocated.
        axis: the expert-parallel axis, which names the buffer.
        num_ranks: ranks, where groups is None.
        weights: the parameters, checked before anything is allocated; their row order says whose
            kernel they are for, and one that fuses no shared expert leaves it to the caller, with
            one line in the log. None: any in the config's default order.
        num_tokens: rows of a rank's call, whose kernels are compiled before anything is allocated;
            0: none are yet.
        implementation: the only one that may launch; None: any.

    Raises:
        RuntimeError: too little memory.
        BuildError: a kernel does not compile.
    """
    try:
        extension.module()
    except ImportError as error:
        return Unavailable(str(error), cause=error)
    device = jax.local_devices()[0] if groups is None else groups[0][0]
    ranks = num_ranks if groups is None else len(groups[0])
    spec = spec_of(device, config.reserved_sms)
    if isinstance(spec, Refusal):
        return spec
    fuses = fuses_shared(config, weights)
    routed = config if fuses else unfused(config)
    order = default_layout(config) if weights is None else weights.layout
    family = installed_family(
        routed, spec, ranks, weights, order=order, implementation=implementation
    )
    if isinstance(family, Refusal):
        return family
    if weights is not None and weights.shared is not None and not fuses:
        log_unfused(config, weights.layout)
    layout = plan_mega_moe(routed, spec, 0, ranks, family.source).buffer
    key = _buffer_key(layout, family.source, ranks, groups, axis)
    if isinstance(key, Refusal):
        return key
    route = Route(spec, family.source, ranks, key, fuses, family.implementation)
    build = partial(launcher.build, route.plan(config, num_tokens)) if num_tokens else None
    try:
        if groups is not None and layout.num_bytes:
            told = partial(facts, routed, family.source)
            symmetric_memory.allocate(key, layout.num_bytes, groups, facts=told, prepare=build)
        if build is not None:
            build()  # where the buffer was there
    except compiler.MissingDependency as error:
        return Unavailable(str(error), cause=error)
    return route


def _buffer_key(
    layout: BufferLayout,
    source: str,
    num_ranks: int,
    groups: Sequence[Sequence[jax.Device]] | None,
    axis: Axis | None,
) -> str | Refusal:
    """The name of a call's symmetric buffer, "" for none, or why none is allocated."""
    if not layout.num_bytes:
        return ""
    names = "+".join(axis_names(axis)) or "none"
    name = f"{names}/{num_ranks}/{layout.fingerprint(source)}/"
    if groups is None:
        return _allocated_key(name)
    ids = [[device.id for device in group] for group in groups]
    return name + hashlib.sha256(str(ids).encode()).hexdigest()[:16]


def _allocated_key(name: str) -> str | Refusal:
    """The one buffer of that name, over whichever devices."""
    keys = symmetric_memory.keys(name)
    if len(keys) == 1:
        return keys[0]
    got, hint = f"None, and {len(keys)} meshes with buffers", "pass mesh= too"
    if not keys:
        call = "jax_megamoe.allocate_buffers(config, mesh=mesh, axis=axis)"
        got, hint = "None", f"{hint}, or call {call} once before"
    expected = "the mesh of the shard_map around this call"
    return unfit("mesh", expected, got, hint)


def matrix_operands(weights: ExpertWeights, *, fuses_shared: bool) -> dict[str, Array]:
    """One rank's parameters by operand of a plan, the fused shared expert's if asked for."""
    operands = weights.routed.arrays()
    if fuses_shared and weights.shared is not None:
        operands |= {f"shared_{name}": array for name, array in weights.shared.arrays().items()}
    return operands


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
    operands = launcher.token_operands(x, topk_ids, topk_weights, padding_mask, eplb)
    operands |= matrix_operands(weights, fuses_shared=route.fuses_shared)
    if config.weight_format.weight.has_global_scale:
        operands |= FACTORS[route.family(config).factors](weights, axis)
    routing = Routing(
        num_logical=config.logical_experts,
        padding_mask=padding_mask is not None,
        max_replicas=0 if eplb is None else eplb.logical_to_physical.shape[1],
    )
    plan = route.plan(config, x.shape[0], routing, with_stats=with_stats)
    counted = weights.routed.w13_weight.shape[0] if with_stats else 0
    out = launcher.launch_layer(
        plan, operands, counted_experts=counted, buffer_key=route.buffer_key
    )
    return out["y"], out.get("stats")
