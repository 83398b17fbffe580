"""Layouts of the symmetric buffer: regions in order, apart, aligned, inside; scale pages."""

import itertools

import pytest
import scale_pages
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import FAMILIES, example, problems

from jax_megamoe.plan.symmetric_buffer import ITEM_BYTES, BufferLayout, sm90_layout, sm100_layout

SM90_PROBLEM = example(None, max_num_tokens=4096)


def assert_placed(layout: BufferLayout) -> None:
    """Regions lie one after the other, each aligned for its elements, tensors for the TMA."""
    own = [(name, region) for name, region in layout.regions if not is_alias(layout, name)]
    for (name, region), (_, following) in itertools.pairwise(own):
        assert region.offset + region.num_bytes <= following.offset, name
    last = own[-1][1]
    assert last.offset + last.num_bytes == layout.num_bytes
    for name, region in own:
        assert region.offset % ITEM_BYTES[region.dtype] == 0, name
        if "acts" in name or name == "x":
            assert region.offset % 16 == 0, name


def is_alias(layout: BufferLayout, name: str) -> bool:
    return name == "shared_l1_acts" and layout[name] == layout["x"]


@settings(deadline=None)
@given(data=st.data(), family=st.sampled_from(FAMILIES), num_sms=st.sampled_from([132, 148, 152]))
def test_sm100_regions_are_apart_and_aligned(data, family, num_sms):
    problem = data.draw(problems(family))
    layout = sm100_layout(family.traits, problem, num_sms)
    assert_placed(layout)
    assert layout.max_num_tokens % 1920 == 0
    assert problem.max_num_tokens <= layout.max_num_tokens < problem.max_num_tokens + 1920


def test_sm90_regions_are_apart_and_aligned():
    layout = sm90_layout(SM90_PROBLEM)
    assert_placed(layout)
    assert layout.max_num_tokens == 4096
    assert [name for name, _ in layout.regions][:5] == [
        *("workspace", "x", "x_sf", "topk_idx", "topk_weights"),
    ]


def test_a_region_that_is_not_there():
    layout = sm90_layout(SM90_PROBLEM)
    assert "x_scales" not in layout
    with pytest.raises(KeyError, match="x_scales"):
        layout["x_scales"]


@pytest.mark.parametrize("block_m", [16, 32, 64, 128, 192, 240])
def test_scale_rows_of_tokens_are_distinct_and_in_the_region(block_m):
    tokens = 1920
    rows = scale_pages.shared_scale_rows(tokens, block_m).tolist()
    assert len(set(rows)) == tokens
    assert max(rows) < 128 * tokens // 8
    # Token t of a tile, by hand: rows come in 32 groups of 4, one per 32 tokens.
    first_tile = {0: 0, 1: 4, 15: 60, 31: 124, 32: 1, 33: 5, 127: 127, 128: 128, 160: 129}
    for token, row in first_tile.items():
        if token < block_m:
            assert rows[token] == row
    assert rows[block_m] == max(128, -(-block_m // 128) * 128)


def test_shared_experts_read_their_own_region_only_where_the_format_differs():
    shared = {"num_shared_experts": 1, "shared_format": "bf16"}
    layouts = {f.name: sm100_layout(f.traits, example(f, **shared), 148) for f in FAMILIES}
    fp8 = layouts["sgl_sm100_mx"]
    assert fp8["shared_l1_acts"] == fp8["x"]
    nvfp4 = layouts["vllm_sm100_nvfp4"]
    assert nvfp4["shared_l1_acts"].dtype == "bfloat16"
    assert nvfp4["shared_l1_acts"].offset > nvfp4["topk_weights"].offset
    assert "shared_l1_acts_sf" not in nvfp4
    assert "shared_l1_acts" not in layouts["vllm_sm100_fp4_fp4"]


def sizes_of(architecture: str) -> list[dict[str, int]]:
    """Sizes whose layouts come close to each other: products of small factors."""
    lists = dict(
        num_experts=(8, 16, 32, 64),
        top_k=(1, 2, 4, 8),
        hidden_size=(1024, 2048, 3072, 4096) if architecture == "sm90" else (1024, 2048, 4096),
        intermediate_size=(256, 512, 768, 1024, 1536, 2048),
        max_num_tokens=(128, 256, 512, 768, 1024, 2048) if architecture == "sm90" else (8, 2000),
    )
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]


@pytest.mark.parametrize("architecture", ["sm90", "sm100"])
def test_equal_fingerprints_are_equal_layouts(architecture):
    """Many layouts have as many bytes; none of them, of any kernel source, has another's name."""
    by_name: dict[str, tuple[str, BufferLayout]] = {}
    sizes: dict[int, set[str]] = {}
    families = [None] if architecture == "sm90" else [f for f in FAMILIES if f.source == "sgl"]
    for family, one in itertools.product(families, sizes_of(architecture)):
        problem = example(family, num_ranks=1, num_tokens=0, **one)
        layout = (
            sm90_layout(problem) if family is None else sm100_layout(family.traits, problem, 148)
        )
        for source in ("sgl", "vllm"):
            name = layout.fingerprint(source)
            sizes.setdefault(layout.num_bytes, set()).add(name)
            assert by_name.setdefault(name, (source, layout)) == (source, layout)
    assert len(by_name) > len(sizes)
    shared_size = [names for names in sizes.values() if len(names) > 2]
    assert len(shared_size) > 5, "the search has no layouts of one size to tell apart"
