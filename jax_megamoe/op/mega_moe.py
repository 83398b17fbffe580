"""`mega_moe`: check the arguments, choose an implementation, call it."""

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, BFloat16, Bool, Float32, Int32

from jax_megamoe import _checks, symmetric_memory
from jax_megamoe.config import MoEConfig, check_config
from jax_megamoe.formats import GROUPED_LAYOUTS
from jax_megamoe.launch import deep_gemm, grouped, measured
from jax_megamoe.mesh import device_of, explicit_mesh, gathered
from jax_megamoe.op.shardings import check_num_tokens, check_shardings, say_what_is_unseen
from jax_megamoe.op.staged_tokens import check_tokens
from jax_megamoe.op.transforms import (
    Axis,
    Call,
    Parameters,
    Place,
    Result,
    Tokens,
    add_shared,
    place_of,
    run,
    zero_padding,
)
from jax_megamoe.plan import families
from jax_megamoe.plan.refusal import Refusal
from jax_megamoe.routing.replicas import ReplicaMap
from jax_megamoe.routing.stats import capture
from jax_megamoe.weights.params import ExpertWeights, check_weights

GROUPED = "grouped"
PORTABLE = ("xla", "reference")
"""Implementations without a kernel; kernel families name the others, GROUPED apart."""

Counted = tuple[BFloat16[Array, "tokens hidden"], Int32[Array, " experts"]]
"""What a call with return_stats returns: y and the tokens of each local physical expert. A plain
tuple, for which the caller's `shard_map` takes a tuple of out_specs."""

_log = logging.getLogger("jax_megamoe")


@overload
def mega_moe(
    x: BFloat16[Array, "tokens hidden"],
    topk_ids: Int32[Array, "tokens top_k"],
    topk_weights: Float32[Array, "tokens top_k"],
    weights: ExpertWeights,
    *,
    config: MoEConfig,
    mesh: Mesh | None = None,
    axis: Axis | None = None,
    token_axes: Axis | None = None,
    padding_mask: Bool[Array, " tokens"] | None = None,
    eplb: ReplicaMap | None = None,
    shared_experts: Callable[[Array], Array] | None = None,
    implementation: str | None = None,
    return_stats: Literal[False] = False,
    name: str = "mega_moe",
) -> BFloat16[Array, "tokens hidden"]: ...


@overload
def mega_moe(
    x: BFloat16[Array, "tokens hidden"],
    topk_ids: Int32[Array, "tokens top_k"],
    topk_weights: Float32[Array, "tokens top_k"],
    weights: ExpertWeights,
    *,
    config: MoEConfig,
    mesh: Mesh | None = None,
    axis: Axis | None = None,
    token_axes: Axis | None = None,
    padding_mask: Bool[Array, " tokens"] | None = None,
    eplb: ReplicaMap | None = None,
    shared_experts: Callable[[Array], Array] | None = None,
    implementation: str | None = None,
    return_stats: Literal[True],
    name: str = "mega_moe",
) -> Counted: ...


