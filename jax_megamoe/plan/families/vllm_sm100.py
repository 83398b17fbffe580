"""What the vllm source's SM100 kernels have in common. This source has no staging kernel."""

from dataclasses import replace
from typing import Literal

from jax_megamoe.plan.arithmetic import cpp_bool, cpp_float
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.launch import Float32, KernelArgument, Pointer
from jax_megamoe.plan.problem import Problem
from jax_megamoe.plan.sm100_traits import MASKED_INTERMEDIATE, Sm100Traits

SOURCE = "vllm"


def traits_like(traits: Sm100Traits, tail: Literal["norms", "nothing"]) -> Sm100Traits:
    """What a kernel of the sgl source is in this one."""
    of_240 = traits.store_rows[1]
    return replace(
        traits,
        source=SOURCE,
        norm_sums=False,
        tail=tail,
        full_pool_from=None,
        max_intermediate=MASKED_INTERMEDIATE,
        pulls_whole_rows=False,
        store_rows=(32, of_240),
        refuses_situ_clamp=False,
        shared_hint="",
        activation_names=("swiglu",),
    )


def arch(device: DeviceSpec) -> str:
    """The compiler's architecture for this source."""
    return "sm_103f" if device.arch == 103 else "sm_100f"


def clamps(problem: Problem) -> list[str]:
    """Template arguments of the clamp, and whether it caps the gate after SiLU: it never does."""
    return [cpp_float(problem.clamp), cpp_bool(False)]


NO_NORM: tuple[KernelArgument, ...] = (
    Pointer("post_expert_norm_gamma", None),
    Float32("post_expert_norm_eps", 0.0),
)
"""Arguments of a norm after the experts, which no model here has."""
