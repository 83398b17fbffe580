"""`benchmarks/gpu/grouped.py --gpt-oss` on CPU devices that stand for H200s, computing nothing."""

import json
from pathlib import Path
from types import ModuleType

import emulation as emulated_devices
import jax
import pytest
from emulation import Emulation
from scripts import load_gpu_script

from jax_megamoe.launch import grouped
from jax_megamoe.plan.grouped.layer import plan_grouped

SMALL = dict(num_experts=16, top_k=4, hidden_size=512, intermediate_size=384)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    return load_gpu_script(monkeypatch, tmp_path, "grouped")


def test_rows_of_gpt_oss(
    script: ModuleType,
    emulation: Emulation,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    emulation.device = emulated_devices.H200
    monkeypatch.setattr(script, "device_spec", emulation.device_spec)
    monkeypatch.setattr(grouped, "spec_of", lambda device, sms, _="": emulation.device)
    monkeypatch.setattr(script, "compile_many", lambda specs: ())
    monkeypatch.setattr(script, "GPT_OSS", SMALL)
    monkeypatch.setattr(script.driver, "use_device", lambda: None)
    monkeypatch.setattr(script.driver, "copy_rate", lambda: 4e12)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        script.gpt_oss([], (1, 8), 2)
    rows = json.loads((tmp_path / "grouped.json").read_text())["rows"]
    assert [row["num_tokens"] for row in rows] == [1, 8]
    for row in rows:
        assert row["layers"] == 2 and 1 <= row["experts"] <= 16
        read = row["bytes"] / row["copy_bytes_per_second"] * 1e6
        assert row["of_copy"] == pytest.approx(read / row["layer"])


@pytest.mark.parametrize("num_tokens", [1, 8, 64, 256])
def test_plans_at_the_models_sizes(script: ModuleType, num_tokens: int) -> None:
    layer = script.grouped_layers.case(
        "mxfp4",
        "fp8_block",
        num_tokens,
        **script.GPT_OSS,
        num_logical=128,
        biases=True,
        clamp=7.0,
        alpha=1.702,
        beta=1.0,
        second_scales=("tensor", "tensor"),
    )
    assert len(plan_grouped(layer).launches) == 5
