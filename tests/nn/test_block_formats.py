"""The format of a loaded block: by the names and dtypes found in the checkpoint."""

import json
from pathlib import Path
from typing import Any

import checkpoint_files as files
import jax.numpy as jnp
import numpy as np
import pytest
import transformers_cases
from flax import nnx
from transformers_cases import CASES

import jax_megamoe as mm
from jax_megamoe.weights.experts import dequantize_shared

BY_NAME = {case.name: case for case in CASES}
FP8 = dict(quant_method="fp8", weight_block_size=[32, 32], scale_fmt="ue8m0")
OWN = "model.layers.1.mlp"
PREFIXES = (OWN, "model.language_model.layers.1.mlp", "language_model.model.layers.1.mlp")


def made(name: str, quantization: dict[str, Any], **options: Any) -> mm.MegaMoEBlock:
    hf_config = BY_NAME[name].hf_config | dict(quantization_config=quantization)
    return mm.MegaMoEBlock.from_config(hf_config, max_num_tokens=32, **options)


def bf16_tensors(name: str, prefix: str) -> dict[str, np.ndarray]:
    tensors = transformers_cases.checkpoint(BY_NAME[name])
    return {f"{prefix}{key.removeprefix(OWN)}": array for key, array in tensors.items()}


def quantised_tensors(prefix: str, form: str) -> dict[str, np.ndarray]:
    """Of qwen3_moe, its experts in this format."""
    tensors = bf16_tensors("qwen3_moe", prefix)
    router = {name: array for name, array in tensors.items() if ".gate." in name}
    experts = files.SOURCES[form](np.random.default_rng(0), 16, 256, 128)
    return router | files.per_expert(experts, prefix=f"{prefix}.experts")


def assert_is_bf16(block: mm.MegaMoEBlock, tensors: dict[str, np.ndarray]) -> None:
    """The stored values, bit for bit."""
    assert block.config.weight_format is mm.BF16
    gate, _, _ = mm.dequantize_experts(block.config, block.experts.weights)
    names = [name for name in tensors if ".experts." in name and name.endswith("gate_proj.weight")]
    stored = np.stack([tensors[name] for name in names]).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(gate), stored)


@pytest.mark.parametrize("layer_index", [None, 1])
@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignore"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_excluded_layer(prefix: str, key: str, layer_index: int | None) -> None:
    """Also of a block that was made without the layer's index."""
    block = made("qwen3_moe", FP8 | {key: [prefix]}, layer_index=layer_index)
    tensors = bf16_tensors("qwen3_moe", prefix)
    block.load(tensors, 1)
    assert_is_bf16(block, tensors)
    x, _ = transformers_cases.inputs(BY_NAME["qwen3_moe"])
    assert np.isfinite(np.asarray(block(jnp.asarray(x)), np.float32)).all()


@pytest.mark.parametrize("prefix", PREFIXES)
def test_excluded_by_the_name_of_a_module(prefix: str, tmp_path: Path) -> None:
    """From a folder, whose config.json is the one that counts."""
    pattern = f"re:{prefix.replace('.', '[.]')}[.]experts[.][0-9]+[.](gate|up|down)_proj"
    tensors = bf16_tensors("qwen3_moe", prefix)
    quantization = FP8 | dict(ignore=[pattern])
    hf_config = BY_NAME["qwen3_moe"].hf_config | dict(quantization_config=quantization)
    folder = files.write_folder(tmp_path / "model", tensors, config=hf_config)
    block = made("qwen3_moe", FP8)
    assert block.config.weight_format is mm.MXFP8
    block.load(folder, 1)
    assert_is_bf16(block, tensors)


@pytest.mark.parametrize("pattern", ["model.layers.10.mlp", "visual.layers.1.mlp", "lm_head"])
def test_other_modules_are_excluded(pattern: str) -> None:
    block = made("qwen3_moe", FP8 | dict(ignore=[pattern]))
    block.load(quantised_tensors(PREFIXES[1], "mxfp8"), 1)
    assert block.config.weight_format is mm.MXFP8


