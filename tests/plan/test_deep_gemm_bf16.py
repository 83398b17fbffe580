"""The grouped products of BF16 weights: their tiles, their launches, and a layer of them."""

from dataclasses import replace

import pytest

from jax_megamoe.plan.grouped import deep_gemm_bf16_sm90 as sm90
from jax_megamoe.plan.grouped import deep_gemm_bf16_sm100 as sm100
from jax_megamoe.plan.grouped.call import GroupedLayer
from jax_megamoe.plan.grouped.layer import plan_grouped
from jax_megamoe.plan.grouped.slots import Matrices
from jax_megamoe.plan.launch import (
    Struct,
    TensorMap,
    field_offsets,
    parameter_block,
)
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


ON_B200 = replace(QWEN3_30B, arch=100, num_sms=148)
ARCHS = pytest.mark.parametrize("layer", [QWEN3_30B, ON_B200], ids=["sm90", "sm100"])


@pytest.mark.parametrize("rows", [1, 8, 60, 512, 5000, 65536])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_tile_fits_into_memory(rows, shape):
    matrices = Matrices(*shape)
    height = sm90.height((matrices, matrices), rows, 132)
    tile = sm90.blocks(matrices, rows, height, 132)
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
    tile = sm90.Blocks(16, 128)
    # D, and for each of 12 stages A, B and two barriers.
    assert tile.stages == 12
    assert tile.shared_memory == 16 * 128 * 2 + 12 * (16 * 64 * 2 + 128 * 64 * 2 + 16)
    assert [sm90.Blocks(128, n).stages for n in (64, 128, 256)] == [8, 6, 3]


@ARCHS
def test_a_layer_copies_tokens_into_slots_and_has_six_launches(layer):
    symbols = [step.kernel.symbol for step in plan_grouped(layer).launches]
    product = f"sm{layer.arch}_bf16_gemm_impl"
    around = ["group_tokens", "gather_rows", product, "activate_rows", product, "combine_rows"]
    assert symbols == around
    assert {s.kernel.source for s in plan_grouped(layer).launches} == {"sgl", "jax_megamoe"}
    arch = {90: "sm_90a", 100: "sm_100f"}[layer.arch]
    assert {s.kernel.arch for s in plan_grouped(layer).launches} == {arch}


@ARCHS
@pytest.mark.parametrize("early", [True, False])
def test_whoever_waits_for_its_predecessor_starts_early(layer, early):
    found = plan_grouped(replace(layer, early=early)).launches
    assert [step.config.programmatic_serialization for step in found] == [False, *[early] * 5]
    found = plan_grouped(replace(layer, early=early, num_tokens=129)).launches
    symbols = [step.kernel.symbol for step in found[:3]]
    assert symbols == ["group_tokens", "place_rows", "gather_rows"]
    assert [step.config.programmatic_serialization for step in found] == [False, *[early] * 6]


