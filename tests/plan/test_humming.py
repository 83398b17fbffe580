"""Launches of grouped products against those that humming-kernels' own Python planned."""

import json
from dataclasses import replace
from pathlib import Path

import humming_records
import pytest

from jax_megamoe.cli.gpu.models import MODELS
from jax_megamoe.plan.grouped import humming, humming_unit, tiles
from jax_megamoe.plan.grouped.call import GroupedLayer
from jax_megamoe.plan.grouped.humming_memory import shared_memory
from jax_megamoe.plan.grouped.layer import plan_grouped
from jax_megamoe.plan.grouped.product import KNOWN_ARCHS, Product, Tiles
from jax_megamoe.plan.grouped.rules import planned_arch, refusal
from jax_megamoe.plan.launch import KernelLaunch, Pointer, TensorMap

ROOT = Path(__file__).parents[2]
PLANS, KERNELS = humming_records.read()


def name_of(plan: humming_records.Record) -> str:
    shape, choice = f"{plan['shape']}-{plan['matrix']}", plan["config"]
    return f"{plan['sm']}-{plan['format']}-{plan['activation']}-{shape}-{choice['block_shape']}"


def test_launches_are_the_recorded_ones(record_property):
    """A function from a record's problem and tiles to what the package's host launches."""
    for plan in PLANS:
        got = humming_records.planned(plan, plan["device_sms"])
        assert got == humming_records.recorded(plan, KERNELS[plan["kernel"]]), name_of(plan)
    record_property("records", len(PLANS))
    assert len(PLANS) == 618


def test_tiles_on_hopper_are_mostly_the_recorded_ones():
    """The closed form's misses cost time, not the result."""
    same = total = 0
    for plan in PLANS:
        inputs = ("bf16", "fp8_f32_128")
        if plan["sm"] != 90 or plan["batch_invariant"] or plan["activation"] not in inputs:
            continue
        chosen = tiles.choose(humming_records.product_of(plan), plan["rows"], 132)
        same += replace(chosen, ordered=False) == humming_records.tiles_of(plan)
        total += 1
    # The selection has one record for each choice, so rare ones weigh more than in all records,
    # where 85 to 94 % agree.
    assert (total, same) == (93, 80)


def test_tiles_of_few_rows_of_bf16_are_the_recorded_ones():
    """With wide tiles alone a token of GPT-OSS took 82 us, where Humming's layer with these took 51
    (benchmarks/results/league_h200_bf16_rows.json)."""
    few = [
        plan
        for plan in PLANS
        if (plan["sm"], plan["activation"], plan["batch_invariant"]) == (90, "bf16", False)
        and plan["rows"] <= 16
    ]
    for plan in few:
        chosen = tiles.choose(humming_records.product_of(plan), plan["rows"], 132)
        assert replace(chosen, ordered=False) == humming_records.tiles_of(plan), name_of(plan)
    assert len(few) == 34


def problems() -> list[Product]:
    """Shapes of the tests and of models, on every architecture and for all its recipes."""
    shapes = ((4, 256, 128), (128, 1536, 2048), (256, 7168, 2048), (128, 3072, 2944), (8, 512, 384))
    recipes = [
        *((form, "bf16") for form in ("mxfp4", "mxfp8", "nvfp4")),
        ("fp8_block", "fp8_f32_128"),
        ("mxfp4", "fp8_f32_128"),
    ]
    found: list[Product] = []
    for arch in KNOWN_ARCHS:
        for weights, inputs in recipes:
            activations = "fp8_block" if inputs == "fp8_f32_128" else "bf16"
            if refusal(weights, activations, arch):
                continue
            for experts, n, k in shapes:
                found.append(
                    Product(
                        arch=arch, weights=weights, inputs=inputs, num_experts=experts, n=n, k=k
                    )
                )
    return found


