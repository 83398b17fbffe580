"""From a config to a plan: source, kernel, limits, and the steps of a call."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from jax_megamoe import _checks
from jax_megamoe.config import SGL_SWIGLU, Activation, MoEConfig
from jax_megamoe.plan import (
    heuristics,
    limits,
    sgl_sm90,
    sgl_sm100,
    sm90_heuristics,
    staging,
    vllm_nvfp4,
    vllm_sm100,
)
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.family import Family
from jax_megamoe.plan.launch import Fill, KernelLaunch, LaunchPlan
from jax_megamoe.plan.operand import SYMMETRIC_BUFFER, Operand
from jax_megamoe.plan.problem import Problem
from jax_megamoe.plan.sm100 import LOCALITY_TABLE, locality_table
from jax_megamoe.plan.staging import Routing
from jax_megamoe.plan.symmetric_buffer import (
    READY_BYTES,
    READY_OFFSET,
    BufferLayout,
    sm90_layout,
    sm100_layout,
)

SOURCES = ("sgl", "vllm")
"""Sources of kernels, the preferred one first."""

_SGL_SITU = (4.0, 25.0)
STAGINGS = ("source", "jax_megamoe", "none")
"""Who stages a call's inputs: a kernel of the kernel's source, this package's, or the caller."""

_TILE_HEIGHTS = (16, 32, 64, 128, 192, 240)

_FAMILIES: Mapping[tuple[str, str], Family] = {
    ("sgl", "mxfp4"): sgl_sm100.FP8,
    ("sgl", "mxfp8"): sgl_sm100.FP8,
    ("sgl", "nvfp4"): sgl_sm100.NVFP4,
    ("sgl", "bf16"): sgl_sm100.BF16,
    ("vllm", "mxfp4"): vllm_sm100.FP8,
    ("vllm", "mxfp8"): vllm_sm100.FP8,
    ("vllm", "nvfp4"): vllm_nvfp4.NVFP4,
    ("vllm", "bf16"): vllm_sm100.BF16,
}


@lru_cache(maxsize=1024)
def plan_mega_moe(
    config: MoEConfig,
    device: DeviceSpec,
    num_tokens: int,
    num_ranks: int,
    source: str | None = None,
    *,
    with_stats: bool = False,
    l2_activation_scale: float | None = 1.0,
    routing: Routing | None = None,
    staging_by: str | None = None,
) -> LaunchPlan:
    """The plan of one call on one rank.

    Operands: ``x`` bfloat16 [T, H], ``topk_ids`` int32 [T, K], ``topk_weights`` float32 [T, K],
    those of `routing`, the fields of ExpertWeights, ``y`` bfloat16 [T, H], ``stats`` int32 [experts
    of this rank] and ``symmetric_buffer``. T = 0 is a launch like any other: peers wait for it.
    Every rank plans for the same T and masks rows that are no tokens: SM90 ranks planned for 512
    and for 0 tokens hung on an H200.

    A plan starts with a kernel that quantises x into the buffer and takes the routing over. Plans
    of the vllm source over several ranks have a fill before it, which makes them repeatable.

    NVFP4's float32 factors differ by source: sgl takes ``w13_weight_scale_2`` as [experts, 2]
    (gate, up) and ``w2_input_scale`` per expert; vllm takes [experts], and ``l2_alpha`` [experts],
    which is scratch of the plan, from ``w2_weight_scale_2``.

    Args:
        source: ``"sgl"`` or ``"vllm"``; None: the config's kernel_source, or the first that can.
        with_stats: tokens per local expert are added to ``stats``.
        l2_activation_scale: NVFP4 of the vllm source: the scale of every layer-2 input, by value.
            None: the kernel reads it from an operand of this name, float32 [1], and
            ``w2_weight_scale_2`` is multiplied by it already.
        routing: what topk_ids are; None: physical ids, -1 where unrouted.
        staging_by: one of `STAGINGS`; None: the source's kernel where it has one that does all
            that is asked for, else this package's. With ``"none"`` the caller fills the regions
            that the plan's `unstaged` names (in ``shared_l1_acts_sf`` a token's words lie in row
            `scale_row(token, plan.block_m)`), and ``l2_alpha`` is an operand.

    Raises:
        ValueError: sizes out of the kernel's limits, named with the limit; a staging kernel that
            the source does not have, or that does not do what is asked for.
        NotImplementedError: a device, format, activation or shared expert that no source has.
    """
    _checks.integer("num_tokens", num_tokens)
    _checks.at_most("num_tokens", num_tokens, config.max_num_tokens, "max_num_tokens")
    source = _source(config, device, num_ranks, source)
    problem = _problem(config, num_tokens, num_ranks, source)
    problem = replace(problem, stats=with_stats, l2_activation_scale=l2_activation_scale)
    _raise_first(_violations(config, problem, device, source))
    if routing is not None:
        _checks.at_most("num_logical", routing.num_logical, config.num_experts, "num_experts")
    family = None if config.weight_format.name == "fp8_block" else _family(config, source)
    return _plan(
        family, problem, device, routing, _staging_by(family, problem, routing, staging_by)
    )


