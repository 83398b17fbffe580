"""Launches of this package's staging kernel: a call's tokens and routing into the buffer."""

from dataclasses import dataclass

from jax_megamoe.plan.arithmetic import align, ceil_div
from jax_megamoe.plan.kernel import KernelSpec, LaunchConfig
from jax_megamoe.plan.launch import Float32, KernelLaunch, Pointer, Uint32, optional
from jax_megamoe.plan.problem import Problem
from jax_megamoe.plan.refusal import Refusal, unfit
from jax_megamoe.plan.sgl_staging import region_pointer, staging_inputs
from jax_megamoe.plan.symmetric_buffer import BufferLayout

L2_ALPHA = "l2_alpha"
"""float32 [experts of this rank]: w2's global scales times the scale of layer-2 inputs."""

_INPUT_REGIONS = ("x", "x_sf", "x_scales", "topk_idx", "topk_weights")
_SHARED_INPUT_REGIONS = ("shared_l1_acts", "shared_l1_acts_sf")
_SHARED_ROWS = {"mxfp8": "kMxfp8", "bf16": "kBf16"}
_LANE_VALUES = 8
_MAX_THREADS = 256


@dataclass(frozen=True, kw_only=True)
class Routing:
    """What ``topk_ids`` of a call are, where they are not simply physical ids.

    Attributes:
        num_logical: logical experts that they name.
        padding_mask: there is an operand ``padding_mask``, bool [T], True for rows that are no
            tokens.
        max_replicas: width R of the operand ``logical_to_physical``, int32 [num_logical, R], which
            comes with ``num_replicas``, int32 [num_logical]; 0 without them: slot p holds logical
            expert p % num_logical.
    """

    num_logical: int
    padding_mask: bool = False
    max_replicas: int = 0


STAGINGS = ("source", "jax_megamoe", "none")
"""Who stages a call's inputs: a kernel of the kernel's source, this package's, or the caller."""

MAX_STAGED_HIDDEN = 8192
"""The sources' staging kernels run one block of hidden_size / 8 threads per token."""


def chosen(
    problem: Problem, routing: Routing | None, asked: str | None, *, has_own: bool
) -> str | Refusal:
    """Which of `STAGINGS` a plan has.

    Args:
        problem: of the call.
        routing: of the call.
        asked: for one of them; None: the source's where it does all that is asked for.
        has_own: the source has a staging kernel for the family.
    """
    fits = problem.hidden_size <= MAX_STAGED_HIDDEN
    suffices = has_own and fits and routing is None and not problem.num_shared_experts
    if asked is None:
        return "source" if suffices else "jax_megamoe"
    if asked not in STAGINGS:
        return unfit("staging_by", f"one of {[*STAGINGS]}", repr(asked))
    if asked == "source" and not suffices:
        expected = f"jax_megamoe for this call of {problem.weight_format}"
        hint = (
            f"a source's own staging takes physical ids and scaled tokens of at most "
            f"{MAX_STAGED_HIDDEN} values, without a shared expert"
        )
        return unfit("staging_by", expected, asked, hint)
    return asked


def input_regions(problem: Problem, layout: BufferLayout) -> tuple[str, ...]:
    """Regions that must be filled before a MegaMoE kernel: those that a staging step writes."""
    shared = _SHARED_INPUT_REGIONS if problem.num_shared_experts else ()
    # Some kernels' layouts have a place for scales of tokens that they do not read.
    unread = () if problem.x_scales else ("x_scales",)
    aliases = [name for name, region in layout.regions if region.offset == layout["x"].offset]
    return tuple(
        name
        for name in (*_INPUT_REGIONS, *shared)
        if name in layout and name not in unread and (name == "x" or name not in aliases)
    )


def scratch(problem: Problem, mega: KernelLaunch) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Arrays of the plan's own (name, shape, dtype) that the staging kernel writes for `mega`."""
    reads = optional(L2_ALPHA, L2_ALPHA, True) in mega.arguments
    return ((L2_ALPHA, (problem.local_experts,), "float32"),) if reads else ()


def staging_launch(
    problem: Problem,
    layout: BufferLayout,
    mega: KernelLaunch,
    block_m: int,
    staged_as: str,
    routing: Routing | None = None,
) -> KernelLaunch:
    """The kernel that fills the input regions of `mega` from the arrays of a call.

    Operands: ``x`` bfloat16 [T, H], ``topk_ids`` int32 [T, K], ``topk_weights`` float32 [T, K] and
    those of `routing`. One block per token, and one without tokens: ``l2_alpha`` is written too
    where `mega` reads it.

    Args:
        block_m: tile height of `mega`, by which a fused shared expert's scales lie.
        staged_as: the kernel's enumerator for how tokens are quantised.
        routing: None: topk_ids are physical ids. Ids out of range become -1 with weight 0 always.
    """
    routing = routing or Routing(num_logical=problem.num_experts)
    regions = input_regions(problem, layout)
    vectors = problem.hidden_size // _LANE_VALUES
    threads = align(ceil_div(vectors, ceil_div(vectors, _MAX_THREADS)), 32)
    with_alpha = bool(scratch(problem, mega))
    kernel = KernelSpec(
        "jax_megamoe",
        mega.kernel.arch,
        "staging.cuh",
        "stage_tokens",
        (
            str(problem.hidden_size),
            str(threads),
            f"Tokens::{staged_as}",
            f"Shared::{_shared(problem, regions)}",
        ),
        (
            *("const uint4*", "const int32_t*", "const float*", "const bool*"),
            *("const int32_t*", "const int32_t*", "const float*"),
            *("void*", "void*", "float*", "int64_t*", "float*", "void*", "uint32_t*", "float*"),
            *(*["uint32_t"] * 8, "float"),
        ),
    )
    real, mapped = problem.num_tokens > 0, routing.max_replicas > 0
    # Where the kernel reads the scale from an operand, w2_weight_scale_2 has it as a factor.
    scale = 1.0 if problem.l2_activation_scale is None else problem.l2_activation_scale
    scale_rows = "shared_l1_acts_sf" in regions and layout["shared_l1_acts_sf"].shape[0]
    arguments = (
        *staging_inputs(problem),
        optional("padding_mask", "padding_mask", routing.padding_mask and real),
        optional("logical_to_physical", "logical_to_physical", mapped),
        optional("num_replicas", "num_replicas", mapped),
        optional("w2_weight_scale_2", "w2_weight_scale_2", with_alpha),
        *(
            region_pointer(layout, name) if name in regions else Pointer(f"buf_{name}", None)
            for name in (*_INPUT_REGIONS, *_SHARED_INPUT_REGIONS)
        ),
        optional(L2_ALPHA, L2_ALPHA, with_alpha),
        Uint32("num_tokens", problem.num_tokens),
        Uint32("top_k", problem.top_k),
        Uint32("num_experts", problem.num_experts),
        Uint32("num_logical", routing.num_logical),
        Uint32("max_replicas", routing.max_replicas),
        Uint32("block_m", block_m),
        Uint32("shared_sf_rows", int(scale_rows)),
        Uint32("num_local_experts", problem.local_experts),
        Float32("l2_activation_scale", scale),
    )
    config = LaunchConfig((max(1, problem.num_tokens), 1, 1), (threads, 1, 1))
    return KernelLaunch(kernel, config, arguments)


def _shared(problem: Problem, regions: tuple[str, ...]) -> str:
    """The kernel's name for what a fused shared expert needs beside the routed rows."""
    if "shared_l1_acts" in regions:
        return _SHARED_ROWS[problem.shared_format or ""]
    return "kScales" if "shared_l1_acts_sf" in regions else "kNone"
