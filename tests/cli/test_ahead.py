"""Kernels compiled before anything runs: which ones, and what the command says of them."""

import json
from collections.abc import Sequence
from pathlib import Path

import cases
import pytest

import jax_megamoe as mm
from jax_megamoe.cli import ahead
from jax_megamoe.cli import main as cli
from jax_megamoe.compile import CompileError, Outcome
from jax_megamoe.launch import deep_gemm
from jax_megamoe.plan.kernel import KernelSpec
from jax_megamoe.runtime.devices import KNOWN_DEVICES

H200 = KNOWN_DEVICES["h200"]
CONFIG = mm.MoEConfig(
    num_experts=32,
    top_k=8,
    hidden_size=2048,
    intermediate_size=768,
    max_num_tokens=1024,
    weight_format="fp8_block",
)


def test_kernels_are_those_that_calls_launch() -> None:
    specs = ahead.kernels([ahead.Layer(CONFIG)], H200, [8, 512], 1)
    route = deep_gemm.Route(H200, "sgl", 1, "")
    want = [step.kernel for rows in (8, 512) for step in route.plan(CONFIG, rows).steps]
    assert set(specs) == set(want)
    assert [spec.symbol for spec in specs] == ["stage_tokens", *["sm90_fp8_mega_moe_impl"] * 2]


def test_token_counts_that_share_a_kernel_name_it_once() -> None:
    cfg = cases.config("mxfp8", hidden_size=512)
    specs = ahead.kernels([ahead.Layer(cfg)] * 2, KNOWN_DEVICES["b200"], [1, 2, 3], 1)
    assert [spec.symbol for spec in specs] == ["stage_tokens", "sm100_fp8_fp4_mega_moe_impl"]


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([], "tokens: expected at least one number of tokens, got none"),
        ([0], "tokens: expected an integer >= 1, got 0"),
        ([1025], "num_tokens: expected at most max_num_tokens = 1024, got 1025"),
    ],
)
def test_token_counts_are_checked(tokens: list[int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ahead.kernels([ahead.Layer(CONFIG)], H200, tokens, 1)


def test_a_format_without_a_kernel_on_the_device_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="device"):
        ahead.kernels([ahead.Layer(CONFIG)], KNOWN_DEVICES["b200"], [1], 1)


COMMAND = ["compile", "--experts", "32", "--device", "h200", "--tokens", "8"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_command_compiles_and_says_what(
    fails: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compile_many(specs: Sequence[KernelSpec], on_done: object) -> tuple[Outcome, ...]:
        error = CompileError("no such header") if fails else None
        return tuple(Outcome(spec, 0 if fails else 2000, 1.5, error) for spec in specs)

    monkeypatch.setattr(ahead, "compile_many", compile_many)
    assert cli.main(COMMAND) == int(fails)
    shown = capsys.readouterr().out
    assert "sm90_fp8_mega_moe_impl" in shown and "stage_tokens" in shown
    assert ("no such header" in shown) == fails


def test_the_command_needs_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compile", "--tokens", "8"]) == 2
    want = "compile: error: device: expected a CUDA device for implementation deep_gemm, got cpu"
    assert want in capsys.readouterr().err


@pytest.mark.parametrize(
    ("form", "said"),
    [("mxfp4", "mxfp4 weights run as mxfp4_block there\n"), ("mxfp4_block", ""), ("fp8_block", "")],
)
def test_4_bit_weights_on_hopper(
    form: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the recipe that a block takes there."""
    taken: list[KernelSpec] = []
    monkeypatch.setattr(cli, "compile_ahead", lambda specs, _: taken.extend(specs) or True)
    assert cli.main([*COMMAND, "--formats", form]) == 0
    assert capsys.readouterr().out == said
    symbol = "sm90_fp8_mega_moe_impl" if form == "fp8_block" else "sm90_mxfp4_mega_moe_fused_impl"
    assert [spec.symbol for spec in taken] == ["stage_tokens", symbol]


def taken_by(command: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> list[KernelSpec]:
    """What a command would compile."""
    taken: list[KernelSpec] = []
    monkeypatch.setattr(cli, "compile_ahead", lambda specs, _: taken.extend(specs) or True)
    assert cli.main(list(command)) == 0
    return taken


def test_grouped_kernels_are_those_that_calls_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """MXFP4 beside FP8 with one factor for a matrix and with one for each row."""
    command = [*COMMAND, "--formats", "mxfp4_block", "--implementation", "grouped"]
    names = [spec.symbol for spec in taken_by(command, monkeypatch)]
    own = {"group_tokens", "activate_rows", "combine_rows"}
    assert own < set(names) and len(names) == len(own) + 4
    command[command.index("mxfp4_block")] = "bf16"
    names = [spec.symbol for spec in taken_by(command, monkeypatch)]
    assert names.count("sm90_bf16_gemm_impl") == 2 and "gather_rows" in names
    command[command.index("h200")] = "b200"
    names = [spec.symbol for spec in taken_by(command, monkeypatch)]
    assert names.count("sm100_bf16_gemm_impl") == 2 and "gather_rows" in names


GPT_OSS = {
    "model_type": "gpt_oss",
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "swiglu_limit": 7.0,
    "quantization_config": {"quant_method": "mxfp4"},
}


def test_a_model_by_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes, activation, biases and format come from config.json."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT_OSS))
    (layer,) = ahead.asked_layers(path, None, H200, 64)
    config = layer.config
    assert layer.has_biases and config.recipe.name == "mxfp4" and config.max_num_tokens == 64
    assert (config.num_experts, config.top_k, config.hidden_size) == (32, 4, 2944)
    assert config.activation == mm.Activation("swiglu", clamp=7.0, alpha=1.702, beta=1.0)
    command = ["compile", "--config", str(path), "--device", "h200", "--tokens", "8"]
    specs = taken_by([*command, "--implementation", "grouped"], monkeypatch)
    assert {spec.symbol for spec in specs} > {"group_tokens", "activate_rows"}
    assert cli.main(command) == 2
    said = (
        "experts: expected no biases for deep_gemm, got biases; --implementation grouped adds them"
    )
    assert said in capsys.readouterr().err
    path.write_text(json.dumps(GPT_OSS | {"model_type": "elsewhere"}))
    assert cli.main(command) == 2
    said = capsys.readouterr().err
    assert f"model_type in {path}: expected one of ['deepseek_v3'" in said
    assert "got 'elsewhere'; build a MegaMoEBlock from its parts" in said


def test_grouped_is_planned_for_one_rank() -> None:
    text = "ranks: expected 1 for grouped, got 2; over ranks the first call compiles them"
    with pytest.raises(ValueError, match=text):
        ahead.kernels([ahead.Layer(CONFIG)], H200, [8], 2, "grouped")
    text = "num_tokens: expected at most max_num_tokens = 1024, got 2000"
    with pytest.raises(ValueError, match=text):
        ahead.kernels([ahead.Layer(CONFIG)], H200, [2000], 1, "grouped")