@lru_cache(maxsize=256)
def check_sizes(
    config: MoEConfig, device: DeviceSpec, num_ranks: int, source: str | None = None
) -> str:
    """Whether every call of a config, with 0 to max_num_tokens tokens, can be planned.

    Returns:
        The source of the kernel.

    Raises:
        ValueError: sizes out of the kernel's limits, named with the limit.
        NotImplementedError: a device, format, activation or shared expert that no source has.
    """
    source = _source(config, device, num_ranks, source)
    _raise_first(_all_violations(config, device, num_ranks, source))
    return source


def _raise_first(violations: Iterator[Exception]) -> None:
    broken = next(violations, None)
    if broken is not None:
        raise broken


@lru_cache(maxsize=256)
def _source(config: MoEConfig, device: DeviceSpec, num_ranks: int, source: str | None) -> str:
    """The source asked for; else the first whose kernel can run the config, else the first."""
    _checks.integer("num_ranks", num_ranks, minimum=1)
    asked = source or config.kernel_source
    if asked is not None:
        _checks.one_of("source", asked, SOURCES)
        return asked
    for candidate in SOURCES:
        if next(_all_violations(config, device, num_ranks, candidate), None) is None:
            return candidate
    return SOURCES[0]


def _family(config: MoEConfig, source: str) -> Family:
    if source == "vllm" and config.activation.name == "situ":
        return vllm_sm100.SITU
    return _FAMILIES[source, config.weight_format.name]


def _activation(activation: Activation, source: str) -> str | None:
    """The source's name of an activation; None where sgl has no such parameters."""
    parameters = activation.alpha, activation.beta
    if source == "vllm":
        return activation.name
    if activation.name == "situ":
        return "situ" if parameters == _SGL_SITU else None
    return SGL_SWIGLU.get(parameters)


def _problem(config: MoEConfig, num_tokens: int, num_ranks: int, source: str) -> Problem:
    nvfp4 = config.weight_format.name == "nvfp4"
    return Problem(
        num_ranks=num_ranks,
        num_experts=config.num_experts,
        top_k=config.top_k,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        max_num_tokens=config.max_num_tokens,
        num_tokens=num_tokens,
        # Under shard_map every rank has as many rows, so the most tokens of any rank are known.
        num_tokens_bound=num_tokens if config.weight_format.name == "fp8_block" else 0,
        weight_format=config.weight_format.name,
        num_shared_experts=config.num_shared_experts,
        shared_format=config.shared_format if config.num_shared_experts else None,
        activation=_activation(config.activation, source) or config.activation.name,
        clamp=config.activation.clamp,
        alpha=config.activation.alpha,
        beta=config.activation.beta,
        fast_math=config.fast_math,
        x_scales=nvfp4,
        l1_alphas=nvfp4,
        l2_alphas=nvfp4,
        l2_act_scales=nvfp4,
    )


def _violations(
    config: MoEConfig, problem: Problem, device: DeviceSpec, source: str
) -> Iterator[Exception]:
    """Limits that a plan for this number of tokens breaks."""
    sm90 = config.weight_format.name == "fp8_block"
    if sm90 and source != "sgl":
        yield NotImplementedError(_checks.message("source", "sgl for fp8_block", source))
    if _activation(config.activation, source) is None:
        known = f"(alpha, beta) one of {[*SGL_SWIGLU]} for swiglu, {_SGL_SITU} for situ"
        got = f"{config.activation.name} {config.activation.alpha, config.activation.beta}"
        hint = "the vllm source takes any"
        yield NotImplementedError(_checks.message("activation of sgl", known, got, hint))
    if sm90:
        yield from limits.sm90_violations(problem, device)
    else:
        yield from limits.sm100_violations(_family(config, source), problem, device)


