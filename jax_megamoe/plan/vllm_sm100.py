"""Launches of the vllm source's SM100 kernels for MXFP4, MXFP8 and BF16 weights.

This source has no staging kernel.
"""

from dataclasses import replace
from typing import Literal

from jax_megamoe.plan import sgl_sm100
from jax_megamoe.plan.arithmetic import cpp_bool, cpp_float
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.family import MASKED_INTERMEDIATE, Family
from jax_megamoe.plan.launch import (
    Float32,
    KernelArgument,
    KernelLaunch,
    SymmetricBuffer,
    Uint32,
    optional,
)
from jax_megamoe.plan.problem import Problem
from jax_megamoe.plan.sm100 import Launcher


def _vllm(family: Family, tail: Literal["norms", "nothing"]) -> Family:
    """What a family of the sgl source is in this one."""
    return replace(
        family,
        source="vllm",
        norm_sums=False,
        tail=tail,
        full_pool_from=None,
        pulls_whole_rows=False,
        max_intermediate=MASKED_INTERMEDIATE,
        activation_names=("swiglu", "swiglustep"),
    )


FP8 = _vllm(sgl_sm100.FP8, "nothing")
SITU = replace(FP8, stem="sm100_fp8_fp4_mega_moe_situ", activation_names=("situ",))
BF16 = _vllm(sgl_sm100.BF16, "norms")


def arch(device: DeviceSpec) -> str:
    """The compiler's architecture for this source."""
    return "sm_103f" if device.arch == 103 else "sm_100f"


def clamps(problem: Problem) -> list[str]:
    """Template arguments of the clamp, and whether it caps the gate after SiLU."""
    return [cpp_float(problem.clamp), cpp_bool(problem.activation == "swiglustep")]


def norm_arguments(problem: Problem) -> list[KernelArgument]:
    """The gain and the epsilon of a norm after the experts; null and 0 without one."""
    gamma = "post_expert_norm_gamma"
    epsilon = problem.post_norm_eps if problem.post_norm else 0.0
    return [optional(gamma, gamma, problem.post_norm), Float32("post_expert_norm_eps", epsilon)]


def mega_launch(family: Family, problem: Problem, device: DeviceSpec) -> KernelLaunch:
    """The kernel from dispatch to combine. Limits are not checked here."""
    launcher = Launcher(family, problem, device)
    return _bf16(launcher) if family is BF16 else _fp8(launcher)


def _fp8(launcher: Launcher) -> KernelLaunch:
    problem, family = launcher.problem, launcher.family
    template = [
        *launcher.head(),
        *map(str, launcher.tiles.store_m),
        str(launcher.tiles.scale_m),
        "128",
        *launcher.rings(),
        *launcher.machine(),
        *([] if family is SITU else clamps(problem)),
        cpp_float(problem.alpha),
        cpp_float(problem.beta),
        cpp_bool(problem.fast_math),
        family.weights[problem.weight_format].cpp_type,
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


def _bf16(launcher: Launcher) -> KernelLaunch:
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
        cpp_bool(problem.post_norm),
    ]
    arguments: list[KernelArgument] = [
        launcher.output(),
        launcher.stats(),
        Uint32("num_tokens", problem.num_tokens),
        *norm_arguments(problem),
        SymmetricBuffer("sym_buffer"),
        *launcher.maps(),
        launcher.locality(),
    ]
    types = ["void*", "int*", "uint32_t", "const float*", "float", "const uint8_t*"]
    return launcher.launch(template, arguments, types, arch(launcher.device))
