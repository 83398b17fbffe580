"""Decoders of `benchmarks/gpu/random_decoder.py` on CPU devices that stand for H200s."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import emulation as emulated_devices
import jax
import pytest
from emulation import Emulation
from scripts import load_script

from jax_megamoe.launch import grouped

ROOT = Path(__file__).parents[2]
SIZES = dict(hidden_size=512, vocab_size=64)
EXPERTS = dict(
    qwen3_moe=dict(num_experts=16, num_experts_per_tok=4, moe_intermediate_size=256),
    gpt_oss=dict(num_local_experts=16, intermediate_size=384),
)


@pytest.fixture
def scripts() -> dict[str, ModuleType]:
    """Each after those that it imports."""
    names = "workload", "step_trace", "random_decoder", "decoder"
    paths = [ROOT / "examples/generate.py"]
    paths += [ROOT / f"benchmarks/gpu/{name}.py" for name in names]
    return {path.stem: load_script(path) for path in paths}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3_30b_fp8_block", "interleave8"),
        ("qwen3_30b_mxfp4_block", "flashinfer_mxfp4"),
        ("gpt_oss_120b_mxfp4_block", "humming_fp8"),
        ("gpt_oss_120b_mxfp4", "humming_bf16"),
    ],
)
def test_programs_launch_what_was_compiled_ahead(
    name: str,
    layout: str,
    scripts: dict[str, ModuleType],
    emulation: Emulation,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emulation.device = emulated_devices.H200
    monkeypatch.setattr(grouped, "spec_of", lambda device, sms, _="": emulation.device)
    ahead: list[Any] = []

    def collect(plans: Any) -> str:
        ahead.extend(step.kernel for plan in plans for step in plan.launches)
        return "compiled"

    monkeypatch.setattr(scripts["workload"], "compile_kernels", collect)
    module, case = scripts["random_decoder"], scripts["random_decoder"].CASES[name]
    raw = case.small().raw | SIZES | EXPERTS[case.raw["model_type"]]
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        loaded = module.load(replace(case, raw=raw), 64, (2, 64))
        assert loaded.layout == layout
        shape = (4, 2, 2, 8, 32)
        cache = scripts["generate"].Cache(*(jax.ShapeDtypeStruct(shape, "bfloat16"),) * 2)
        step = jax.jit(partial(scripts["decoder"].step, loaded.graph), donate_argnums=3)
        tokens = jax.ShapeDtypeStruct((2,), "int32")
        lowered = step.lower(loaded.state, tokens, tokens, cache)
    assert "jax_megamoe" in lowered.as_text()
    assert emulation.built and set(emulation.built) <= set(ahead)