def test_bf16_experts_of_a_layer_that_nothing_excludes() -> None:
    """Weights in floating point without scales are not quantised for a config's silence."""
    tensors = bf16_tensors("qwen3_moe", PREFIXES[1])
    block = made("qwen3_moe", FP8 | dict(ignore=[OWN]))
    block.load(tensors, 1)
    assert_is_bf16(block, tensors)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_mixed_precision(prefix: str) -> None:
    """A map of formats by the checkpoint's names, with another one for another layer."""
    layers = {
        f"{prefix}.experts.{expert}.{name}": dict(quant_algo="NVFP4")
        for expert in range(16)
        for name in files.PROJ.values()
    }
    layers["model.layers.0.mlp.experts.0.gate_proj"] = dict(quant_algo="MXFP8")
    mixed = dict(quant_method="modelopt", quant_algo="MIXED_PRECISION", quantized_layers=layers)
    block = made("qwen3_moe", mixed, layer_index=1)
    assert block.config.weight_format is (mm.NVFP4 if prefix == OWN else mm.BF16)
    block.load(quantised_tensors(prefix, "nvfp4"), 1)
    assert block.config.weight_format is mm.NVFP4
    other = made("qwen3_moe", mixed, layer_index=0)
    other.load(quantised_tensors("model.layers.0.mlp", "mxfp8"), 0)
    assert other.config.weight_format is mm.MXFP8


def test_a_given_format_stays() -> None:
    block = made("qwen3_moe", FP8 | dict(ignore=[OWN]), weight_format="mxfp4")
    block.load(bf16_tensors("qwen3_moe", OWN), 1)
    assert block.config.weight_format is mm.MXFP4


def test_the_shared_expert_follows() -> None:
    """Fused in MXFP8 with MXFP8 experts, in BF16 with those of an excluded layer."""
    block = made("deepseek_v3", FP8 | dict(ignore=[PREFIXES[1]]))
    assert (block.config.num_shared_experts, block.config.shared_format) == (1, "mxfp8")
    tensors = bf16_tensors("deepseek_v3", PREFIXES[1])
    block.load(tensors, 1)
    assert_is_bf16(block, tensors)
    assert (block.config.num_shared_experts, block.config.shared_format) == (1, "bf16")
    decoded = dequantize_shared(block.config, block.experts.weights)
    for array, part in zip(decoded, files.PROJ.values(), strict=True):
        stored = tensors[f"{PREFIXES[1]}.shared_experts.{part}.weight"]
        np.testing.assert_array_equal(np.asarray(array), stored.astype(np.float32))


@pytest.mark.parametrize("form", ["mxfp4", "mxfp8"])
def test_a_shared_expert_keeps_its_precision(form: str, caplog: pytest.LogCaptureFixture) -> None:
    """In bfloat16 in the file: beside these experts it would be fused in MXFP8."""
    hf_config = BY_NAME["deepseek_v3"].hf_config
    tensors = bf16_tensors("deepseek_v3", OWN)
    names = [f"{OWN}.shared_experts.{part}.weight" for part in files.PROJ.values()]
    options: dict[str, Any] = dict(max_num_tokens=31, weight_format=form)
    # Known from the config, or from the file alone.
    hidden = FP8 | dict(quant_method="fp8")
    for config in (hf_config, hf_config | dict(quantization_config=hidden)):
        with caplog.at_level("INFO", "jax_megamoe"):
            block = mm.MegaMoEBlock.from_config(config, **options)
            assert (block.config.num_shared_experts == 0) == (config is hf_config)
            block.load(tensors, 1)
        assert block.config.num_shared_experts == 0 and block.shared_expert is not None
        for name, attribute in zip(names, files.PROJ.values(), strict=True):
            held = getattr(block.shared_expert, attribute)[...]
            np.testing.assert_array_equal(np.asarray(held), tensors[name])
    reason = f"it is stored as bf16, and {form} kernels would fuse it as mxfp8"
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if line.endswith(reason)]) == 1
    lossy = mm.MegaMoEBlock.from_config(hf_config, shared_format="mxfp8", **options)
    lossy.load(tensors, 1)
    assert (lossy.config.num_shared_experts, lossy.shared_expert) == (1, None)
    decoded = dequantize_shared(lossy.config, lossy.experts.weights)
    error = np.abs(np.asarray(decoded[0]) - tensors[names[0]].astype(np.float32)).max()
    assert error > 0


