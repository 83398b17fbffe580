"""Kernels that only golden records reach: sgl's MXFP4 x MXFP4 and vllm's older NVFP4 kernel.

What is planned for them stands on the planner's own parts, so that these are compared with more
records; no recipe runs them.
"""

from dataclasses import replace

from jax_megamoe.plan.arithmetic import cpp_bool, cpp_float
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.families.sgl_sm100 import (
    MX_TRAITS,
    PACKED_ACTIVATIONS,
    PACKED_WEIGHTS,
    activation_name,
    scaled_launch,
    staging_launch,
)
from jax_megamoe.plan.families.vllm_sm100 import NO_NORM, arch
from jax_megamoe.plan.launch import (
    KernelArgument,
    KernelLaunch,
    SymmetricBuffer,
    Uint32,
    optional,
)
from jax_megamoe.plan.problem import Problem
from jax_megamoe.plan.sm100 import Sm100Launch
from jax_megamoe.plan.sm100_family import Sm100Family
from jax_megamoe.plan.sm100_traits import (
    BF16_ACTIVATIONS,
    BF16_WEIGHTS,
    MASKED_INTERMEDIATE,
    Activations,
    Sm100Traits,
    Weights,
)
from jax_megamoe.plan.tensor_map import SWIZZLE_128B, SWIZZLE_NONE, UINT8

MXF4 = Sm100Family(
    name="sgl_sm100_mxf4",
    source="sgl",
    recipes=(),
    traits=replace(
        MX_TRAITS,
        activations=PACKED_ACTIVATIONS,
        weights={"mxfp4": PACKED_WEIGHTS},
        shared={"mxfp4": PACKED_WEIGHTS},
        block_k=256,
        operand_bits=4,
        intermediate_multiple=256,
        pulls_whole_rows=False,
        store_rows=(48, (40, 40)),
        activation_names=("swiglu", "swigluoai"),
    ),
    mega_launch=scaled_launch,
    own_staging=staging_launch,
    activation_name=activation_name,
)


class _Fp4Traits(Sm100Traits):
    """With the one tile height that DeepGEMM measured."""

    def measured_tile(self, problem: Problem, device: DeviceSpec) -> int | None:
        measured = (
            (device.arch, device.num_sms) == (103, 148)
            and (problem.num_ranks, problem.num_experts, problem.top_k) == (4, 256, 8)
            and 32 <= problem.num_tokens <= 64
        )
        return 64 if measured else None


def _fp4_fp4(launcher: Sm100Launch) -> KernelLaunch:
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
        cpp_bool(False),
    ]
    arguments: list[KernelArgument] = [
        launcher.output(),
        launcher.stats(),
        Uint32("num_tokens", problem.num_tokens),
        optional("l1_alphas", "w13_weight_scale_2", problem.l1_alphas),
        optional("l2_alphas", "w2_weight_scale_2", problem.l2_alphas),
        optional("a2_scales", "w2_input_scale", problem.l2_act_scales),
        *NO_NORM,
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


FP4_FP4 = Sm100Family(
    name="vllm_sm100_fp4_fp4",
    source="vllm",
    recipes=(),
    traits=_Fp4Traits(
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
        store_rows=(32, (40, 40)),
        staged_as="kNvfp4",
        activation_names=("swiglu",),
    ),
    mega_launch=_fp4_fp4,
)
