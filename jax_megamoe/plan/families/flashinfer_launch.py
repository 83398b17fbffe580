"""Launches of FlashInfer's SM90 FP4 kernels: schedule, template, arguments and tensor maps."""

from dataclasses import replace

from jax_megamoe.plan.arithmetic import align, cpp_bool, cpp_float
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.families import flashinfer_heuristics as heuristics
from jax_megamoe.plan.families.flashinfer_buffer import TOKEN_MULTIPLE
from jax_megamoe.plan.families.flashinfer_heuristics import BLOCK_K, Schedule, Sizes, WeightKind
from jax_megamoe.plan.kernel import CodeOptions, KernelSpec, LaunchConfig
from jax_megamoe.plan.launch import (
    KernelArgument,
    KernelLaunch,
    Pointer,
    SymmetricBuffer,
    TensorMap,
    Uint32,
    optional,
)
from jax_megamoe.plan.operand import SYMMETRIC_BUFFER, Operand
from jax_megamoe.plan.problem import Problem
from jax_megamoe.plan.symmetric_buffer import BufferLayout
from jax_megamoe.plan.tensor_map import (
    FLOAT32,
    SWIZZLE_128B,
    SWIZZLE_NONE,
    UINT8,
    TensorMapSpec,
)

SOURCE, ARCH = "flashinfer", "sm_90a"
ROW_BYTES = 80
"""NVFP4: of a weight row and 128 columns: 64 bytes of codes, 8 scales, 8 unused."""

_MASK_BITS = 64
# FlashInfer's for tiles of 8 rows whose weights are decoded into shared memory.
_STAGES = 4
_REGISTER_LEVEL = 5

# The time-out of a barrier between ranks otherwise prints, which costs registers everywhere.
_QUIET_TIMEOUT = "#define FI_MEGAMOE_NVLINK_BARRIER_TRAP_ONLY_TIMEOUT 1\n"

# The header refuses hidden_size < 2 * intermediate_size in its interleaved scheduler, whose warm-up
# allows for it all the same. Every other assertion stays.
WIDE_INTERMEDIATE = """\
constexpr bool jax_megamoe_lifts(const char* condition) {
  const char* lifted = "kNumL2BlockNs >= kNumL1BlockNs";
  while (*condition && *condition == *lifted) ++condition, ++lifted;
  return *condition == *lifted;
}
#define FI_MEGAMOE_STATIC_ASSERT(condition, ...) \\
  static_assert((condition) || jax_megamoe_lifts(#condition), __VA_ARGS__)
"""


def sizes_of(problem: Problem, device: DeviceSpec) -> Sizes:
    """A problem's sizes, as the kernels are told them."""
    return Sizes(
        num_sms=device.num_sms,
        num_ranks=problem.num_ranks,
        num_experts=problem.num_experts,
        top_k=problem.top_k,
        hidden_size=problem.hidden_size,
        intermediate_size=problem.intermediate_size,
        max_num_tokens=align(problem.max_num_tokens, TOKEN_MULTIPLE),
        num_tokens=problem.num_tokens,
    )


def schedule(kind: WeightKind, sizes: Sizes, capacity: int) -> Schedule | None:
    """The schedule of a call; None: the sizes leave no room for it in shared memory.

    FlashInfer's choice where it runs, with three differences. Rows are always pulled: all launches
    on a buffer then have one protocol, whatever their number of tokens. Weights are never decoded
    into registers: on an H200 that other processes used too, such launches gave wrong values now
    and then (docs/troubleshooting.md). And where a choice would not fit or compile, the nearest
    that does is taken.

    Args:
        kind: of weights.
        sizes: of the call.
        capacity: bytes of shared memory of a block.
    """
    if kind == "mxfp4":
        chosen = heuristics.mxfp4_schedule(sizes)
        fewest = 2
    else:
        found = heuristics.nvfp4_schedule(sizes, pushes=False)
        if found is None:
            return None
        chosen, fewest = found, found.stages
        if 2 * sizes.intermediate_size // chosen.block_n > _MASK_BITS:
            # The readiness mask has a bit for each tile of gate and up.
            chosen, fewest = replace(chosen, block_m=64, stages=3), 3
    if chosen.rs_swap_ab:
        chosen = replace(chosen, rs_swap_ab=False, stages=min(chosen.stages, _STAGES))
        fewest = min(fewest, _STAGES - 1)
    for stages in range(chosen.stages, fewest - 1, -1):
        fitting = replace(chosen, stages=stages)
        if heuristics.shared_memory(kind, sizes, fitting) <= capacity:
            return fitting
    return None


