"""`benchmarks/gpu/layer_trace.py`: launches told apart on made-up traces, and the script on CPU
devices that stand for H200s."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import emulation as emulated_devices
import jax
import pytest
from emulation import Emulation
from scripts import load_gpu_script

from jax_megamoe.launch import grouped

SMALL = dict(num_experts=16, top_k=4, hidden_size=512, intermediate_size=384)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    return load_gpu_script(monkeypatch, tmp_path, "grouped", "step_trace", "layer_trace")


KERNELS = {
    "group_tokens": "void jax_megamoe::group_tokens<2048u, 256u>(uint4 const*)",
    "first product": "void humming<1>(CUtensorMap)",
    "activate_rows": "activate_rows",
    "second product": "void humming<2>(CUtensorMap)",
    "combine_rows": "combine_rows",
}


def layer(script: ModuleType, start: float, taken: Sequence[float], every: float) -> list[Any]:
    """The launches of a layer, one each `every` microseconds."""
    event = script.step_trace.Event
    return [
        event(kernel, "", start + n * every, each)
        for n, (kernel, each) in enumerate(zip(KERNELS.values(), taken, strict=True))
    ]


def test_launches_of_whole_layers(script: ModuleType) -> None:
    """Three layers and the head of a fourth; the second lacks a launch, the third is slower."""
    event = script.step_trace.Event
    first = layer(script, 0, (2, 10, 3, 8, 1), 10)
    second = layer(script, 50, (99, 99, 99, 99, 99), 10)[:4]
    third = layer(script, 100, (4, 14, 5, 12, 3), 20)
    head = event(KERNELS["group_tokens"], "", 204, 9)
    other = event("loop_fusion_3", "fusion.3", 5, 1)
    found = script.by_launch([head, *third, other, *second, *first], list(KERNELS))
    # Medians of the two whole layers; the last launch of the third is 24 before the head.
    assert {name: row["taken"] for name, row in found["launches"].items()} == {
        "group_tokens": 3,
        "first product": 12,
        "activate_rows": 4,
        "second product": 10,
        "combine_rows": 2,
    }
    until = {name: row["until_next"] for name, row in found["launches"].items()}
    assert until == dict.fromkeys(KERNELS, 15) | {"combine_rows": 17}
    assert found["layer"] == 77


def test_a_trace_without_layers_has_no_launches(script: ModuleType) -> None:
    assert script.by_launch([], list(KERNELS)) == {"launches": {}, "layer": 0}
    alone = layer(script, 0, (1, 1, 1, 1, 1), 1)
    assert script.by_launch(alone, list(KERNELS))["launches"] == {}


def test_rows_of_the_script(
    script: ModuleType,
    emulation: Emulation,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Two numbers of tokens: the rows of the second are sorted by two blocks."""
    emulation.device = emulated_devices.H200
    monkeypatch.setattr(script.grouped, "device_spec", emulation.device_spec)
    monkeypatch.setattr(script.grouped, "compile_many", lambda specs: ())
    monkeypatch.setattr(script.grouped, "MODELS", {"small": SimpleNamespace(sizes=SMALL)})
    monkeypatch.setattr(grouped, "spec_of", lambda device, sms, _="": emulation.device)
    seen: list[Sequence[str]] = []

    def by_launch(_: Any, names: Sequence[str]) -> dict[str, Any]:
        seen.append(names)
        return dict(launches={}, layer=0)

    monkeypatch.setattr(script, "by_launch", by_launch)
    monkeypatch.setattr(
        sys, "argv", ["layer_trace.py", "--shapes", "small", "--tokens", "8", "257", "--stream-k"]
    )
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        script.main()
    one, several = list(KERNELS), list(KERNELS)
    several.insert(1, "place_rows")
    assert seen == [one, several]
    rows = json.loads((tmp_path / "layer_trace.json").read_text())["rows"]
    assert [(row["shape"], row["recipe"], row["num_tokens"]) for row in rows] == [
        ("small", "mxfp4 x fp8_block", 8),
        ("small", "mxfp4 x fp8_block", 257),
    ]
    assert all(row["stream_k"] for row in rows)
