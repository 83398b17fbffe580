"""Launch plans made by hand, small and with every kind of step and argument."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_megamoe.plan.kernel import KernelSpec, LaunchConfig
from jax_megamoe.plan.launch import (
    Bool,
    Fill,
    Float32,
    KernelLaunch,
    LaunchPlan,
    Pointer,
    Struct,
    SymmetricBuffer,
    TensorMap,
    Uint32,
)
from jax_megamoe.plan.operand import Operand
from jax_megamoe.plan.symmetric_buffer import BufferLayout
from jax_megamoe.plan.tensor_map import TensorMapSpec

BUFFER_BYTES = 4096
TABLE = bytes(range(16))

KERNEL = KernelSpec(
    source="jax_megamoe",
    arch="sm_90a",
    header="kernel.cuh",
    symbol="whole",
    template_args=("1", "true"),
    parameter_types=(
        "void*",
        "int*",
        "uint32_t",
        "float",
        "SymBuffer<8>",
        "cute::TmaDescriptor",
        "cute::TmaDescriptor",
        "const uint8_t*",
        "bool",
        "deep_gemm::EpilogueOperatorArgs",
    ),
)
ACTS = TensorMapSpec(
    base=Operand("symmetric_buffer", 1024),
    dtype=0,
    dims=(128, 8),
    strides=(128,),
    box=(128, 4),
    swizzle=3,
)
WEIGHTS = TensorMapSpec(
    base=Operand("w"), dtype=14, dims=(256, 4, 2, 2), strides=(128, 512, 1024), box=(128, 4, 1, 1),
    swizzle=3, l2_promotion=2, oob_fill=1,
)  # fmt: skip
FACTORS = Struct(
    "factors",
    (
        Pointer("scales", Operand("w", 16)),
        Uint32("stride", 3_000_000_000),
        Bool("clamped", True),
        Float32("alpha", 0.5),
        Float32("beta", -2.0),
        Pointer("counts", None),
        Pointer("rows", Operand("symmetric_buffer", 2048)),
        Uint32("num_rows", 7),
    ),
)
"""Zeros fill the bytes after ``clamped`` and behind ``num_rows``."""
ARGUMENTS = (
    Pointer("y", Operand("y", 64)),
    Pointer("stats", None),
    Uint32("num_tokens", 4_000_000_000),
    Float32("scale", 0.1),
    SymmetricBuffer("sym_buffer"),
    TensorMap("acts", ACTS),
    TensorMap("weights", WEIGHTS),
    Pointer("table", Operand("table", 4)),
    Bool("fast", True),
    FACTORS,
)
CONFIG = LaunchConfig(
    grid=(132, 1, 1),
    block=(384, 1, 1),
    cluster=(2, 1, 1),
    smem=200_000,
    programmatic_serialization=True,
)


def buffer(num_bytes: int = BUFFER_BYTES) -> BufferLayout:
    """A layout without regions."""
    return BufferLayout(num_bytes=num_bytes, max_num_tokens=8, regions=())


def whole_plan(num_ranks: int = 1, symbol: str = "whole") -> LaunchPlan:
    """A fill of the buffer, then a kernel with every kind of argument."""
    launch = KernelLaunch(dataclasses.replace(KERNEL, symbol=symbol), CONFIG, ARGUMENTS)
    fill = Fill(Operand("symmetric_buffer", 128), 576)
    return LaunchPlan(
        steps=(fill, launch),
        buffer=buffer(),
        num_ranks=num_ranks,
        block_m=64,
        constants=(("table", TABLE),),
    )


def pointer_plan(symbol: str = "pointers", **config: Any) -> LaunchPlan:
    """A kernel that takes x and y and no symmetric buffer."""
    kernel = dataclasses.replace(KERNEL, symbol=symbol, parameter_types=("void*", "void*"))
    shape = LaunchConfig(grid=(3, 2, 1), block=(32, 1, 1), **config)
    arguments = (Pointer("x", Operand("x")), Pointer("y", Operand("y")))
    return LaunchPlan(
        steps=(KernelLaunch(kernel, shape, arguments),),
        buffer=buffer(0),
        num_ranks=1,
        block_m=16,
    )


def operands() -> dict[str, jax.Array]:
    """x and the weights that the plans name."""
    return {"x": jnp.zeros((8, 64), jnp.bfloat16), "w": jnp.zeros((2, 8, 128), jnp.uint8)}


RESULTS = {"y": jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)}