def mega_launch(
    kind: WeightKind, problem: Problem, device: DeviceSpec, layout: BufferLayout
) -> KernelLaunch:
    """The kernel from dispatch to combine. Limits are not checked here."""
    sizes = sizes_of(problem, device)
    chosen = schedule(kind, sizes, device.smem_capacity)
    assert chosen is not None
    build = _mxfp4 if kind == "mxfp4" else _nvfp4
    kernel, arguments = build(problem, sizes, chosen, layout)
    # All shared memory, so that no two blocks share an SM: each must be resident at once.
    config = LaunchConfig(
        (device.num_sms, 1, 1), (chosen.threads(kind), 1, 1), (1, 1, 1), device.smem_capacity
    )
    return KernelLaunch(kernel, config, arguments)


def _mxfp4(
    problem: Problem, sizes: Sizes, chosen: Schedule, layout: BufferLayout
) -> tuple[KernelSpec, tuple[KernelArgument, ...]]:
    values = (
        *(sizes.num_sms, sizes.num_ranks, sizes.hidden_size, sizes.intermediate_size),
        *(sizes.num_experts, sizes.top_k, sizes.max_num_tokens, chosen.experts_per_wave),
        *(chosen.block_m, chosen.block_n, sizes.pool_tokens, layout["l1_acts_sf"].shape[0]),
        *(chosen.stages, cpp_float(problem.clamp), problem.fast_math, chosen.swap_ab),
        *(chosen.single_dispatch_warp, chosen.mode2_decoder, chosen.interleaved),
        chosen.rs_swap_ab,
    )
    types = (
        *("void*", "int*", "uint32_t", _sym_buffer(sizes), *["cute::TmaDescriptor"] * 5),
        *("const uint8_t*", "const uint8_t*", "const float*", "const float*"),
        "unsigned long long*",
    )
    maps = _token_maps(sizes, chosen, layout)
    arguments = (
        *_first_arguments(problem),
        Uint32("num_tokens", problem.num_tokens),
        SymmetricBuffer("sym_buffer"),
        *maps,
        Pointer("l1_weights", Operand("w13_weight")),
        Pointer("l2_weights", Operand("w2_weight")),
        *_factors(),
        Pointer("phase_stamps", None),
    )
    return _kernel("mxfp4", problem, values, types, _prelude(sizes)), arguments


def _nvfp4(
    problem: Problem, sizes: Sizes, chosen: Schedule, layout: BufferLayout
) -> tuple[KernelSpec, tuple[KernelArgument, ...]]:
    values = (
        *(sizes.max_num_tokens, sizes.num_experts, sizes.top_k, sizes.hidden_size),
        *(sizes.intermediate_size, chosen.experts_per_wave, chosen.block_m, chosen.block_n),
        *(sizes.pool_tokens, layout["l1_acts_sf"].shape[0], chosen.stages),
        *(cpp_float(problem.clamp), problem.fast_math, chosen.swap_ab, chosen.rs_swap_ab),
        *(chosen.single_dispatch_warp, chosen.mode2_decoder, chosen.interleaved),
        *(chosen.push_dispatch, chosen.no_clean_barrier, False, False, False, False),
        sizes.num_ranks,
    )
    types = (
        *("void*", "int*", "unsigned long long*", "uint32_t", _sym_buffer(sizes)),
        *(*["cute::TmaDescriptor"] * 7, "const float*", "const float*"),
    )
    acts, scales, output, second, second_scales = _token_maps(sizes, chosen, layout)
    hidden, width = sizes.hidden_size, sizes.intermediate_size
    arguments = (
        *_first_arguments(problem),
        Pointer("phase_stamps", None),
        Uint32("num_tokens", problem.num_tokens),
        SymmetricBuffer("sym_buffer"),
        *(acts, scales, _weight_map("l1", "w13_weight", sizes, chosen, 2 * width, hidden)),
        *(output, second, second_scales),
        _weight_map("l2", "w2_weight", sizes, chosen, hidden, width),
        *_factors(),
    )
    prelude = f"#define MEGAMOE_NUM_SMS {sizes.num_sms}\n{_prelude(sizes)}"
    return _kernel("nvfp4", problem, values, types, prelude), arguments


