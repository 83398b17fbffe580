"""The packed parameter block of every kernel, and what the driver asks of a tensor map."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import FAMILIES, every_launch, example, launch_of, problems

from jax_megamoe.plan.kernel import KernelSpec, LaunchConfig
from jax_megamoe.plan.launch import (
    Bool,
    Float32,
    KernelLaunch,
    Pointer,
    Struct,
    SymmetricBuffer,
    TensorMap,
    Uint32,
    field_offsets,
    parameter_block,
)
from jax_megamoe.plan.tensor_map import (
    BFLOAT16,
    INT32,
    PACKED_U4_ALIGN8,
    PACKED_U4_ALIGN16,
    SWIZZLE_32B,
    SWIZZLE_64B,
    SWIZZLE_128B,
    UINT8,
)

# Bytes of the parameter block, read from 26 compiled cubins.
BLOCK_BYTES = {
    ("sgl", "sm100_fp8_fp4_mega_moe_impl"): 3080,
    ("sgl", "sm100_bf16_mega_moe_impl"): 1928,
    ("sgl", "sm90_fp8_mega_moe_impl"): 1664,
    ("sgl", "mega_moe_pre_dispatch_kernel"): 92,
    ("sgl", "sm90_mega_moe_pre_dispatch_kernel"): 80,
    ("vllm", "sm100_fp8_fp4_mega_moe_impl"): 2952,
    ("vllm", "sm100_fp8_fp4_mega_moe_situ_impl"): 2952,
    ("vllm", "sm100_nvfp4_mega_moe_impl"): 2944,
    ("vllm", "sm100_bf16_mega_moe_impl"): 1928,
    ("vllm", "sm100_fp4_fp4_mega_moe_impl"): 2568,
}
ELEMENT_BITS = {UINT8: 8, INT32: 32, BFLOAT16: 16, PACKED_U4_ALIGN8: 4, PACKED_U4_ALIGN16: 4}
SWIZZLE_BYTES = {SWIZZLE_32B: 32, SWIZZLE_64B: 64, SWIZZLE_128B: 128}
SIZES = {Pointer: 8, Uint32: 4, Float32: 4, SymmetricBuffer: 592, TensorMap: 128}


LAUNCHES = every_launch()


@pytest.mark.parametrize("name", LAUNCHES)
def test_parameter_block(name):
    launch = LAUNCHES[name]
    block = parameter_block(launch)
    assert sum(block[-1]) == BLOCK_BYTES[launch.kernel.source, launch.kernel.symbol]
    assert [size for _, size in block] == [SIZES[type(each)] for each in launch.arguments]
    # A cubin's parameters start at 0x380 on SM100 and 0x210 on SM90 in the constant bank.
    base = 0x210 if launch.kernel.arch == "sm_90a" else 0x380
    end = 0
    for (offset, size), argument in zip(block, launch.arguments, strict=True):
        alignment = 128 if isinstance(argument, TensorMap) else min(size, 8)
        assert end <= offset < end + alignment
        assert (base + offset) % alignment == 0
        end = offset + size
    assert len(launch.kernel.parameter_types) == len(launch.arguments)


def test_fields_of_a_struct_lie_as_in_c():
    flag, number, factor = Bool("flag", True), Uint32("number", 7), Float32("factor", 0.5)
    pointer = Pointer("pointer", None)
    whole = Struct("whole", (pointer, number, flag, factor, flag, pointer, flag))
    small = Struct("small", (flag, number, flag))
    assert field_offsets(whole) == (0, 8, 12, 16, 20, 24, 32)
    assert field_offsets(small) == (0, 4, 8)
    kernel = KernelSpec("sgl", "sm_100f", "kernel.cuh", "kernel", (), ())
    arguments = (flag, small, flag, whole, flag, Struct("flags", (flag, flag)))
    launch = KernelLaunch(kernel, LaunchConfig((1, 1, 1), (32, 1, 1)), arguments)
    # A struct ends at a multiple of its own alignment.
    assert parameter_block(launch) == ((0, 1), (4, 12), (16, 1), (24, 40), (64, 1), (65, 2))


@settings(deadline=None)
@given(data=st.data(), family=st.sampled_from(FAMILIES))
def test_tensor_maps_are_what_the_driver_takes(data, family):
    """The requirements of `cuTensorMapEncodeTiled`, CUDA driver API reference."""
    launch = launch_of(family, data.draw(problems(family)))
    specs = [each.spec for each in launch.arguments if isinstance(each, TensorMap)]
    for spec in specs:
        rank, bits = len(spec.dims), ELEMENT_BITS[spec.dtype]
        assert (len(spec.strides), len(spec.box)) == (rank - 1, rank)
        assert spec.base.offset % (32 if spec.dtype == PACKED_U4_ALIGN16 else 16) == 0
        assert all(0 < size < 2**32 for size in spec.dims) or spec.base.name == "x"
        assert all(stride % 16 == 0 and stride < 2**40 for stride in spec.strides)
        assert all(0 < size <= 256 for size in spec.box)
        assert spec.dims[0] * bits // 8 <= spec.strides[0]
        if spec.dtype == PACKED_U4_ALIGN16:
            assert spec.box[0] == 128 and spec.strides[0] % 32 == 0 and spec.dims[0] % 128 == 0
        row = spec.box[0] * bits // 8
        assert row % 16 == 0 and row <= SWIZZLE_BYTES.get(spec.swizzle, row)


def test_without_shared_experts_the_routed_maps_stand_in():
    for family in FAMILIES:
        launch = launch_of(family, example(family))
        specs = {each.name: each.spec for each in launch.arguments if isinstance(each, TensorMap)}
        shared = [name for name in specs if name.startswith("shared_")]
        assert len(shared) == (5 if family.traits.shared_source == "caller" else len(specs) // 2)
        assert all(specs[name] == specs[name.removeprefix("shared_")] for name in shared)


def test_nothing_is_written_without_tokens():
    for family in FAMILIES:
        y = launch_of(family, example(family, num_tokens=0)).arguments[0]
        assert y == Pointer("y", None)
