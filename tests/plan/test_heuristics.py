"""Tiles, stages and rings: what holds for every problem."""

from hypothesis import given, settings
from hypothesis import strategies as st
from problems import B200, FAMILIES, problems
from recorded_options import RecordedProblem

from jax_megamoe.plan import heuristics, limits
from jax_megamoe.plan.arithmetic import align, ceil_div, cpp_float, float32
from jax_megamoe.plan.symmetric_buffer import sm100_layout

SECOND_SCALES = ("l2_acts_sf", "shared_l2_acts_sf")


@settings(deadline=None)
@given(data=st.data(), family=st.sampled_from(FAMILIES))
def test_tiles_fit_and_the_ring_holds_a_tile_of_every_height(data, family):
    problem = data.draw(problems(family))
    tiles = heuristics.tiles(family.traits, problem, B200)
    assert tiles.block_m in (16, 32, 64, 128, 192, 240)
    assert tiles.block_m // 2 % tiles.store_m[0] == tiles.block_m // 2 % tiles.store_m[1] == 0
    assert tiles.stages >= 2
    assert tiles.combine_bytes < tiles.smem <= B200.smem_capacity
    assert problem.hidden_size * family.traits.activations.bits // 8 % tiles.pull_bytes == 0
    ring = heuristics.ring_tokens(family.traits, problem, B200.num_sms)
    assert 0 < ring <= heuristics.full_pool_tokens(problem)
    assert ring % 1920 == 0


@settings(deadline=None)
@given(data=st.data(), family=st.sampled_from(FAMILIES))
def test_a_valid_problem_breaks_no_limit(data, family):
    problem = data.draw(problems(family))
    ring = heuristics.ring_tokens(family.traits, problem, B200.num_sms)
    layout = sm100_layout(family.traits, problem, B200.num_sms)
    scales = [layout[name].num_bytes for name in SECOND_SCALES if name in layout]
    hidden = problem.hidden_size
    want = {
        "hidden_size: expected a multiple of 512": hidden > 4096 and hidden % 512 != 0,
        "max_num_tokens: expected a ring": ring > heuristics.MAX_RING_TOKENS,
        "max_num_tokens: expected scales of second inputs": max(scales, default=0) > 1 << 32,
    }
    broken = [str(error) for error in limits.sm100_violations(family.traits, problem, B200)]
    # Rows over 7168 values need more shared memory than the tallest tiles leave.
    broken = [text for text in broken if hidden <= 7168 or "combine's buffers" not in text]
    assert {start: any(text.startswith(start) for text in broken) for start in want} == want
    assert all(text.startswith(tuple(want)) for text in broken)


@settings(deadline=None)
@given(data=st.data(), family=st.sampled_from(FAMILIES))
def test_tiles_do_not_depend_on_how_tokens_lie_on_ranks(data, family):
    problem = data.draw(problems(family))
    together = problem.num_tokens * problem.num_ranks
    spread = RecordedProblem(**vars(problem) | dict(global_num_tokens=together, num_tokens=0))
    assert heuristics.tiles(family.traits, spread, B200) == heuristics.tiles(
        family.traits, problem, B200
    )


def test_arithmetic():
    assert [ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [align(n, 1920) for n in (0, 1, 1920, 1921)] == [0, 1920, 1920, 3840]
    assert float32(0.1) == 0.10000000149011612


def test_floats_as_exact_cpp_text():
    infinity = "cute::numeric_limits<float>::infinity()"
    texts = {0.0: "0x0p+0f", 10.0: "0x1.4p+3f", 25.0: "0x1.9p+4f", 0.1: "0x1.99999ap-4f"}
    assert {value: cpp_float(value) for value in texts} == texts
    assert cpp_float(None) == cpp_float(float("inf")) == infinity