def test_a_shared_expert_is_fused_in_the_precision_of_the_file() -> None:
    """NVFP4's kernels fuse MXFP8 or BF16."""
    hf_config = BY_NAME["deepseek_v3"].hf_config
    block = mm.MegaMoEBlock.from_config(
        hf_config, max_num_tokens=32, weight_format="nvfp4", kernel_source="vllm"
    )
    tensors = bf16_tensors("deepseek_v3", OWN)
    block.load(tensors, 1)
    assert (block.config.num_shared_experts, block.config.shared_format) == (1, "bf16")
    decoded = dequantize_shared(block.config, block.experts.weights)
    stored = tensors[f"{OWN}.shared_experts.gate_proj.weight"]
    np.testing.assert_array_equal(np.asarray(decoded[0]), stored.astype(np.float32))


def test_a_layer_that_cannot_be_loaded_changes_nothing() -> None:
    block = made("deepseek_v3", FP8 | dict(ignore=[OWN]))
    before = block.config
    tensors = bf16_tensors("deepseek_v3", OWN)
    del tensors[f"{OWN}.experts.3.up_proj.weight"]
    with pytest.raises(ValueError, match="no weight of expert 3's up projection"):
        block.load(tensors, 1)
    assert block.config == before and block.shared_expert is None


def test_convert_follows_the_checkpoint(tmp_path: Path) -> None:
    prefix = PREFIXES[1]
    tensors = bf16_tensors("qwen3_moe", prefix)
    for excluded in ([prefix], [OWN]):
        config = dict(quantization_config=FP8 | dict(ignore=excluded))
        folder = files.write_folder(tmp_path / "model", tensors, config=config)
        [layer] = mm.convert_checkpoint(
            folder, tmp_path / "made", prefix=f"{prefix}.experts", progress=False
        )
        assert layer.spec.weight_format is mm.BF16


def test_stacks_in_the_order_of_the_family(tmp_path: Path) -> None:
    """[E, H, 2I] from pairs, with nothing beside them: the block knows its model."""
    tensors = transformers_cases.checkpoint(BY_NAME["qwen3_moe"])
    parts = {
        part: np.stack([tensors.pop(f"{OWN}.experts.{e}.{part}.weight") for e in range(16)])
        for part in files.PROJ.values()
    }
    want = mm.MegaMoEBlock.from_config(BY_NAME["qwen3_moe"].hf_config, max_num_tokens=32)
    want.load(transformers_cases.checkpoint(BY_NAME["qwen3_moe"]), 1)
    both = np.concatenate([parts["gate_proj"], parts["up_proj"]], axis=1)
    tensors[f"{OWN}.experts.gate_up_proj"] = both.swapaxes(1, 2)
    tensors[f"{OWN}.experts.down_proj"] = parts["down_proj"].swapaxes(1, 2)
    block = mm.MegaMoEBlock.from_config(BY_NAME["qwen3_moe"].hf_config, max_num_tokens=32)
    block.load(tensors, 1)
    files.assert_same(block.experts.weights, want.experts.weights)
    block.load(tensors, 1, gate_up_order="alternating")
    assert not np.array_equal(
        block.experts.routed.w13_weight[...], want.experts.routed.w13_weight[...]
    )
    router = mm.Router(num_experts=16, top_k=4, renormalize=True)
    apart = mm.MegaMoEBlock(want.config, router, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"gate_up_order of .*: expected 'halves'"):
        apart.load(tensors, 1)
    folder = files.write_folder(tmp_path / "m", tensors)
    (folder / "config.json").write_text(json.dumps(dict(model_type="qwen3_moe")))
    apart.load(folder, 1)
    files.assert_same(apart.experts.weights, want.experts.weights)