@pytest.mark.parametrize("rows", [1, 8, 60, 512, 5000, 65536])
def test_any_tiles_fit_the_matrix_and_the_memory(rows):
    for product in problems():
        chosen = tiles.choose(product, rows, 132)
        assert humming.limits(product, chosen) == "", (product, chosen)
        room = tiles.SHARED_MEMORY[product.arch]
        assert shared_memory(product, chosen) <= room
        assert chosen.ctas * chosen.threads <= 2048
        assert chosen.warp[1] >= (32 if product.inputs == "bf16" else 16)
        assert all(b % w == 0 for b, w in zip(chosen.block, chosen.warp, strict=True))
        if chosen.wgmma:
            assert chosen.stages >= 3 and chosen.block[1] // chosen.warp[1] % 4 == 0
        assert chosen.ordered == chosen.stream_k


def test_sampled_rows_keep_the_number_of_kernels_small():
    every = {tiles.sampled_rows(rows) for rows in range(1, 32769)}
    assert len(every) < 600
    assert all(tiles.sampled_rows(rows) >= rows for rows in range(1, 4000))


def test_expected_blocks_of_one_expert_are_exact():
    assert tiles.expected_blocks(100, 1, 8) == pytest.approx(13)
    assert tiles.expected_blocks(3, 1000, 8) == pytest.approx(3, abs=0.01)


LAYER = GroupedLayer(
    arch=90,
    num_sms=132,
    num_tokens=64,
    top_k=8,
    num_experts=128,
    num_logical=128,
    hidden_size=2944,
    intermediate_size=768,
    weights="mxfp4",
    activations="fp8_block",
    second_scales=("tensor", "tensor"),
)


def text_of(step: KernelLaunch) -> str:
    """The classes of a product's unit; empty for this package's kernels."""
    if not step.kernel.unit:
        return ""
    return humming_unit.declarations(*humming_unit.decoded(step.kernel.unit))


def test_a_layer_has_five_launches_and_no_buffer():
    plan = plan_grouped(LAYER)
    symbols = [step.kernel.symbol for step in plan_grouped(LAYER).launches]
    assert symbols == ["group_tokens", "humming", "activate_rows", "humming", "combine_rows"]
    assert plan.buffer.num_bytes == 0 and plan.unstaged == ()


def test_rows_of_more_than_a_block_are_counted_and_then_placed():
    """128 experts, 8 a token: 1,024 rows are one block's, a row more needs another launch."""
    assert [replace(LAYER, num_tokens=count).sorters for count in (128, 129)] == [1, 2]
    group, place, *_ = plan_grouped(replace(LAYER, num_tokens=129)).launches
    assert [each.kernel.symbol for each in (group, place)] == ["group_tokens", "place_rows"]
    assert {"row_counts", "sorted_ids"} <= {
        each.operand.name
        for each in place.arguments
        if isinstance(each, Pointer) and each.operand is not None
    }
    assert Pointer("sorted_ids", None) in group.arguments
    assert place.config.grid == (2, 1, 1) and place.config.programmatic_serialization


