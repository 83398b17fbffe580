"""The vllm source's SM100 kernel for BF16 weights."""

from jax_megamoe.plan.arithmetic import cpp_bool, cpp_float
from jax_megamoe.plan.families import sgl_sm100_bf16
from jax_megamoe.plan.families.vllm_sm100 import (
    NO_NORM,
    SOURCE,
    arch,
    clamps,
    traits_like,
)
from jax_megamoe.plan.launch import KernelArgument, KernelLaunch, SymmetricBuffer, Uint32
from jax_megamoe.plan.sm100 import Sm100Launch
from jax_megamoe.plan.sm100_family import Sm100Family


def _launch(launcher: Sm100Launch) -> KernelLaunch:
    problem = launcher.problem
    template = [
        *launcher.head(),
        str(launcher.tiles.store_m[0]),
        *launcher.rings(),
        *launcher.machine(),
        *clamps(problem),
        cpp_float(problem.alpha),
        cpp_float(problem.beta),
        cpp_bool(problem.fast_math),
        cpp_bool(False),  # no norm after the experts
    ]
    arguments: list[KernelArgument] = [
        launcher.output(),
        launcher.stats(),
        Uint32("num_tokens", problem.num_tokens),
        *NO_NORM,
        SymmetricBuffer("sym_buffer"),
        *launcher.maps(),
        launcher.locality(),
    ]
    types = ["void*", "int*", "uint32_t", "const float*", "float", "const uint8_t*"]
    return launcher.launch(template, arguments, types, arch(launcher.device))


FAMILY = Sm100Family(
    name="vllm_sm100_bf16",
    source=SOURCE,
    recipes=("bf16",),
    traits=traits_like(sgl_sm100_bf16.FAMILY.traits, "norms"),
    mega_launch=_launch,
    clears_ready_words=True,
)
