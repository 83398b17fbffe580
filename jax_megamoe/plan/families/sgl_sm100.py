"""What the sgl source's SM100 kernels have in common: template, arguments, staging, activations.

Staging is part of this source for all but BF16: a kernel quantises BF16 tokens into the buffer and
widens the top-k ids. It does not write ``shared_l1_acts_sf``, the scales of the shared expert's
input: plans with shared experts start with this package's kernel instead.
"""

from jax_megamoe.config import Activation
from jax_megamoe.plan import heuristics
from jax_megamoe.plan.arithmetic import cpp_bool, cpp_float
from jax_megamoe.plan.kernel import KernelSpec, LaunchConfig
from jax_megamoe.plan.launch import (
    KernelArgument,
    KernelLaunch,
    Pointer,
    SymmetricBuffer,
    Uint32,
    optional,
)
from jax_megamoe.plan.problem import Problem
from jax_megamoe.plan.refusal import Refusal, missing
from jax_megamoe.plan.sgl_staging import (
    region_pointer,
    staging_blocks,
    staging_inputs,
    staging_sizes,
)
from jax_megamoe.plan.sm100 import Sm100Launch
from jax_megamoe.plan.sm100_traits import (
    FP4_WEIGHTS,
    FP8_ACTIVATIONS,
    FP8_WEIGHTS,
    Activations,
    Sm100Traits,
    Weights,
)
from jax_megamoe.plan.symmetric_buffer import BufferLayout
from jax_megamoe.plan.tensor_map import SWIZZLE_32B, SWIZZLE_128B, UINT8

SOURCE, ARCH = "sgl", "sm_100f"
SWIGLU = {(1.0, 0.0): "swiglu", (1.702, 1.0): "swigluoai"}
"""The source's name of SwiGLU by (alpha, beta): its kernels have these alone."""
SITU = (4.0, 25.0)
FUSES_NONE = "vllm's kernel fuses it: python -m jax_megamoe sources fetch vllm"

PACKED_ACTIVATIONS = Activations("uint8", 4, 2, UINT8, 2, 128, SWIZZLE_128B, 32, SWIZZLE_32B)
PACKED_WEIGHTS = Weights(4, UINT8, 2, 128, SWIZZLE_128B, False, FP4_WEIGHTS.cpp_type)

MX_TRAITS = Sm100Traits(
    source=SOURCE,
    stem="sm100_fp8_fp4_mega_moe",
    activations=FP8_ACTIVATIONS,
    scale_block=32,
    weights={"mxfp4": FP4_WEIGHTS, "mxfp8": FP8_WEIGHTS},
    shared={"mxfp8": FP8_WEIGHTS},
    block_k=128,
    operand_bits=8,
    reduces_amax=True,
    norm_sums=True,
    tail="scales",
    full_pool_from=6144,
    pulls_whole_rows=True,
    store_rows=(48, (24, 8)),
    refuses_situ_clamp=True,
    shared_hint=FUSES_NONE,
    staged_as="kMxfp8",
    activation_names=("swiglu", "swigluoai", "situ"),
)
"""Of the MX kernel; the others' are told as differences from it."""


def activation_name(activation: Activation) -> str | Refusal:
    """The source's name of an activation, or which parameters it has instead."""
    parameters = activation.alpha, activation.beta
    name = "situ" if parameters == SITU else None
    if activation.name == "swiglu":
        name = SWIGLU.get(parameters)
    if name is not None:
        return name
    known = f"(alpha, beta) one of {[*SWIGLU]} for swiglu, {SITU} for situ"
    got, hint = f"{activation.name} {parameters}", "the vllm source takes any"
    return missing(f"activation of {SOURCE}", known, got, hint)


NO_NORM = (*[cpp_bool(False)] * 3, cpp_float(1e-6), cpp_bool(False))
"""Template arguments of a norm after the experts, which no model here has: whether there is one,
with a weight that comes first, with a weight, its epsilon; then the TensorRT weight layout."""

