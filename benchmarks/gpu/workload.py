"""Layers, parameters and tokens that the scripts on a GPU run, and their kernels compiled ahead."""

import time
from collections.abc import Iterable
from typing import Any

import jax
from jaxtyping import Array

from jax_megamoe.cli.gpu import routings
from jax_megamoe.cli.gpu.models import MODELS
from jax_megamoe.compile import compile_many
from jax_megamoe.config import Activation, MoEConfig
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.launch import LaunchPlan
from jax_megamoe.weights.drawn import random_experts
from jax_megamoe.weights.params import ExpertWeights

MAX_TOKENS = 4096
"""max_num_tokens of every layer here: that of the recorded launches."""

SHAPES = {name: MODELS[name].sizes for name in ("dsv3_ep8share", "qwen3_30b", "v4_flash")}
"""Sizes by the name of the recorded launches: the experts of one of 8 ranks of DeepSeek-V3, and
all experts of Qwen3-30B-A3B and of a layer of DeepSeek-V4-Flash's size."""

EXPERT_PARALLEL = MoEConfig(
    num_experts=32,
    top_k=8,
    hidden_size=2048,
    intermediate_size=768,
    max_num_tokens=1024,
    weight_format="fp8_block",
)
"""What several ranks on one GPU run; small, as each has a part of the GPU or of its time."""

WIDE = dict(num_experts=128, top_k=4, hidden_size=3072, intermediate_size=3072)
"""GPT-OSS-120B's sizes rounded up to a multiple of 512: an intermediate size over half the hidden
size."""

H200 = DeviceSpec(90, 132)

Tokens = tuple[Array, Array, Array]


def config(shape: str, recipe: str = "fp8_block", **changes: Any) -> MoEConfig:
    """A layer of a shape; 4-bit ones have the clamp of their recorded launches, DeepSeek-V4's."""
    known = {**SHAPES, "gpt_oss": WIDE}
    sizes = {"max_num_tokens": MAX_TOKENS, **known[shape], **changes}
    clamp = None if recipe == "fp8_block" else 10.0
    return MoEConfig(**sizes, weight_format=recipe, activation=Activation("swiglu", clamp=clamp))


def weights(cfg: MoEConfig, seed: int = 0) -> ExpertWeights:
    """Quantised normal matrices of variance 1 / fan-in, on the default device."""
    return jax.block_until_ready(random_experts(cfg, jax.random.key(seed)))


tokens = routings.drawn


def record_operands(x: Array, ids: Array, factors: Array, params: ExpertWeights) -> dict[str, int]:
    """Addresses of a call's arrays by the names that the recorded launches use."""
    arrays = {
        "x": x,
        "topk_idx": ids,
        "topk_weights": factors,
        "l1_weights": params.routed.w13_weight,
        "l1_weights_sf": params.routed.w13_weight_scale,
        "l1_global_scales": params.routed.w13_weight_scale_2,
        "l2_weights": params.routed.w2_weight,
        "l2_weights_sf": params.routed.w2_weight_scale,
        "l2_global_scales": params.routed.w2_weight_scale_2,
    }
    arrays = {name: array for name, array in arrays.items() if array is not None}
    jax.block_until_ready(list(arrays.values()))
    return {name: array.unsafe_buffer_pointer() for name, array in arrays.items()}


def compile_kernels(plans: Iterable[LaunchPlan]) -> str:
    """Compiles what the plans launch, several at a time; returns how many in how many seconds.

    Raises:
        RuntimeError: the first kernel that could not be compiled.
    """
    start = time.perf_counter()
    outcomes = compile_many(step.kernel for plan in plans for step in plan.launches)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return f"{len(outcomes)} kernels compiled or read in {time.perf_counter() - start:.1f} s"
