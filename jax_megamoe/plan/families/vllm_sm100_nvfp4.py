"""The vllm source's SM100 kernel for NVFP4 weights, with MXFP8 or BF16 shared experts.

Tokens carry a scale each; the shared expert has input regions of its own.
"""

from dataclasses import replace

from jax_megamoe.plan import heuristics
from jax_megamoe.plan.arithmetic import cpp_bool, cpp_float
from jax_megamoe.plan.families.vllm_sm100 import SOURCE, arch, clamps
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
from jax_megamoe.plan.sm100 import Sm100Launch
from jax_megamoe.plan.sm100_family import Sm100Family
from jax_megamoe.plan.sm100_traits import (
    BF16_ACTIVATIONS,
    BF16_WEIGHTS,
    FP8_ACTIVATIONS,
    FP8_WEIGHTS,
    MASKED_INTERMEDIATE,
    Activations,
    Sm100Traits,
    Weights,
)
from jax_megamoe.plan.staging import L2_ALPHA
from jax_megamoe.plan.tensor_map import PACKED_U4_ALIGN8, SWIZZLE_32B, SWIZZLE_64B

_NVFP4_ACTIVATIONS = Activations(
    "int8", 4, 2, PACKED_U4_ALIGN8, 1, 128, SWIZZLE_64B, 64, SWIZZLE_32B
)
_NVFP4_WEIGHTS = Weights(4, PACKED_U4_ALIGN8, 1, 128, SWIZZLE_64B, True, "cutlass::float_e2m1_t")

_TRAITS = Sm100Traits(
    source=SOURCE,
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
    store_rows=(32, (40, 40)),
    staged_as="kNvfp4",
    activation_names=("swiglu",),
)

_SCALE = "l2_activation_scale"

SCALE_BY_POINTER = f"#define {_SCALE} *{_SCALE}_pointer\n"
"""Makes the kernel's parameter ``const float`` a ``const float*`` and reads it at each of its uses,
which are factors. By value the scale would be part of the program: layers that differ in it would
be compiled apart, and one program could not run a stack of them."""

_MAX_COMPACT = 32
_SMALL_INTERMEDIATE = 2048


def _launch(launcher: Sm100Launch) -> KernelLaunch:
    problem, traits, tiles = launcher.problem, launcher.traits, launcher.tiles
    bf16_shared = problem.num_shared_experts and problem.shared_format == "bf16"
    shared_weights = BF16_WEIGHTS if bf16_shared else FP8_WEIGHTS
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
        traits.weights[problem.weight_format].cpp_type,
        shared_weights.cpp_type,
        str(1024 // shared_weights.bits),
        cpp_bool(problem.x_scales),
        cpp_bool(problem.local_experts <= _MAX_COMPACT and problem.num_ranks <= _MAX_COMPACT),
        cpp_bool(decode_shaped or problem.intermediate_size <= _SMALL_INTERMEDIATE),
        cpp_bool(decode_shaped),
    ]
    by_pointer = problem.l2_activation_scale is None
    scale: KernelArgument = Pointer(_SCALE, Operand(_SCALE))
    if problem.l2_activation_scale is not None:
        scale = Float32(_SCALE, problem.l2_activation_scale)
    scale_type = "const float*" if by_pointer else "float"
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


FAMILY = Sm100Family(
    name="vllm_sm100_nvfp4",
    source=SOURCE,
    recipes=("nvfp4",),
    traits=_TRAITS,
    mega_launch=_launch,
    clears_ready_words=True,
    factors="input_scale_apart",
)
