"""From a config to a plan, with exceptions for refusals: an edge of `plan/`."""

from functools import lru_cache

from jax_megamoe import _checks
from jax_megamoe.config import MoEConfig
from jax_megamoe.plan import choice, families
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.kernel_family import KernelFamily, Request
from jax_megamoe.plan.launch import LaunchPlan
from jax_megamoe.plan.refusal import Refusal
from jax_megamoe.plan.staging import Routing


# Cached: a call is planned at each trace and by several callers (launch, buffer size, doctor).
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
        source: of the kernel; None: the config's kernel_source, or the first that can.
        with_stats: tokens per local expert are added to ``stats``.
        l2_activation_scale: NVFP4 of the vllm source: the scale of every layer-2 input, by value.
            None: the kernel reads it from an operand of this name, float32 [1], and
            ``w2_weight_scale_2`` is multiplied by it already.
        routing: what topk_ids are; None: physical ids, -1 where unrouted.
        staging_by: one of `STAGINGS`; None: the source's kernel where it has one that does all
            that is asked for, else this package's. With ``"none"`` the caller fills the regions
            that the plan's `unstaged` names, and ``l2_alpha`` is an operand. In
            ``shared_l1_acts_sf`` each plan.block_m tokens have a page, its rows rounded up to 128:
            row 32 j + i of 128 lies at 4 i + j.

    Raises:
        ValueError: sizes out of the kernel's limits, named with the limit; a staging kernel that
            the source does not have, or that does not do what is asked for.
        NotImplementedError: a device, format, activation or shared expert that no source has.
    """
    _checks.integer("num_tokens", num_tokens)
    _checks.integer("num_ranks", num_ranks, minimum=1)
    _checks.at_most("num_tokens", num_tokens, config.max_num_tokens, "max_num_tokens")
    if routing is not None:
        _checks.at_most("num_logical", routing.num_logical, config.num_experts, "num_experts")
    request = Request(
        config=config,
        device=device,
        num_ranks=num_ranks,
        num_tokens=num_tokens,
        with_stats=with_stats,
        l2_activation_scale=l2_activation_scale,
        routing=routing,
        staging_by=staging_by,
    )
    # Checked again for this call: the family may be one that cannot run every token count.
    family = _family(config, device, num_ranks, source)
    broken = next(family.refusals(request), None)
    if broken is not None:
        raise broken.error()
    return family.plan(request)


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
    _checks.integer("num_ranks", num_ranks, minimum=1)
    chosen = choice.choose(config, device, num_ranks, source=source)
    if isinstance(chosen, Refusal):
        raise chosen.error()
    assert not isinstance(chosen, choice.Absent)
    return chosen.source


def _family(
    config: MoEConfig, device: DeviceSpec, num_ranks: int, source: str | None
) -> KernelFamily:
    """The first family that can run every call, else the first: it may run this one."""
    chosen = choice.choose(config, device, num_ranks, source=source)
    if isinstance(chosen, choice.Absent):
        return chosen.family
    if not isinstance(chosen, Refusal):
        return chosen
    found = families.candidates(config, source)
    if not found:
        raise chosen.error()
    # A family of this architecture gives the error that helps; another would name the device.
    return min(found, key=lambda family: not family.runs_on(device))
