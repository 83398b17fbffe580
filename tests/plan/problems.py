"""Configs, devices and a strategy of problems for the planner's tests."""

from dataclasses import replace
from typing import Any

import recorded_families
from hypothesis import strategies as st

from jax_megamoe import MoEConfig
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.families import (
    sgl_sm90_fp8_block,
    sgl_sm100,
    sgl_sm100_bf16,
    sgl_sm100_mx,
    sgl_sm100_nvfp4,
    vllm_sm100_bf16,
    vllm_sm100_mx,
    vllm_sm100_nvfp4,
)
from jax_megamoe.plan.launch import KernelLaunch
from jax_megamoe.plan.problem import Problem
from jax_megamoe.plan.sm100 import Sm100Launch
from jax_megamoe.plan.sm100_family import Sm100Family
from jax_megamoe.plan.symmetric_buffer import sm90_layout, sm100_layout

B200 = DeviceSpec(100, 148)
H100 = DeviceSpec(90, 132)

FAMILIES = (
    sgl_sm100_mx.FAMILY,
    recorded_families.MXF4,
    sgl_sm100_nvfp4.FAMILY,
    sgl_sm100_bf16.FAMILY,
    vllm_sm100_mx.FAMILY,
    replace(vllm_sm100_mx.FAMILY, traits=vllm_sm100_mx.FAMILY.variants["situ"]),
    vllm_sm100_bf16.FAMILY,
    vllm_sm100_nvfp4.FAMILY,
    recorded_families.FP4_FP4,
)


def launch_of(family: Sm100Family, problem: Problem, device: DeviceSpec = B200) -> KernelLaunch:
    """A family's kernel from dispatch to combine, without its limits."""
    return family.mega_launch(Sm100Launch(family.traits, problem, device))


def config(**fields: Any) -> MoEConfig:
    """A DeepSeek-sized config with some fields of one's own."""
    sizes = {
        "num_experts": 256,
        "top_k": 8,
        "hidden_size": 7168,
        "intermediate_size": 2048,
        "max_num_tokens": 1024,
    }
    return MoEConfig(**(sizes | fields))


def example(family: Sm100Family | None, **fields: Any) -> Problem:
    """A DeepSeek-sized problem of a family, None for SM90, with some fields of one's own."""
    sizes = {
        "num_ranks": 8,
        "num_experts": 256,
        "top_k": 8,
        "hidden_size": 7168,
        "intermediate_size": 2048,
        "max_num_tokens": 1024,
        "num_tokens": 64,
        "weight_format": next(iter(family.traits.weights)) if family else "fp8_block",
        "activation": family.traits.activation_names[0] if family else "swiglu",
    }
    return Problem(**(sizes | fields))


def every_launch() -> dict[str, KernelLaunch]:
    """One launch of every kernel of every source, by name."""
    fp8, sm90 = sgl_sm100_mx.FAMILY, example(None)
    layout = sm100_layout(fp8.traits, example(fp8), B200.num_sms)
    launches = [
        *(launch_of(family, example(family)) for family in FAMILIES),
        sgl_sm100.staging_launch(fp8.traits, example(fp8), layout),
        sgl_sm90_fp8_block.mega_launch(sm90, H100),
        sgl_sm90_fp8_block.staging_launch(sm90, sm90_layout(sm90)),
    ]
    return {
        f"{launch.kernel.source} {launch.kernel.symbol} {index}": launch
        for index, launch in enumerate(launches)
    }


@st.composite
def problems(draw: st.DrawFn, family: Sm100Family) -> Problem:
    """Problems that a family's kernel accepts, of small and large sizes."""
    num_ranks = draw(st.sampled_from([1, 2, 5, 8, 16, 72]))
    num_experts = num_ranks * draw(st.integers(1, min(64, 2048 // num_ranks)))
    num_shared = draw(st.integers(0, 2))
    max_num_tokens = draw(st.integers(1, 8192))
    return Problem(
        num_ranks=num_ranks,
        num_experts=num_experts,
        top_k=draw(st.integers(1, min(num_experts, 31))),
        hidden_size=draw(st.sampled_from([256, 1024, 2816, 4096, 6144, 7168, 8192])),
        intermediate_size=256 * draw(st.integers(1, 16)),
        max_num_tokens=max_num_tokens,
        num_tokens=draw(st.integers(0, max_num_tokens)),
        weight_format=draw(st.sampled_from(sorted(family.traits.weights))),
        num_shared_experts=num_shared,
        shared_format=draw(st.sampled_from(sorted(family.traits.shared))) if num_shared else None,
        activation=family.traits.activation_names[0],
    )