def _staging_by(
    family: Family | None, problem: Problem, routing: Routing | None, asked: str | None
) -> str:
    """Which of `STAGINGS` a plan has, None being a family of SM90."""
    exists = family is None or (family.source == "sgl" and family.scale_block > 0)
    fits = problem.hidden_size <= limits.MAX_STAGED_HIDDEN
    suffices = exists and fits and routing is None and not problem.num_shared_experts
    if asked is None:
        return "source" if suffices else "jax_megamoe"
    _checks.one_of("staging_by", asked, STAGINGS)
    if asked == "source" and not suffices:
        expected = f"jax_megamoe for this call of {problem.weight_format}"
        hint = (
            f"sgl's kernels stage physical ids and scaled tokens of at most "
            f"{limits.MAX_STAGED_HIDDEN} values, without a shared expert"
        )
        raise ValueError(_checks.message("staging_by", expected, asked, hint))
    return asked


def _all_violations(
    config: MoEConfig, device: DeviceSpec, num_ranks: int, source: str
) -> Iterator[Exception]:
    """Limits that a plan for any number of tokens breaks."""
    empty = _problem(config, 0, num_ranks, source)
    yield from _violations(config, empty, device, source)
    every = range(config.max_num_tokens + 1)
    if config.weight_format.name == "fp8_block":
        # The tile height and the batch size change once each; stages depend on nothing else.
        changes = (64 * config.num_experts // (num_ranks * config.top_k), 8192)
        for num_tokens in (*changes, *(change + 1 for change in changes), config.max_num_tokens):
            if num_tokens in every:
                yield from limits.sm90_violations(replace(empty, num_tokens=num_tokens), device)
        return
    family = _family(config, source)
    for height in _TILE_HEIGHTS:
        for broken in limits.sm100_tile_violations(family, empty, device, height):
            reached = (
                heuristics.block_m(family, replace(empty, num_tokens=num_tokens), device)
                for num_tokens in every
            )
            if height in reached:
                yield broken


def _plan(
    family: Family | None,
    problem: Problem,
    device: DeviceSpec,
    routing: Routing | None,
    staging_by: str,
) -> LaunchPlan:
    """The plan of a family; None: SM90."""
    if family is None:
        layout, mega = sm90_layout(problem), sgl_sm90.mega_launch(problem, device)
        height = sm90_heuristics.schedule(problem, device).block_m
    else:
        layout = sm100_layout(family, problem, device.num_sms)
        mega = mega_launch(family, problem, device)
        height = heuristics.block_m(family, problem, device)
    steps: list[KernelLaunch | Fill] = []
    if mega.kernel.source == "vllm" and problem.num_ranks > 1:
        # Graph replays repeat the grid ids that this source's kernels mark ready words with.
        steps.append(Fill(Operand(SYMMETRIC_BUFFER, READY_OFFSET), READY_BYTES))
    if staging_by == "source":
        steps.append(_own_staging(family, problem, layout))
    elif staging_by == "jax_megamoe":
        steps.append(staging.staging_launch(problem, layout, mega, height, routing))
    steps.append(mega)
    table = family is not None and family.locality_table
    return LaunchPlan(
        tuple(steps),
        layout,
        problem.num_ranks,
        height,
        constants=((LOCALITY_TABLE, locality_table(device.all_sms)),) if table else (),
        unstaged=staging.input_regions(problem, layout) if staging_by == "none" else (),
        scratch=staging.scratch(problem, mega) if staging_by == "jax_megamoe" else (),
    )


def _own_staging(family: Family | None, problem: Problem, layout: BufferLayout) -> KernelLaunch:
    """The sgl source's staging kernel for a family; None: SM90."""
    if family is None:
        return sgl_sm90.staging_launch(problem, layout)
    return sgl_sm100.staging_launch(family, problem, layout)


def mega_launch(family: Family, problem: Problem, device: DeviceSpec) -> KernelLaunch:
    """An SM100 family's kernel from dispatch to combine. Limits are not checked here."""
    if family.source == "sgl":
        return sgl_sm100.mega_launch(family, problem, device)
    if family in (vllm_nvfp4.NVFP4, vllm_nvfp4.FP4_FP4):
        return vllm_nvfp4.mega_launch(family, problem, device)
    return vllm_sm100.mega_launch(family, problem, device)