def mega_moe(  # noqa: PLR0913 (one keyword for each thing a call may need)
    x: BFloat16[Array, "tokens hidden"],
    topk_ids: Int32[Array, "tokens top_k"],
    topk_weights: Float32[Array, "tokens top_k"],
    weights: ExpertWeights,
    *,
    config: MoEConfig,
    mesh: Mesh | None = None,
    axis: Axis | None = None,
    token_axes: Axis | None = None,
    padding_mask: Bool[Array, " tokens"] | None = None,
    eplb: ReplicaMap | None = None,
    shared_experts: Callable[[Array], Array] | None = None,
    implementation: str | None = None,
    return_stats: bool = False,
    name: str = "mega_moe",
) -> BFloat16[Array, "tokens hidden"] | Counted:
    """Routed experts of one MoE layer: dispatch, both matmuls, the activation and the combine.

    There are three ways to call it. On one device, without an axis. Outside `shard_map`, with
    `mesh` (or the current one, `jax.set_mesh`) and `axis`: x is the global array, and the axis
    splits its rows. Inside the caller's `shard_map`, with `axis`: everything is this rank's part.
    Every rank must make the call, if only with padding.

    A top-k weight of 0 does not mask an expert (0 times an overflowed hidden value is NaN, as in
    the kernels): use the id -1.

    Derivatives: `xla`, `reference` and `grouped`, whose backward pass is `xla`'s, have reverse-mode
    gradients for `x` and `topk_weights`, and for what `shared_experts` closes over. They are
    straight-through: every rounding, to BF16 and to a block format, counts as the identity, also
    where it saturates. Parameters are constants (float ones get zeros). The backward pass
    quantises, exchanges and multiplies again, an expert at a time; only the arguments are kept for
    it. `deep_gemm` has none and says so.

    `jax.vmap` over tokens, ids, top-k weights and masks makes one call with the rows of all
    elements, which together must not exceed max_num_tokens; over weights or `eplb`, or with
    `return_stats`, it is refused.

    Args:
        x: bfloat16 [T, H]; T at most config.max_num_tokens on each rank, and may be 0.
        topk_ids: int32 [T, K], logical expert ids; -1 for unrouted. Ids out of range raise when
            the array is concrete and are unrouted when it is traced. Duplicates both count;
            `deep_gemm` has room for max_num_tokens slots of one rank at one expert, which only
            duplicates can exceed: a router that repeats an expert in many tokens must use `xla`.
        topk_weights: float32 [T, K].
        weights: the parameters; split over the axis along their first dimension.
        config: the layer.
        mesh: mesh that has the axis. Over its other axes, `token_axes` apart, every device group
            does all the work.
        axis: the expert-parallel mesh axis, or several.
        token_axes: mesh axes that split the rows of x, the expert-parallel ones among them, such as
            ``("data", "ep")``: each data group then works on its own tokens, at most
            max_num_tokens on each device. None: `axis`. Without effect inside `shard_map`.
        padding_mask: bool [T], True for rows that are no tokens: they are routed nowhere, counted
            nowhere, their output is 0 and their content has no effect.
        eplb: where replicas are; None: slot p holds logical expert p % num_logical_experts. A map
            with a slot out of range raises when it is concrete and routes nowhere when it is
            traced.
        shared_experts: an unfused shared expert: its value for x, padded rows 0, is added. An
            error where `weights` hold a fused one.
        implementation: ``"deep_gemm"``, ``"grouped"``, ``"xla"`` or ``"reference"``; None for the
            fastest that runs here with weights in this layout. A named one never falls back.
        return_stats: also return the tokens of each local expert.
        name: what a `capture_routing` callback is told.

    Returns:
        y, bfloat16 [T, H]; with return_stats (y, int32 [E]), E the local physical experts (all of
        them, sharded over the axis, outside `shard_map`).

    Raises:
        ValueError: a shape, id, axis, mesh or size that does not fit.
        TypeError: a dtype that does not fit.
        NotImplementedError: the named implementation cannot run here; a gradient of `deep_gemm`;
            a batch that `jax.vmap` cannot fold into tokens.
    """
    check_config(config, MoEConfig)
    place = place_of(config, mesh, axis, token_axes)
    result = call(
        Tokens(x, topk_ids, topk_weights, padding_mask),
        Parameters(weights, eplb),
        config=config,
        place=place,
        shared_experts=shared_experts,
        implementation=implementation,
        with_stats=return_stats,
        name=name,
    )
    return narrowed(result)


def narrowed(result: Result) -> BFloat16[Array, "tokens hidden"] | Counted:
    """(y, counts) where there are counts, else y."""
    y, counts = result
    return y if counts is None else (y, counts)


def call(
    tokens: Tokens,
    parameters: Parameters,
    *,
    config: MoEConfig,
    place: Place,
    shared_experts: Callable[[Array], Array] | None = None,
    implementation: str | None = None,
    with_stats: bool = False,
    name: str = "mega_moe",
    pads: bool = False,
) -> Result:
    """`mega_moe` at a known place, counts None without `with_stats`; with `pads` for any number of
    rows.

    Rows that fill up the parts of the place are routed nowhere and cut off again: neither
    `shared_experts` nor a `capture_routing` callback sees them.
    """
    weights, eplb = parameters
    check_tokens(*tokens, eplb, config=config)
    x, padding_mask = tokens.x, tokens.padding_mask
    num_tokens = x.shape[0]
    check_num_tokens(num_tokens, config, place, pads)
    local_experts = config.num_experts
    if place.inside:
        local_experts = config.experts_per_rank(place.num_ranks)
    check_weights(config, weights, local_experts)
    _check_shared(config, weights, shared_experts)
    check_shardings(place, tokens._asdict(), weights)
    say_what_is_unseen(place, x)
    chosen = _choose(config, weights, place, x, implementation)
    capture(name, tokens.topk_ids, padding_mask, None if place.inside else place.mesh)
    missing = 0 if place.inside else -num_tokens % place.num_parts
    launch: Callable[..., Any] = partial(run, call=chosen._replace(with_stats=with_stats))
    typed_by = explicit_mesh((tokens, parameters)) if place.axis is None else None
    if typed_by is not None:
        # Copies on the devices of an Explicit mesh, in a call that knows of none.
        launch = jax.sharding.auto_axes(launch, out_sharding=NamedSharding(typed_by, P()))
    y, counts = launch(_padded(tokens, missing), parameters)
    if missing:
        # Rows over Explicit axes can be cut only where their number divides: these are few.
        y = gathered(y)[:num_tokens]
    if shared_experts is not None:
        # NaN in a padded row would reach the gradients of what the function closes over.
        y = add_shared(y, shared_experts(zero_padding(x, padding_mask)), padding_mask)
    return y, counts


