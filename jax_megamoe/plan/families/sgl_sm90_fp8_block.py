"""The sgl source's SM90 kernels: FP8 with 128x128 float32 scales, and its staging."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jax_megamoe.config import MoEConfig
from jax_megamoe.formats import INTERLEAVE_8, Rounding
from jax_megamoe.plan import limits, sm90_heuristics, staging
from jax_megamoe.plan.arithmetic import cpp_bool, cpp_float
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.kernel import KernelSpec, LaunchConfig
from jax_megamoe.plan.kernel_family import FactorRule, Request
from jax_megamoe.plan.launch import (
    Float32,
    KernelArgument,
    KernelLaunch,
    LaunchPlan,
    Pointer,
    SymmetricBuffer,
    TensorMap,
    Uint32,
    optional,
)
from jax_megamoe.plan.operand import SYMMETRIC_BUFFER, Operand
from jax_megamoe.plan.problem import Problem, problem_of
from jax_megamoe.plan.refusal import Refusal
from jax_megamoe.plan.sgl_staging import (
    region_pointer,
    staging_blocks,
    staging_inputs,
    staging_sizes,
)
from jax_megamoe.plan.sm90_heuristics import BLOCK_K, BLOCK_N, FRONT_THREADS, MATH_THREADS
from jax_megamoe.plan.symmetric_buffer import BufferLayout, sm90_layout
from jax_megamoe.plan.tensor_map import (
    FLOAT32,
    SWIZZLE_128B,
    SWIZZLE_NONE,
    UINT8,
    TensorMapSpec,
)

SOURCE, ARCH = "sgl", "sm_90a"
_WIDE_STAGING = 4096


def mega_launch(problem: Problem, device: DeviceSpec) -> KernelLaunch:
    """The kernel from dispatch to combine. Limits are not checked here."""
    layout, schedule = sm90_layout(problem), sm90_heuristics.schedule(problem, device)
    map_type = "cute::TmaDescriptor"
    layer_types = (map_type, map_type, map_type, "const float*")
    kernel = KernelSpec(
        SOURCE,
        ARCH,
        "deep_gemm/impls/sm90_fp8_mega_moe.cuh",
        "sm90_fp8_mega_moe_impl",
        _template(problem, device, schedule),
        (
            *("void*", "int*", "uint32_t"),
            f"deep_gemm::layout::SymBuffer<{problem.num_ranks}>",
            *(*layer_types, map_type, *layer_types),
            "uint64_t*",
        ),
    )
    # One block on each SM: blocks wait for each other, so all must be resident at once.
    config = LaunchConfig(
        (device.num_sms, 1, 1),
        (2 * FRONT_THREADS + MATH_THREADS, 1, 1),
        (schedule.cluster, 1, 1),
        schedule.smem,
        schedule.programmatic,
    )
    arguments: tuple[KernelArgument, ...] = (
        optional("y", "y", problem.num_tokens > 0),
        optional("cumulative_local_expert_recv_stats", "stats", problem.stats),
        Uint32("num_tokens", problem.num_tokens),
        SymmetricBuffer("sym_buffer"),
        *_layer("l1", "w13", problem, layout, schedule.block_m),
        _output_map(problem, layout, schedule.large),
        *_layer("l2", "w2", problem, layout, schedule.block_m),
        Pointer("trace", None),
    )
    return KernelLaunch(kernel, config, arguments)


def _template(
    problem: Problem, device: DeviceSpec, schedule: sm90_heuristics.Schedule
) -> tuple[str, ...]:
    ring, large = sm90_heuristics.ring_tokens(problem), schedule.large
    counts_arrivals = large or 4 <= problem.num_tokens <= 128
    wide = max(problem.hidden_size, problem.intermediate_size) >= _WIDE_STAGING
    # A tile of outputs is stored by columns (0), or by rows, plainly (2) or with stmatrix (4).
    staging_mode = (4 if wide else 2) if large else 0
    values = (
        sm90_heuristics.aligned_tokens(problem),
        problem.hidden_size,
        problem.intermediate_size,
        problem.num_experts,
        problem.top_k,
        schedule.experts_per_wave,
        schedule.block_m,
        BLOCK_N,
        BLOCK_K,
        sm90_heuristics.pool_tokens(problem),
        2 * ring,
        ring,
        schedule.stages,
        FRONT_THREADS,
        FRONT_THREADS,
        MATH_THREADS,
        device.num_sms,
        problem.num_ranks,
        cpp_float(problem.clamp),
        problem.fast_math,
        0,  # no register budget of its own for the epilogue
        large,
        counts_arrivals,
        # Without a counter of arrivals the second epilogue needs a full barrier.
        not counts_arrivals,
        large,
        schedule.cluster,
        schedule.cluster == 2,  # weights are multicast to the pair, tokens never
        schedule.lag,
        4 if large else 0,
        False,  # no trace of events
        False,  # nor of parts of an epilogue
        staging_mode,
        schedule.programmatic,
        int(schedule.early_combine),
        schedule.publish_batch,
        schedule.programmatic,
    )
    return tuple(cpp_bool(value) if isinstance(value, bool) else str(value) for value in values)


def _depth(layer: str, problem: Problem) -> int:
    return problem.hidden_size if layer == "l1" else problem.intermediate_size


def _layer(
    layer: str, operand: str, problem: Problem, layout: BufferLayout, block_m: int
) -> tuple[KernelArgument, ...]:
    """Maps of a layer's tokens, their scales and the weights, and a pointer to weight scales."""
    depth = _depth(layer, problem)
    rows = 2 * problem.intermediate_size if layer == "l1" else problem.hidden_size
    scales = layout[f"{layer}_acts_sf"]
    scale_map = TensorMapSpec(
        Operand(SYMMETRIC_BUFFER, scales.offset),
        FLOAT32,
        scales.shape,
        (4 * scales.shape[0],),
        (block_m, 1),
        SWIZZLE_NONE,
    )
    weight_map = TensorMapSpec(
        Operand(f"{operand}_weight"),
        UINT8,
        (depth, rows * problem.local_experts),
        (depth,),
        (BLOCK_K, BLOCK_N),
        SWIZZLE_128B,
    )
    return (
        TensorMap(
            f"{layer}_acts", _token_map(layer, problem, layout, (BLOCK_K, block_m), SWIZZLE_128B)
        ),
        TensorMap(f"{layer}_acts_sf", scale_map),
        TensorMap(f"{layer}_weights", weight_map),
        Pointer(f"{layer}_weights_sf", Operand(f"{operand}_weight_scale")),
    )


