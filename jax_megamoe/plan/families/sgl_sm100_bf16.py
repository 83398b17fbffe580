"""The sgl source's SM100 kernel for BF16 weights; the source has no staging kernel for it."""

from dataclasses import replace

from jax_megamoe.plan.arithmetic import cpp_bool, cpp_float
from jax_megamoe.plan.families.sgl_sm100 import (
    ARCH,
    MX_TRAITS,
    NO_NORM,
    NO_NORM_WEIGHT,
    SOURCE,
    activation_name,
)
from jax_megamoe.plan.launch import KernelArgument, KernelLaunch, SymmetricBuffer, Uint32
from jax_megamoe.plan.sm100 import Sm100Launch
from jax_megamoe.plan.sm100_family import Sm100Family
from jax_megamoe.plan.sm100_traits import BF16_ACTIVATIONS, BF16_WEIGHTS


def _launch(launcher: Sm100Launch) -> KernelLaunch:
    problem = launcher.problem
    template = [
        *launcher.head(),
        str(launcher.tiles.store_m[0]),
        *launcher.rings(),
        *launcher.machine(),
        cpp_float(problem.clamp),
        cpp_bool(problem.fast_math),
        *NO_NORM,
    ]
    arguments: list[KernelArgument] = [
        launcher.output(),
        NO_NORM_WEIGHT,
        launcher.stats(),
        Uint32("num_tokens", problem.num_tokens),
        SymmetricBuffer("sym_buffer"),
        *launcher.maps(),
        launcher.locality(),
    ]
    types = ["void*", "const float*", "int*", "uint32_t", "const uint8_t*"]
    return launcher.launch(template, arguments, types, ARCH)


FAMILY = Sm100Family(
    name="sgl_sm100_bf16",
    source=SOURCE,
    recipes=("bf16",),
    traits=replace(
        MX_TRAITS,
        stem="sm100_bf16_mega_moe",
        activations=BF16_ACTIVATIONS,
        scale_block=0,
        weights={"bf16": BF16_WEIGHTS},
        shared={"bf16": BF16_WEIGHTS},
        block_k=64,
        operand_bits=16,
        reduces_amax=False,
        pulls_whole_rows=False,
        store_rows=(48, (40, 40)),
        staged_as="kBf16",
        activation_names=("swiglu",),
    ),
    mega_launch=_launch,
    activation_name=activation_name,
)