def _padded(tokens: Tokens, missing: int) -> Tokens:
    """The tokens with more rows that are routed nowhere."""
    if not missing:
        return tokens

    def pad(array: Array, fill: float) -> Array:
        widths = ((0, missing), *[(0, 0)] * (array.ndim - 1))
        return jnp.pad(array, widths, constant_values=np.asarray(fill, array.dtype))

    x, ids, weights, mask = tokens
    return Tokens(
        pad(x, 0), pad(ids, -1), pad(weights, 0), None if mask is None else pad(mask, True)
    )


def _check_shared(
    config: MoEConfig, weights: ExpertWeights, shared_experts: Callable[[Array], Array] | None
) -> None:
    if shared_experts is not None and weights.shared is not None:
        expected = "None: the weights hold a fused shared expert"
        raise ValueError(_checks.message("shared_experts", expected, "a function"))
    if config.num_shared_experts and shared_experts is None and weights.shared is None:
        raise ValueError(
            _checks.message(
                "shared_experts",
                f"a function, or fused shared weights, for config.num_shared_experts = "
                f"{config.num_shared_experts}",
                "neither",
                "use num_shared_experts=0 where the shared expert is computed elsewhere",
            )
        )


def _choose(
    config: MoEConfig, weights: ExpertWeights, place: Place, x: Any, implementation: str | None
) -> Call:
    """The implementation, and a kernel's route."""
    call = Call(config, place, "xla")
    is_symbolic = not isinstance(x.shape[0], int)
    if implementation in PORTABLE or (implementation is None and is_symbolic):
        return call._replace(implementation=implementation or "xla")
    if implementation is not None:
        known = (*families.implementations(), GROUPED, *PORTABLE)
        _checks.one_of("implementation", implementation, known)
    if is_symbolic:
        expected = "xla or reference for a symbolic number of tokens: launches are planned by it"
        raise NotImplementedError(_checks.message("implementation", expected, implementation))
    devices = _devices(place, x)
    by_layout = implementation is None and (
        weights.layout in GROUPED_LAYOUTS
        or grouped.stands_in(config, devices[0], weights, place.num_ranks)
    )
    if implementation is None:
        kernel = GROUPED if by_layout else "deep_gemm"
        fastest = _measured(call, x, devices[0].device_kind, (kernel, "xla"))
        if fastest == "xla":
            _log_measured(config, kernel)
            return call
    if by_layout or implementation == GROUPED:
        route = grouped.try_route(
            config, devices[0], weights, num_tokens=x.shape[0], num_ranks=place.num_ranks
        )
    else:
        route = _route(call, weights, x, devices, implementation)
    if not isinstance(route, Refusal):
        return call._replace(implementation=route.implementation, route=route)
    if implementation is not None:
        raise route.error()
    _log_fallback(config, route.reason)
    return call


def _devices(place: Place, x: Any) -> list[jax.Device]:
    """Those that a call without an axis runs on, each for itself; of another call, one. They are of
    one kind."""
    if place.axis is None and isinstance(x, jax.Array) and not isinstance(x, Tracer):
        return sorted(x.devices(), key=lambda device: device.id)
    return [device_of(place.mesh)]


def _measured(call: Call, x: Any, kind: str, able: tuple[str, ...]) -> str | None:
    """The implementation that was fastest on this kind of device for a call's recipe, ranks and
    tokens, see `measured`."""
    place = call.place
    num_tokens = place.rows_of_rank(x.shape[0])
    recipe, ranks = call.config.recipe.name, place.num_ranks
    return measured.fastest(measured.table(), kind, recipe, ranks, num_tokens, able)


@lru_cache
def _log_measured(config: MoEConfig, kernel: str) -> None:
    """Says once for each config that `xla` was faster than a kernel that may be there."""
    _log.info("%s runs implementation xla: faster than %s where measured", config, kernel)


@lru_cache
def _log_fallback(config: MoEConfig, reason: str) -> None:
    """Says once for each config and reason why it runs `xla`: loudly where a GPU is idle for it."""
    level = logging.WARNING if jax.default_backend() == "gpu" else logging.INFO
    _log.log(level, "%s runs implementation xla: %s", config, reason)


def _route(
    call: Call,
    weights: ExpertWeights,
    x: Any,
    devices: Sequence[jax.Device],
    implementation: str | None,
) -> deep_gemm.Route | Refusal:
    place = call.place
    if place.axis is None:
        groups = [[device] for device in devices]
    elif isinstance(place.mesh, Mesh):
        groups = symmetric_memory.groups_of(place.mesh, place.axis)
    else:
        groups = None
    return deep_gemm.try_route(
        call.config,
        groups,
        place.axis,
        num_ranks=place.num_ranks,
        weights=weights,
        num_tokens=place.rows_of_rank(x.shape[0]),
        implementation=implementation,
    )
