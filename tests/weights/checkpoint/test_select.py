"""Which format a checkpoint runs in: the configs of published models, exclusions, the warning."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from jax_megamoe.weights.checkpoint.select import read_quantization_config, select_format

PREFIX = "model.layers.3.mlp.experts"
DEEPSEEK_V3 = dict(
    activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128]
)
DEEPSEEK_V4 = DEEPSEEK_V3 | dict(scale_fmt="ue8m0")
GPT_OSS = dict(
    quant_method="mxfp4",
    modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
)
MODELOPT = dict(
    producer=dict(name="modelopt", version="0.33"),
    quantization=dict(
        quant_algo="NVFP4", group_size=16, exclude_modules=["lm_head", "*self_attn*"]
    ),
)


def compressed(form: str, *, ignore: tuple[str, ...] = (), **weights: Any) -> dict[str, Any]:
    group = dict(targets=["Linear"], weights=weights)
    return dict(
        quant_method="compressed-tensors",
        format=form,
        config_groups=dict(group_0=group),
        ignore=list(ignore),
    )


class Device:
    """A device that says what it is."""

    def __init__(self, platform: str, compute_capability: str = "") -> None:
        self.platform = platform
        self.compute_capability = compute_capability


CPU, HOPPER, BLACKWELL = Device("cpu"), Device("gpu", "9.0"), Device("gpu", "10.0")

STORED: dict[str, tuple[Any, str]] = {
    "none": (None, "bf16"),
    "empty": ({}, "bf16"),
    "config.json without one": (dict(hidden_size=7168), "bf16"),
    "gpt-oss": (GPT_OSS, "mxfp4"),
    "deepseek v4": (DEEPSEEK_V4 | dict(expert_dtype="fp4"), "mxfp4"),
    "deepseek v4 config.json": (dict(expert_dtype="fp4", quantization_config=DEEPSEEK_V4), "mxfp4"),
    "32x32 exponents": (DEEPSEEK_V4 | dict(weight_block_size=[32, 32]), "mxfp8"),
    "mxfp8": (dict(quant_method="mxfp8"), "mxfp8"),
    "modelopt": (MODELOPT, "nvfp4"),
    "modelopt in config.json": (dict(quant_method="modelopt", quant_algo="NVFP4"), "nvfp4"),
    "mixed": (
        dict(
            quantization=dict(
                quant_algo="MIXED_PRECISION",
                quantized_layers={
                    f"{PREFIX}.0.gate_proj": dict(quant_algo="NVFP4"),
                    "model.layers.3.self_attn.o_proj": dict(quant_algo="FP8"),
                },
            )
        ),
        "nvfp4",
    ),
    "mixed without these": (
        dict(quant_algo="MIXED_PRECISION", quantized_layers={"lm_head": dict(quant_algo="FP8")}),
        "bf16",
    ),
    "nvfp4": (compressed("nvfp4-pack-quantized", num_bits=4, type="float"), "nvfp4"),
    "kimi k3": (
        compressed("mxfp4-pack-quantized", ignore=("self_attn", "shared_experts", "lm_head")),
        "mxfp4",
    ),
    "text model": (dict(text_config=dict(quantization_config=GPT_OSS)), "mxfp4"),
    "no group for these": (
        dict(
            quant_method="compressed-tensors",
            format="pack-quantized",
            config_groups=dict(group_0=dict(targets=["re:.*self_attn.*"])),
        ),
        "bf16",
    ),
}


@pytest.mark.parametrize("device", [CPU, HOPPER, BLACKWELL])
@pytest.mark.parametrize("case", STORED)
def test_as_stored(case: str, device: Any) -> None:
    config, name = STORED[case]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select_format(config, device, prefix=PREFIX).name == name


@pytest.mark.parametrize(
    "config",
    [
        DEEPSEEK_V3,
        DEEPSEEK_V4,
        compressed("float-quantized", type="float", block_structure=[128, 128]),
    ],
)
def test_block_fp8(config: Any) -> None:
    """As it is on Hopper; elsewhere mxfp8, with one warning that says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select_format(config, HOPPER).name == "fp8_block"
        assert select_format(config, CPU, "mxfp4").name == "mxfp4"
    for device, name in ((CPU, "cpu"), (BLACKWELL, r"gpu 10\.0")):
        text = rf"{PREFIX}: FP8 weights in 128x128 blocks are requantised to mxfp8 .*\({name}\)"
        with pytest.warns(UserWarning, match=text) as seen:
            assert select_format(config, device, prefix=PREFIX).name == "mxfp8"
        assert len(seen) == 1