NO_NORM_WEIGHT = Pointer("post_expert_norm_weight", None)


def scaled_launch(launcher: Sm100Launch) -> KernelLaunch:
    """The kernel of the MX and FP4 kinds, from dispatch to combine."""
    problem, traits = launcher.problem, launcher.traits
    alpha = 1.702 if problem.activation == "swigluoai" else 0.0  # 0: the plain gate
    template = [
        *launcher.head(),
        *map(str, launcher.tiles.store_m),
        str(launcher.tiles.scale_m),
        str(heuristics.BLOCK_N),  # weight rows of a tile have as many scales
        _kind(traits),
        *launcher.rings(),
        *launcher.machine(),
        cpp_float(problem.clamp),
        cpp_float(alpha),
        cpp_bool(problem.activation == "situ"),
        cpp_bool(problem.fast_math),
        cpp_bool(problem.x_scales),
        cpp_bool(problem.l1_alphas),
        cpp_bool(problem.l2_alphas),
        cpp_bool(problem.l2_act_scales),
        cpp_bool(False),  # the combine is in BF16
        traits.weights[problem.weight_format].cpp_type,
        *map(cpp_float, SITU),
        *NO_NORM,
    ]
    arguments: list[KernelArgument] = [
        launcher.output(),
        launcher.stats(),
        optional("l1_alphas", "w13_weight_scale_2", problem.l1_alphas),
        optional("l2_alphas", "w2_weight_scale_2", problem.l2_alphas),
        optional("l2_act_scales", "w2_input_scale", problem.l2_act_scales),
        NO_NORM_WEIGHT,
        Uint32("num_tokens", problem.num_tokens),
        SymmetricBuffer("sym_buffer"),
        *launcher.maps(),
        launcher.locality(),
    ]
    types = ["void*", "int*", *["const float*"] * 4, "uint32_t", "const uint8_t*"]
    return launcher.launch(template, arguments, types, ARCH)


def _kind(traits: Sm100Traits) -> str:
    kinds = {(8, 32): "MXFP8FP4", (4, 32): "MXFP4", (4, 16): "NVFP4"}
    return f"MmaKind::{kinds[traits.activations.bits, traits.scale_block]}"


def staging_launch(
    traits: Sm100Traits, problem: Problem, layout: BufferLayout, expert_scales: bool = False
) -> KernelLaunch:
    """The kernel that quantises x [T, H] bfloat16 and widens topk_ids [T, K] int32 into the buffer.

    One block per token; more blocks fill ids with -1 and weights with 0 up to the buffer's end.

    Args:
        expert_scales: top-k weights are multiplied by a float32 per expert.
    """
    threads = problem.hidden_size // 8
    template = (str(traits.scale_block), _kind(traits), "false")
    types = (
        *("const __nv_bfloat16*", "const int32_t*", "const float*", "const float*"),
        *("void*", "int32_t*", "float*", "int64_t*", "float*"),
        *["uint32_t"] * 5,
    )
    header = "deep_gemm/impls/sm100_mega_moe_pre_dispatch.cuh"
    kernel = KernelSpec(SOURCE, ARCH, header, "mega_moe_pre_dispatch_kernel", template, types)
    arguments = (
        *staging_inputs(problem),
        optional("expert_scales", "expert_scales", expert_scales),
        *(region_pointer(layout, name) for name in ("x", "x_sf")),
        region_pointer(layout, "x_scales") if problem.x_scales else Pointer("buf_x_scales", None),
        *(region_pointer(layout, name) for name in ("topk_idx", "topk_weights")),
        *staging_sizes(problem, layout, problem.hidden_size // traits.scale_block),
    )
    config = LaunchConfig((staging_blocks(problem, layout), 1, 1), (threads, 1, 1))
    return KernelLaunch(kernel, config, arguments)
