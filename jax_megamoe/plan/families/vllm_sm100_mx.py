"""The vllm source's SM100 kernels for MXFP4 and MXFP8 weights: one for SwiGLU, one for SiTU."""

from dataclasses import replace

from jax_megamoe.plan.arithmetic import cpp_bool, cpp_float
from jax_megamoe.plan.families.sgl_sm100 import MX_TRAITS
from jax_megamoe.plan.families.vllm_sm100 import SOURCE, arch, clamps, traits_like
from jax_megamoe.plan.launch import KernelArgument, KernelLaunch, SymmetricBuffer, Uint32
from jax_megamoe.plan.sm100 import Sm100Launch
from jax_megamoe.plan.sm100_family import Sm100Family

_TRAITS = traits_like(MX_TRAITS, "nothing")


def _launch(launcher: Sm100Launch) -> KernelLaunch:
    problem, traits = launcher.problem, launcher.traits
    template = [
        *launcher.head(),
        *map(str, launcher.tiles.store_m),
        str(launcher.tiles.scale_m),
        "128",
        *launcher.rings(),
        *launcher.machine(),
        *([] if traits.activation_names == ("situ",) else clamps(problem)),
        cpp_float(problem.alpha),
        cpp_float(problem.beta),
        cpp_bool(problem.fast_math),
        traits.weights[problem.weight_format].cpp_type,
    ]
    arguments: list[KernelArgument] = [
        launcher.output(),
        launcher.stats(),
        Uint32("num_tokens", problem.num_tokens),
        SymmetricBuffer("sym_buffer"),
        *launcher.maps(),
        launcher.locality(),
    ]
    types = ["void*", "int*", "uint32_t", "const uint8_t*"]
    return launcher.launch(template, arguments, types, arch(launcher.device))


FAMILY = Sm100Family(
    name="vllm_sm100_mx",
    source=SOURCE,
    recipes=("mxfp4", "mxfp8"),
    traits=_TRAITS,
    variants={
        "situ": replace(_TRAITS, stem=f"{_TRAITS.stem}_situ", activation_names=("situ",)),
    },
    mega_launch=_launch,
    clears_ready_words=True,
)