@pytest.mark.parametrize(
    ("rows", "experts", "threads", "blocks"),
    [
        *((1, 128, 256, 1), (256, 512, 256, 1), (257, 256, 1024, 1), (257, 257, 512, 1)),
        *((1024, 256, 1024, 1), (1025, 256, 1024, 2), (512, 257, 512, 1), (513, 257, 512, 2)),
        (4096, 512, 512, 8),
    ],
)
def test_blocks_that_sort(rows, experts, threads, blocks):
    layer = replace(LAYER, num_tokens=rows, top_k=1, num_experts=experts, num_logical=experts)
    assert (layer.sort_threads, layer.sorters) == (threads, blocks)
    plan = plan_grouped(layer)
    counts = [shape for name, shape, _ in plan.scratch if name == "row_counts"]
    assert counts == ([(blocks, experts)] if blocks > 1 else [])
    # Counts of each warp, sums and starts lie in the 48 KiB that every GPU has without asking.
    assert 4 * (threads // 32 * experts + 2 * experts + 1) <= 48 << 10
    assert plan.launches[0].config.block == (threads, 1, 1)


@pytest.mark.parametrize("form", ["mxfp4", "bf16"])
def test_fast_math_is_the_activations_alone(form):
    layer = LAYER if form == "mxfp4" else replace(LAYER, weights=form, activations=form)
    fast, exact = (
        plan_grouped(replace(layer, num_tokens=200, fast_math=each)).launches
        for each in (True, False)
    )
    (changed,) = [pair for pair in zip(fast, exact, strict=True) if pair[0] != pair[1]]
    assert [each.kernel.symbol for each in changed] == ["activate_rows"] * 2
    # Before whether it may start early.
    assert [each.kernel.template_args[-2] for each in changed] == ["true", "false"]
    assert changed[0].arguments == changed[1].arguments


def test_what_reads_the_tables_early_does_not_start_before_they_are_there():
    early = [step.config.programmatic_serialization for step in plan_grouped(LAYER).launches]
    # The first product reads tables of the kernel before it, so it waits for that one's end.
    assert early == [False, False, True, True, True]
    several = plan_grouped(replace(LAYER, num_tokens=129)).launches
    # So it does where `place_rows`, which starts early itself, makes them.
    assert [step.config.programmatic_serialization for step in several] == [
        *(False, True, False),
        *(True, True, True),
    ]
    kept = [text_of(step).count("kUsePdl = true") for step in plan_grouped(LAYER).launches]
    assert kept == [0, 1, 0, 1, 0]
    apart = plan_grouped(replace(LAYER, early=False)).launches
    assert not any(step.config.programmatic_serialization for step in apart)
    ampere = replace(LAYER, arch=80, activations="bf16", second_scales=("none", "none"))
    assert not any(step.config.programmatic_serialization for step in plan_grouped(ampere).launches)


def test_rows_of_w2_are_padded_and_not_stored():
    _, first, _, second, _ = map(text_of, plan_grouped(LAYER).launches)
    assert "using Problem = Shape<0, 1536, 2944>;" in first
    assert "using Problem = Shape<0, 3072, 768>;" in second
    assert "using Padding = Shape<0, 128, 0>;" in second


def test_scratch_holds_every_slot():
    plan = plan_grouped(LAYER)
    shapes = {name: shape for name, shape, _ in plan.scratch}
    assert shapes["sorted_ids"] == (humming.capacity(512, 128, plan.block_m),)
    assert shapes["expert_ids"] == (shapes["sorted_ids"][0] // plan.block_m,)
    assert shapes["h"] == (512, 1536) and shapes["hidden_scales"] == (512, 6)


def test_stream_k_sums_in_turn_on_hopper():
    _, first, *_ = plan_grouped(replace(LAYER, stream_k=True)).launches
    assert "kSmVersion = 80u" in text_of(first)
    locks = next(argument for argument in first.arguments if argument.name == "locks")
    assert isinstance(locks, Pointer) and locks.operand is not None
    _, first, *_ = plan_grouped(replace(LAYER, stream_k=False)).launches
    assert "kSmVersion = 90u" in text_of(first)
    assert Pointer("locks", None) in first.arguments


def test_maps_stay_inside_the_weights():
    """The extent of a map of flat and of packed words is the array's."""
    for activations, scales, bits in (
        ("fp8_block", ("none", "none"), 8),
        ("bf16", ("none",) * 2, 4),
    ):
        weights = "fp8_block" if bits == 8 else "mxfp4"
        layer = replace(
            LAYER, weights=weights, activations=activations, second_scales=scales, num_tokens=4096
        )
        first = next(
            each for each in plan_grouped(layer).launches if each.kernel.symbol == "humming"
        )
        maps = {a.name: a.spec for a in first.arguments if isinstance(a, TensorMap)}
        spec = maps["B"]
        last = sum((d - 1) * s for d, s in zip(spec.dims[1:], spec.strides, strict=True))
        assert last + 4 * spec.dims[0] == 128 * 1536 * 2944 * bits // 8


@pytest.mark.parametrize(
    ("weights", "activations", "arch", "expected"),
    [
        ("mxfp4", "bf16", 75, "compute capability 8.0 or newer"),
        ("int4", "bf16", 90, "weights in one of"),
        ("bf16", "mxfp8", 90, "bf16 activations beside bf16 weights"),
        ("bf16", "bf16", 80, "compute capability 9.0"),
        ("bf16", "bf16", 90, ""),
        ("fp8_block", "bf16", 80, "fp8_block activations"),
        ("mxfp8", "fp8_block", 90, "mxfp4 or fp8_block weights"),
        ("fp8_block", "fp8_block", 80, "compute capability 8.9 or newer"),
        ("mxfp4", "fp8_block", 89, "compute capability 9.0 for mxfp4"),
        ("mxfp4", "mxfp8", 80, ""),
        ("nvfp4", "nvfp4", 120, ""),
    ],
)
def test_what_is_refused(weights, activations, arch, expected):
    got = refusal(weights, activations, arch)
    assert got.startswith(expected) and bool(got) == bool(expected)


def test_architectures_run_what_is_compiled_for_their_generation():
    found = {arch: planned_arch(arch) for arch in (70, 75, 80, 86, 87, 89, 90, 100, 103, 120, 121)}
    assert found == {
        **{70: 0, 75: 0, 80: 80, 86: 80, 87: 80, 89: 89, 90: 90},
        **{100: 100, 103: 100, 120: 120, 121: 120},
    }


def test_a_choice_is_all_that_a_unit_depends_on():
    """Tiles that differ in one field make other text, so no kernel is taken for another."""
    product = humming_records.product_of(PLANS[0])
    chosen = humming_records.tiles_of(PLANS[0])
    assert isinstance(chosen, Tiles)
    texts = {humming_unit.declarations(product, chosen)}
    for change in (dict(raster=8), dict(evict_first=True), dict(pdl=True), dict(stream_k=False)):
        texts.add(humming_unit.declarations(product, replace(chosen, **change)))
    assert len(texts) >= 4


def test_a_unit_is_its_product_and_tiles():
    for plan in PLANS[::50]:
        pair = humming_records.product_of(plan), humming_records.tiles_of(plan)
        unit = humming_unit.encoded(*pair)
        assert humming_unit.decoded(unit) == pair
        for wrong in (unit[:-1], (*unit, "1"), ("x", *unit[1:]), (unit[0], "other", *unit[2:])):
            with pytest.raises(ValueError, match="unit: expected a product and its tiles, got"):
                humming_unit.decoded(wrong)


def test_forms_of_tiles_are_near_the_fastest_measured():
    """For every layer of the record the pair of forms takes at most 4 % more than the best."""
    found = json.loads((ROOT / "benchmarks/results/tile_forms_h200.json").read_text())["rows"]
    pairs: dict[tuple[str, int], str] = {}
    for row in found:
        sizes = MODELS[row["shape"]].sizes
        each = replace(LAYER, **sizes, num_logical=sizes["num_experts"])
        each = replace(each, num_tokens=row["num_tokens"])
        forms: list[str] = []
        for w2 in (False, True):
            chosen = tiles.choose(each.product(w2), each.rows, each.num_sms)
            got = each.tiles(w2)
            assert got.ordered == got.stream_k
            is_narrow = got.block[1] < chosen.block[1]
            forms.append("narrow" if is_narrow else "cut" if got.stream_k else "wide")
        times = row["microseconds"]
        pair = pairs[row["shape"], row["num_tokens"]] = " ".join(forms)
        assert times[pair] <= 1.04 * min(times.values()), (row["shape"], row["num_tokens"], pair)
    assert pairs["qwen3_30b", 1] == "wide wide"
    assert pairs["v4_flash", 1] == pairs["gpt_oss_120b", 1] == "narrow narrow"
    assert pairs["v4_flash", 8] == "cut wide"


def test_waves_of_other_formats():
    """FP8 blocks are uncut; BF16 inputs are cut as Humming's own rule says, in order."""
    blocks = replace(LAYER, weights="fp8_block", second_scales=("none", "none"), num_tokens=1)
    assert not blocks.cuts
    deep = dict(hidden_size=4096, intermediate_size=4096, second_scales=("none", "none"))
    wide = replace(LAYER, **deep, weights="mxfp4", activations="bf16", num_tokens=1)
    assert [(wide.tiles(w2).stream_k, wide.tiles(w2).ordered) for w2 in (False, True)] == [
        (True, True),
        (True, True),
    ]
    assert not replace(wide, arch=80).cuts
    # Where second inputs are quantised, a first product in parts would move their codes.
    quantised = replace(wide, activations="mxfp8")
    assert [quantised.tiles(w2).stream_k for w2 in (False, True)] == [False, True]