def _output_map(problem: Problem, layout: BufferLayout, large: bool) -> TensorMap:
    swizzle = SWIZZLE_128B if large else SWIZZLE_NONE
    return TensorMap("l1_output", _token_map("l2", problem, layout, (BLOCK_K, 64), swizzle))


def _token_map(
    layer: str, problem: Problem, layout: BufferLayout, box: tuple[int, int], swizzle: int
) -> TensorMapSpec:
    acts, depth = layout[f"{layer}_acts"], _depth(layer, problem)
    base = Operand(SYMMETRIC_BUFFER, acts.offset)
    return TensorMapSpec(base, UINT8, (depth, acts.shape[0]), (depth,), box, swizzle)


def staging_launch(
    problem: Problem, layout: BufferLayout, routed_scaling_factor: float = 1.0
) -> KernelLaunch:
    """The kernel that quantises x [T, H] bfloat16 and widens topk_ids [T, K] int32 into the buffer.

    One block per token; more blocks fill ids with -1 and weights with 0 up to the buffer's end.

    Args:
        routed_scaling_factor: multiplies every top-k weight.
    """
    types = (
        *("const __nv_bfloat16*", "const int32_t*", "const float*"),
        *("__nv_fp8_e4m3*", "float*", "int64_t*", "float*"),
        *(*["uint32_t"] * 5, "float"),
    )
    header = "deep_gemm/impls/sm90_mega_moe_pre_dispatch.cuh"
    symbol = "sm90_mega_moe_pre_dispatch_kernel"
    kernel = KernelSpec(SOURCE, ARCH, header, symbol, ("128", "false"), types)
    arguments = (
        *staging_inputs(problem),
        *(region_pointer(layout, name) for name in ("x", "x_sf", "topk_idx", "topk_weights")),
        *staging_sizes(problem, layout, problem.hidden_size // 128),
        Float32("routed_scaling_factor", routed_scaling_factor),
    )
    threads = problem.hidden_size // 8
    config = LaunchConfig((staging_blocks(problem, layout), 1, 1), (threads, 1, 1))
    return KernelLaunch(kernel, config, arguments)


@dataclass(frozen=True, kw_only=True)
class Sm90Family:
    """See `KernelFamily`."""

    name: str = "sgl_sm90_fp8_block"
    source: str = SOURCE
    implementation: str = "deep_gemm"
    architecture: str = "sm90"
    recipes: tuple[str, ...] = ("fp8_block",)
    w13_layout: str = INTERLEAVE_8
    rounding: Rounding | None = None
    factors: FactorRule = "none"

    def runs_on(self, device: DeviceSpec) -> bool:
        """Whether the device is a Hopper."""
        return device.arch == limits.SM90_ARCH

    def unsupported(self, config: MoEConfig) -> Refusal | None:
        """An activation with parameters, or a fused shared expert."""
        return next(limits.sm90_features(problem_of(config, 1, 0)), None)

    def refusals(self, request: Request) -> Iterator[Refusal]:
        """Rules that a call breaks."""
        problem = self.problem(request)
        yield from limits.sm90_violations(problem, request.device)
        staged = self._staged_by(problem, request)
        if isinstance(staged, Refusal):
            yield staged

    def refusals_of_any(self, request: Request) -> Iterator[Refusal]:
        """Rules that some call with 0 to max_num_tokens tokens breaks."""
        config = request.config
        yield from self.refusals(replace(request, num_tokens=0))
        # The tile height and the batch size change once each; stages depend on nothing else.
        changes = (64 * config.num_experts // (request.num_ranks * config.top_k), 8192)
        counts = (*changes, *(change + 1 for change in changes), config.max_num_tokens)
        for num_tokens in counts:
            if num_tokens <= config.max_num_tokens:
                problem = replace(self.problem(request), num_tokens=num_tokens, num_tokens_bound=0)
                yield from limits.sm90_violations(problem, request.device)

    def plan(self, request: Request) -> LaunchPlan:
        """A staging kernel, and the kernel from dispatch to combine."""
        problem, device = self.problem(request), request.device
        layout, mega = sm90_layout(problem), mega_launch(problem, device)
        height = sm90_heuristics.schedule(problem, device).block_m
        steps = (mega,)
        staged_by = self._staged_by(problem, request)
        if staged_by == "source":
            steps = (staging_launch(problem, layout), mega)
        elif staged_by == "jax_megamoe":
            first = staging.staging_launch(
                problem, layout, mega, height, "kFp8Block", request.routing
            )
            steps = (first, mega)
        return LaunchPlan(
            steps,
            layout,
            problem.num_ranks,
            height,
            unstaged=staging.input_regions(problem, layout) if staged_by == "none" else (),
        )

    def problem(self, request: Request) -> Problem:
        """The numbers of a call."""
        problem = problem_of(request.config, request.num_ranks, request.num_tokens)
        # Under shard_map every rank has as many rows, so the most tokens of any rank are known.
        return replace(problem, stats=request.with_stats, num_tokens_bound=request.num_tokens)

    def _staged_by(self, problem: Problem, request: Request) -> str | Refusal:
        return staging.chosen(problem, request.routing, request.staging_by, has_own=True)


FAMILY = Sm90Family()
