"""`benchmarks/gpu/tile_forms.py`: forms of tiles, and medians of programs that take turns."""

from pathlib import Path
from types import ModuleType

import pytest
from scripts import ROOT, load_gpu_script, load_script

from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.grouped.call import GroupedLayer
from jax_megamoe.plan.grouped.layer import plan_grouped

LAYER = GroupedLayer(
    arch=90,
    num_sms=132,
    num_tokens=1,
    top_k=6,
    num_experts=256,
    num_logical=256,
    hidden_size=4096,
    intermediate_size=2048,
    weights="mxfp4",
    activations="fp8_block",
    second_scales=("tensor", "tensor"),
)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    return load_gpu_script(monkeypatch, tmp_path, "grouped", "tile_forms")


def test_forms(script: ModuleType) -> None:
    """Each product has its own form, whatever the layer is planned with."""
    found = {
        pair: [
            (each.block[1], each.warp[1], each.stream_k, each.ordered)
            for each in map(script.in_form(LAYER, pair).tiles, (False, True))
        ]
        for pair in script.PAIRS
    }
    forms = {
        "wide": (256, 32, False, False),
        "cut": (256, 32, True, True),
        "narrow": (128, 16, False, False),
    }
    assert found == {pair: [forms[each] for each in pair] for pair in script.PAIRS}
    assert len(found) == 9
    locks = {pair for pair in script.PAIRS if script.in_form(LAYER, pair).cuts}
    assert locks == {pair for pair in script.PAIRS if "cut" in pair}
    for pair in script.PAIRS:
        assert len(plan_grouped(script.in_form(LAYER, pair)).launches) == 5


def test_programs_take_turns(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of the first takes 1 ms of a made-up clock, of the second 4 ms."""
    now, order = [0.0], []

    def program(name: str, seconds: float) -> None:
        now[0] += seconds
        order.append(name)

    monkeypatch.setattr(script.time, "perf_counter", lambda: now[0])
    found = script.in_turn(
        {"one": lambda: program("one", 1e-3), "two": lambda: program("two", 4e-3)}
    )
    per_layer = 1e6 / script.grouped.LAYERS
    assert found == {
        "one": pytest.approx(1e-3 * per_layer),
        "two": pytest.approx(4e-3 * per_layer),
    }
    # Once each, then in turns: 12 ms are 12 calls of the one and, four at a time, 4 of the other.
    assert order == ["one", "two", *(["one"] * 12 + ["two"] * 4) * script.TURNS]


def test_every_form_is_checked_on_a_gpu(script: ModuleType) -> None:
    """Among the cases of tests/gpu/check_grouped.py, as an H200 plans them."""
    check = load_script(ROOT / "tests/gpu/check_grouped.py")
    check.device_spec = lambda _: DeviceSpec(90, 132)
    for quick in (True, False):
        plain = [each for each in check.cases(quick, ["mxfp4"]) if each.activations == "fp8_block"]
        forms = {
            (each.tiles(w2).block[1], each.cuts)
            for each in plain
            for w2 in (False, True)
            if each.hidden_size == 4096
        }
        assert forms == {(128, False), (256, True)}
        rows = {each.sorters > 1 for each in check.cases(quick, ["mxfp4", "bf16"])}
        assert rows == {True, False}
