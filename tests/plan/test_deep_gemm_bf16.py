"""The grouped product of BF16 weights on Hopper: its tiles, its launch, and a layer of it."""

from dataclasses import replace

import pytest

from jax_megamoe.plan.grouped import deep_gemm_bf16
from jax_megamoe.plan.grouped.deep_gemm_bf16 import Blocks, Matrices
from jax_megamoe.plan.grouped.layer import GroupedLayer, plan_grouped
from jax_megamoe.plan.launch import KernelLaunch, TensorMap
from jax_megamoe.plan.tensor_map import SWIZZLE_128B

QWEN3_30B = GroupedLayer(
    arch=90,
    num_sms=132,
    num_tokens=64,
    top_k=8,
    num_experts=128,
    num_logical=128,
    hidden_size=2048,
    intermediate_size=768,
    weights="bf16",
    activations="bf16",
)
SHAPES = ((4, 256, 128), (128, 1536, 2048), (256, 4096, 7168), (128, 2944, 2944), (8, 384, 640))


def launches(layer: GroupedLayer) -> list[KernelLaunch]:
    return [step for step in plan_grouped(layer).steps if isinstance(step, KernelLaunch)]


@pytest.mark.parametrize("rows", [1, 8, 60, 512, 5000, 65536])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_tile_fits_into_memory(rows, shape):
    matrices = Matrices(*shape)
    height = deep_gemm_bf16.height((matrices, matrices), rows, 132)
    tile = deep_gemm_bf16.blocks(matrices, rows, height, 132)
    assert tile.m == height and height in (16, 32, 64, 128) and tile.n % 64 == 0
    assert tile.stages >= 3 and tile.shared_memory <= 232_448
    # The store warps of 16 rows are one; a warpgroup multiplies 64 rows.
    assert tile.math_threads == (256 if height == 128 else 128)
    accumulators = tile.n // 2 * max(1, height // (64 * tile.math_threads // 128))
    assert accumulators <= 128


@pytest.mark.parametrize(
    ("num_tokens", "height"), [(1, 16), (8, 16), (64, 16), (256, 32), (512, 64), (4096, 128)]
)
def test_blocks_grow_with_the_rows_of_an_expert(num_tokens, height):
    """One pass over the matrices up to a block of rows each."""
    assert replace(QWEN3_30B, num_tokens=num_tokens).block_m == height


def test_shared_memory_is_the_sum_of_the_kernels_own_parts():
    tile = Blocks(16, 128)
    # D, and for each of 12 stages A, B and two barriers.
    assert tile.stages == 12
    assert tile.shared_memory == 16 * 128 * 2 + 12 * (16 * 64 * 2 + 128 * 64 * 2 + 16)
    assert [Blocks(128, n).stages for n in (64, 128, 256)] == [8, 6, 3]


def test_a_layer_copies_tokens_into_slots_and_has_six_launches():
    symbols = [step.kernel.symbol for step in launches(QWEN3_30B)]
    product = "sm90_bf16_gemm_impl"
    around = ["group_tokens", "gather_rows", product, "activate_rows", product, "combine_rows"]
    assert symbols == around
    assert {s.kernel.source for s in launches(QWEN3_30B)} == {"sgl", "jax_megamoe"}


@pytest.mark.parametrize("early", [True, False])
def test_whoever_waits_for_its_predecessor_starts_early(early):
    found = launches(replace(QWEN3_30B, early=early))
    assert [step.config.programmatic_serialization for step in found] == [False, *[early] * 5]


def test_products_see_weights_and_slots_as_they_are_stored():
    plan = plan_grouped(QWEN3_30B)
    shapes = {name: shape for name, shape, _ in plan.scratch}
    slots = shapes["token_rows"][0]
    assert slots % plan.block_m == 0 and slots >= 512 + 128 * (plan.block_m - 1)
    _, _, first, _, second, _ = launches(QWEN3_30B)
    for step, names, (n, k) in (
        (first, ("token_rows", "w13_weight", "h"), (1536, 2048)),
        (second, ("hidden_rows", "w2_weight", "outputs"), (2048, 768)),
    ):
        assert step.config.grid == (132, 1, 1) and step.kernel.arch == "sm_90a"
        maps = [a.spec for a in step.arguments if isinstance(a, TensorMap)]
        assert tuple(spec.base.name for spec in maps) == names
        assert [spec.dims for spec in maps] == [(k, slots), (k, 128 * n), (n, slots)]
        assert [spec.box[0] for spec in maps] == [64, 64, 64]
        assert maps[0].box[1] == maps[2].box[1] == plan.block_m
        assert {spec.swizzle for spec in maps} == {SWIZZLE_128B}
        assert (shapes[names[0]][1], shapes[names[2]][1]) == (k, n)


def test_few_kernels_serve_all_numbers_of_tokens():
    kernels = {
        step.kernel
        for num_tokens in range(1, 2049, 3)
        for step in launches(replace(QWEN3_30B, num_tokens=num_tokens))
        if step.kernel.source == "sgl"
    }
    assert len(kernels) <= 12


def test_pairs_share_weights_only_where_the_kernels_counting_keeps_them_together():
    def cluster(**changes: int) -> set[tuple[int, int, int]]:
        found = launches(replace(QWEN3_30B, **changes))
        return {step.config.cluster for step in found if step.kernel.source == "sgl"}

    assert cluster(num_tokens=64) == {(1, 1, 1)}
    assert cluster(num_tokens=4096) == {(2, 1, 1)}
    assert cluster(num_tokens=4096, num_sms=131) == {(1, 1, 1)}
    odd = Matrices(8, 384, 640)  # three blocks of 128
    assert not deep_gemm_bf16.blocks(odd, 4096, 128, 132).paired
    for step in launches(replace(QWEN3_30B, num_tokens=4096)):
        if step.kernel.source == "sgl":
            assert step.kernel.template_args[15:17] == ("2", "false")