def _kernel(
    kind: WeightKind,
    problem: Problem,
    values: tuple[int | bool | str, ...],
    types: tuple[str, ...],
    prelude: str,
) -> KernelSpec:
    stem = f"sm90_{kind}_mega_moe_fused"
    return KernelSpec(
        SOURCE,
        ARCH,
        f"flashinfer/megamoe/{stem}.cuh",
        f"{stem}_impl",
        tuple(cpp_bool(value) if isinstance(value, bool) else str(value) for value in values),
        types,
        prelude=prelude,
        options=CodeOptions(_REGISTER_LEVEL, problem.fast_math),
    )


def _prelude(sizes: Sizes) -> str:
    """Macros before the header."""
    wide = sizes.hidden_size < 2 * sizes.intermediate_size
    return _QUIET_TIMEOUT + (WIDE_INTERMEDIATE if wide else "")


def _sym_buffer(sizes: Sizes) -> str:
    return f"flashinfer::megamoe::layout::SymBuffer<{sizes.num_ranks}>"


def _first_arguments(problem: Problem) -> tuple[Pointer, ...]:
    return (
        optional("y", "y", problem.num_tokens > 0),
        optional("cumulative_local_expert_recv_stats", "stats", problem.stats),
    )


def _factors() -> tuple[Pointer, ...]:
    """float32 [experts of this rank] that multiply each layer's result."""
    return (
        Pointer("l1_global_scales", Operand("w13_weight_scale_2")),
        Pointer("l2_global_scales", Operand("w2_weight_scale_2")),
    )


def _token_maps(
    sizes: Sizes, chosen: Schedule, layout: BufferLayout
) -> tuple[TensorMap, TensorMap, TensorMap, TensorMap, TensorMap]:
    """Layer 1's tokens and scales, its output, layer 2's tokens and scales."""
    hidden, width, tile = sizes.hidden_size, sizes.intermediate_size, chosen.block_m

    def rows(region: str, depth: int, box: int, swizzle: int) -> TensorMapSpec:
        base = Operand(SYMMETRIC_BUFFER, layout[region].offset)
        return TensorMapSpec(
            base, UINT8, (depth, sizes.pool_tokens), (depth,), (box, tile), swizzle
        )

    def scales(region: str, columns: int) -> TensorMapSpec:
        base, stride = Operand(SYMMETRIC_BUFFER, layout[region].offset), layout[region].shape[0]
        return TensorMapSpec(
            base, FLOAT32, (stride, columns), (4 * stride,), (tile, 1), SWIZZLE_NONE
        )

    output = rows("l2_acts", width, chosen.scale_columns, SWIZZLE_NONE)
    return (
        TensorMap("l1_acts", rows("l1_acts", hidden, BLOCK_K, SWIZZLE_128B)),
        TensorMap("l1_acts_sf", scales("l1_acts_sf", hidden // BLOCK_K)),
        TensorMap("l1_output", output),
        TensorMap("l2_acts", rows("l2_acts", width, BLOCK_K, SWIZZLE_128B)),
        TensorMap("l2_acts_sf", scales("l2_acts_sf", width // chosen.scale_columns)),
    )


def _weight_map(
    layer: str, operand: str, sizes: Sizes, chosen: Schedule, rows: int, depth: int
) -> TensorMap:
    row = ROW_BYTES * depth // BLOCK_K
    spec = TensorMapSpec(
        Operand(operand),
        UINT8,
        (row, rows * sizes.local_experts),
        (row,),
        (ROW_BYTES, chosen.block_n),
        SWIZZLE_NONE,
    )
    return TensorMap(f"{layer}_weights", spec)