@ARCHS
def test_products_see_weights_and_slots_as_they_are_stored(layer):
    plan = plan_grouped(layer)
    shapes = {name: shape for name, shape, _ in plan.scratch}
    slots = shapes["token_rows"][0]
    assert slots % plan.block_m == 0 and slots >= 512 + 128 * (plan.block_m - 1)
    _, _, first, _, second, _ = plan_grouped(layer).launches
    for step, names, (n, k) in (
        (first, ("token_rows", "w13_weight", "h"), (1536, 2048)),
        (second, ("hidden_rows", "w2_weight", "outputs"), (2048, 768)),
    ):
        assert step.config.grid == (layer.num_sms, 1, 1)
        maps = [a.spec for a in step.arguments if isinstance(a, TensorMap)]
        assert tuple(spec.base.name for spec in maps) == names
        assert [spec.dims for spec in maps] == [(k, slots), (k, 128 * n), (n, slots)]
        assert [spec.box[0] for spec in maps] == [64, 64, 64]
        # On SM100 each of a pair loads half of a block's rows, and 16 at a time are stored.
        rows = (plan.block_m, plan.block_m) if layer.arch == 90 else (plan.block_m // 2, 16)
        assert (maps[0].box[1], maps[2].box[1]) == rows
        assert {spec.swizzle for spec in maps} == {SWIZZLE_128B}
        assert (shapes[names[0]][1], shapes[names[2]][1]) == (k, n)


@ARCHS
def test_few_kernels_serve_all_numbers_of_tokens(layer):
    kernels = {
        step.kernel
        for num_tokens in range(1, 4097, 3)
        for step in plan_grouped(replace(layer, num_tokens=num_tokens)).launches
        if step.kernel.source == "sgl"
    }
    assert len(kernels) <= 14


def test_pairs_share_weights_only_where_the_kernels_counting_keeps_them_together():
    def cluster(**changes: int) -> set[tuple[int, int, int]]:
        found = plan_grouped(replace(QWEN3_30B, **changes)).launches
        return {step.config.cluster for step in found if step.kernel.source == "sgl"}

    assert cluster(num_tokens=64) == {(1, 1, 1)}
    assert cluster(num_tokens=4096) == {(2, 1, 1)}
    assert cluster(num_tokens=4096, num_sms=131) == {(1, 1, 1)}
    odd = Matrices(8, 384, 640)  # three blocks of 128
    assert not sm90.blocks(odd, 4096, 128, 132).paired
    for step in plan_grouped(replace(QWEN3_30B, num_tokens=4096)).launches:
        if step.kernel.source == "sgl":
            assert step.kernel.template_args[15:17] == ("2", "false")


@pytest.mark.parametrize(
    ("mean", "height"), [(0, 32), (26, 32), (28, 64), (80, 96), (160, 192), (187, 224), (4096, 224)]
)
def test_blocks_on_sm100_cover_what_an_expert_is_expected_to_have(mean, height):
    """DeepGEMM's `get_theoretical_mk_alignment_for_contiguous_layout(int(1.2 * mean))`."""
    matrices = Matrices(16, 256, 128)
    assert sm100.height((matrices, matrices), max(1, 16 * mean), 148) == height


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("height", range(32, 225, 32))
def test_memory_on_sm100_holds_the_kernels_own_struct(height, paired):
    """`SM100BF16GemmSharedStorage`: D twice, A and B, three barriers a stage, five, an address."""
    tile = sm100.Blocks(height, paired)
    stage = (height // (1 + paired) + 128) * 64 * 2
    needed = 2 * 16 * 128 * 2 + tile.stages * (stage + 3 * 8) + 5 * 8 + 4
    assert needed <= tile.shared_memory <= 232_448
    # What DeepGEMM's host code adds to the tiles, for kernels with more barriers than this one.
    assert tile.shared_memory == 2 * 16 * 128 * 2 + 828 + tile.stages * stage
    assert 4 <= tile.stages <= 32 and tile.shared_memory + stage > 232_448
    # A stage of A, and of B, starts where a swizzled tile may.
    assert height // (1 + paired) * 128 % 1024 == 0


def test_pairs_on_sm100_have_two_blocks_of_the_matrix_each():
    def cluster(**changes: int) -> list[tuple[int, int, int]]:
        found = plan_grouped(replace(ON_B200, **changes)).launches
        return [step.config.cluster for step in found if step.kernel.source == "sgl"]

    assert cluster() == [(2, 1, 1), (2, 1, 1)]
    assert cluster(num_sms=147) == [(1, 1, 1), (1, 1, 1)]
    assert cluster(hidden_size=1920) == [(2, 1, 1), (1, 1, 1)]  # 15 blocks of 128
    for step in plan_grouped(replace(ON_B200, hidden_size=1920)).launches:
        if step.kernel.source == "sgl":
            pairs = step.config.cluster[0]
            arguments = step.kernel.template_args
            assert arguments[15:17] == (str(pairs), "true" if pairs == 2 else "false")


def test_the_epilogues_struct_on_sm100_is_48_bytes_behind_the_sizes():
    for step in plan_grouped(ON_B200).launches:
        if step.kernel.source == "sgl":
            (struct,) = (each for each in step.arguments if isinstance(each, Struct))
            assert struct.name == "epilogue_args" and step.arguments[4] is struct
            assert field_offsets(struct) == (0, 8, 12, 16, 20, 24, 32, 40)
            block = parameter_block(step)
            assert block == (
                *((0, 8), (8, 4), (12, 4), (16, 4), (24, 48)),
                *((128, 128), (256, 128), (384, 128)),
            )
