"""Launches of the vllm source's SM100 kernels for NVFP4 weights.

Two kernels: the one vLLM uses, with MXFP8 or BF16 shared experts and tokens that carry a scale
each, and an older one with BF16 shared experts that read the caller's array. This source has no
staging kernel. The shared expert has input regions of its own.
"""

from dataclasses import replace

from jax_megamoe.plan import heuristics
from jax_megamoe.plan.arithmetic import cpp_bool, cpp_float
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.family import (
    BF16_ACTIVATIONS,
    BF16_WEIGHTS,
    FP8_ACTIVATIONS,
    FP8_WEIGHTS,
    MASKED_INTERMEDIATE,
    Activations,
    Family,
    Weights,
)
from jax_megamoe.plan.launch import (
    Float32,
    KernelArgument,
    KernelLaunch,
    Pointer,
    SymmetricBuffer,
    Uint32,
    optional,
)
from jax_megamoe.plan.operand import Operand
from jax_megamoe.plan.problem import Problem
from jax_megamoe.plan.sm100 import Launcher
from jax_megamoe.plan.staging import L2_ALPHA
from jax_megamoe.plan.tensor_map import (
    PACKED_U4_ALIGN8,
    SWIZZLE_32B,
    SWIZZLE_64B,
    SWIZZLE_128B,
    SWIZZLE_NONE,
    UINT8,
)
from jax_megamoe.plan.vllm_sm100 import arch, clamps, norm_arguments

_SCALE = "l2_activation_scale"

SCALE_BY_POINTER = f"#define {_SCALE} *{_SCALE}_pointer\n"
"""Makes the kernel's parameter ``const float`` a ``const float*`` and reads it at each of its uses,
which are factors. By value the scale would be part of the program: layers that differ in it would
be compiled apart, and one program could not run a stack of them."""

_NVFP4_ACTIVATIONS = Activations(
    "int8", 4, 2, PACKED_U4_ALIGN8, 1, 128, SWIZZLE_64B, 64, SWIZZLE_32B
)
_NVFP4_WEIGHTS = Weights(4, PACKED_U4_ALIGN8, 1, 128, SWIZZLE_64B, True, "cutlass::float_e2m1_t")

NVFP4 = Family(
    source="vllm",
    stem="sm100_nvfp4_mega_moe",
    activations=_NVFP4_ACTIVATIONS,
    scale_block=16,
    weights={"nvfp4": _NVFP4_WEIGHTS},
    shared={"mxfp8": replace(FP8_WEIGHTS, folded=True), "bf16": replace(BF16_WEIGHTS, folded=True)},
    shared_activations={"mxfp8": FP8_ACTIVATIONS, "bf16": BF16_ACTIVATIONS},
    shared_source="own",
    block_k=128,
    operand_bits=8,
    reduces_amax=True,
    max_tile=192,
    ring_weights=False,
    tail="scales",
    locality_table=False,
    max_intermediate=MASKED_INTERMEDIATE,
    intermediate_multiple=256,  # two K blocks a stage
    max_top_k=32,
    activation_names=("swiglu", "swiglustep"),
)
FP4_FP4 = Family(
    source="vllm",
    stem="sm100_fp4_fp4_mega_moe",
    activations=Activations("uint8", 4, 2, UINT8, 2, 128, SWIZZLE_128B, 32, SWIZZLE_NONE),
    scale_block=16,
    weights={"nvfp4": Weights(4, UINT8, 2, 128, SWIZZLE_128B, True, "")},
    shared={"bf16": replace(BF16_WEIGHTS, folded=True)},
    shared_activations={"bf16": BF16_ACTIVATIONS},
    shared_source="caller",
    block_k=256,
    operand_bits=4,
    tail="norms",
    max_intermediate=MASKED_INTERMEDIATE,
    intermediate_multiple=256,
    max_top_k=32,
    activation_names=("swiglu",),
)

_MAX_COMPACT = 32
_SMALL_INTERMEDIATE = 2048


def mega_launch(family: Family, problem: Problem, device: DeviceSpec) -> KernelLaunch:
    """The kernel from dispatch to combine. Limits are not checked here."""
    launcher = Launcher(family, problem, device)
    return _nvfp4(launcher) if family is NVFP4 else _fp4_fp4(launcher)


def _nvfp4(launcher: Launcher) -> KernelLaunch:
    problem, family, tiles = launcher.problem, launcher.family, launcher.tiles
    bf16_shared = problem.num_shared_experts and problem.shared_format == "bf16"
    shared_weights = BF16_WEIGHTS if bf16_shared else FP8_WEIGHTS
    by_pointer = problem.l2_activation_scale is None
    scale: KernelArgument = Pointer(_SCALE, Operand(_SCALE))
    if problem.l2_activation_scale is not None:
        scale = Float32(_SCALE, problem.l2_activation_scale)
    scale_type = "const float*" if by_pointer else "float"
    decode_shaped = heuristics.likely_tokens(problem) <= tiles.block_m
    template = [
        *launcher.head(),
        str(tiles.store_m[0]),
        str(tiles.scale_m),
        "128",
        *launcher.rings(),
        *launcher.machine(),
        *clamps(problem),
        cpp_float(problem.alpha),
        cpp_float(problem.beta),
        cpp_bool(problem.fast_math),
        family.weights[problem.weight_format].cpp_type,
        shared_weights.cpp_type,
        str(1024 // shared_weights.bits),
        cpp_bool(problem.x_scales),
        cpp_bool(problem.local_experts <= _MAX_COMPACT and problem.num_ranks <= _MAX_COMPACT),
        cpp_bool(decode_shaped or problem.intermediate_size <= _SMALL_INTERMEDIATE),
        cpp_bool(decode_shaped),
    ]
    arguments: list[KernelArgument] = [
        launcher.output(),
        launcher.stats(),
        optional("l1_alpha", "w13_weight_scale_2", problem.l1_alphas),
        optional("l2_alpha", L2_ALPHA, problem.l2_alphas),
        scale,
        Uint32("num_tokens", problem.num_tokens),
        SymmetricBuffer("sym_buffer"),
        *launcher.maps(),
    ]
    types = ["void*", "int*", "const float*", "const float*", scale_type, "uint32_t"]
    launch = launcher.launch(template, arguments, types, arch(launcher.device))
    if not by_pointer:
        return launch
    return replace(launch, kernel=replace(launch.kernel, prelude=SCALE_BY_POINTER))


def _fp4_fp4(launcher: Launcher) -> KernelLaunch:
    problem, tiles = launcher.problem, launcher.tiles
    template = [
        *launcher.head(),
        str(tiles.store_m[0]),
        str(tiles.scale_m),
        "128",
        *launcher.rings(),
        *launcher.machine(),
        cpp_float(problem.clamp),
        cpp_bool(problem.fast_math),
        cpp_bool(problem.post_norm),
    ]
    arguments: list[KernelArgument] = [
        launcher.output(),
        launcher.stats(),
        Uint32("num_tokens", problem.num_tokens),
        optional("l1_alphas", "w13_weight_scale_2", problem.l1_alphas),
        optional("l2_alphas", "w2_weight_scale_2", problem.l2_alphas),
        optional("a2_scales", "w2_input_scale", problem.l2_act_scales),
        *norm_arguments(problem),
        SymmetricBuffer("sym_buffer"),
        *launcher.maps(),
        launcher.locality(),
    ]
    types = [
        *("void*", "int*", "uint32_t", "const float2*"),
        *["const float*"] * 3,
        *("float", "const uint8_t*"),
    ]
    return launcher.launch(template, arguments, types, arch(launcher.device))