@pytest.mark.parametrize(
    "pattern",
    [
        PREFIX,
        "model.layers.3",
        "model.layers.3.mlp*",
        "model.layers.*.mlp.experts",
        "experts",
        "*.3.mlp.*",
        r"re:model\.layers\.3\..*",
        f"{PREFIX}.0.gate_proj",
    ],
)
@pytest.mark.parametrize(
    "key", ["modules_to_not_convert", "ignored_layers", "exclude_modules", "ignore"]
)
def test_excluded(pattern: str, key: str) -> None:
    config = dict(quant_method="awq") | {key: [pattern]}
    assert select_format(config, CPU, prefix=PREFIX).name == "bf16"


@pytest.mark.parametrize(
    "pattern", ["model.layers.30", "mlp.gate", "layers.4.mlp", "*.mlp.shared_expert*", "re:lm_head"]
)
def test_not_excluded(pattern: str) -> None:
    config = GPT_OSS | dict(modules_to_not_convert=[pattern])
    assert select_format(config, CPU, prefix=PREFIX).name == "mxfp4"


@pytest.mark.parametrize(
    "config, text",
    [
        (
            dict(quant_method="awq"),
            r"quant_method in quantization_config: expected experts stored as bf16, .*, got 'awq'",
        ),
        (dict(quant_method="gptq", bits=4), "quant_method in quantization_config: .* got 'gptq'"),
        (DEEPSEEK_V3 | dict(weight_block_size=None), "got FP8 under scales of another grid than"),
        (DEEPSEEK_V3 | dict(weight_block_size=[64, 64]), "got FP8 under scales of another grid"),
        (
            compressed("pack-quantized", num_bits=4, type="int", group_size=32),
            r"compressed-tensors format in quantization_config: .* got 'pack-quantized' \(int4\)",
        ),
        (compressed("float-quantized", type="float"), "got FP8 under scales of another grid"),
        (
            dict(quantization=dict(quant_algo="W4A16_AWQ")),
            "quantization.quant_algo in quantization_config: .* got 'W4A16_AWQ'",
        ),
        (
            dict(
                quant_algo="MIXED_PRECISION",
                quantized_layers={
                    f"{PREFIX}.0.gate_proj": dict(quant_algo="NVFP4"),
                    f"{PREFIX}.1.gate_proj": dict(quant_algo="FP8"),
                },
            ),
            r"quantized_layers under model\.layers\.3\.mlp\.experts: .* got \['FP8', 'NVFP4'\]",
        ),
    ],
)
def test_not_run(config: Any, text: str) -> None:
    with pytest.raises(NotImplementedError, match=text):
        select_format(config, CPU, prefix=PREFIX)
    assert select_format(config, CPU, "bf16", prefix=PREFIX).name == "bf16"


def test_forced_name() -> None:
    with pytest.raises(ValueError, match=r"forced: expected one of .*, got 'int4'"):
        select_format(None, CPU, "int4")


def test_read(tmp_path: Path) -> None:
    assert read_quantization_config(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps(dict(hidden_size=2880)))
    assert read_quantization_config(tmp_path) is None
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    assert read_quantization_config(tmp_path) == MODELOPT["quantization"]
    (tmp_path / "config.json").write_text(json.dumps(dict(quantization_config=GPT_OSS)))
    assert read_quantization_config(tmp_path / "model.safetensors") == GPT_OSS
