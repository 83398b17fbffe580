"""`MegaMoEBlock.load` and weights/block.py: a layer out of a checkpoint, and what is refused."""

import json
from pathlib import Path
from typing import Any

import cases
import checkpoint_files
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tolerances
import transformers_cases
from flax import nnx
from transformers_cases import CASES

import jax_megamoe as mm
from jax_megamoe.weights.experts import dequantize_biases, dequantize_shared

BY_NAME = {case.name: case for case in CASES}
V3 = "model.layers.1.mlp"


def empty(name: str, form: str = "bf16", **options: Any) -> mm.MegaMoEBlock:
    """A block of a case, not loaded."""
    case = BY_NAME[name]
    options = dict(layer_index=case.layer_index, weight_format=form) | options
    return mm.MegaMoEBlock.from_config(case.hf_config, max_num_tokens=32, **options)


def tensors_of(name: str) -> dict[str, np.ndarray]:
    return transformers_cases.checkpoint(BY_NAME[name])


def state_of(block: mm.MegaMoEBlock) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(block))
    return {".".join(path): np.asarray(leaf[...]) for path, leaf in flat}


def assert_alike(a: mm.MegaMoEBlock, b: mm.MegaMoEBlock) -> None:
    first, second = state_of(a), state_of(b)
    assert first.keys() == second.keys()
    for name, array in first.items():
        assert array.tobytes() == second[name].tobytes(), name


@pytest.mark.parametrize("name", ["deepseek_v4", "gpt_oss", "qwen3_next"])
def test_a_folder_a_file_and_pairs_are_alike(name: str, tmp_path: Path) -> None:
    tensors = tensors_of(name)
    config = BY_NAME[name].hf_config
    folder = checkpoint_files.write_folder(tmp_path / "model", tensors, config=config)
    file = checkpoint_files.write_file(tmp_path / "layer.safetensors", tensors)
    want = empty(name)
    want.load(tensors, 1)
    for source in (folder, str(file), iter(tensors.items())):
        block = empty(name)
        block.load(source, 1)
        assert_alike(block, want)
    whole = mm.MegaMoEBlock.from_config(folder, layer_index=1, max_num_tokens=32)
    assert (whole.config.weight_format.name, whole.layers) == ("bf16", want.layers)
    whole.load(folder, 1)
    assert_alike(whole, want)


def test_parameters_are_those_stored() -> None:
    tensors = tensors_of("qwen3_next")
    block = empty("qwen3_next")
    block.load(tensors, 1)
    gates = [tensors[f"{V3}.experts.{expert}.gate_proj.weight"] for expert in range(16)]
    gate, _, _ = mm.dequantize_experts(block.config, block.experts.weights)
    np.testing.assert_array_equal(gate, np.stack(gates).astype(np.float32))
    shared = block.shared_expert
    for array, name in (
        (block.router.weight, "gate.weight"),
        (shared.gate_proj, "shared_expert.gate_proj.weight"),
        (shared.up_proj, "shared_expert.up_proj.weight"),
        (shared.down_proj, "shared_expert.down_proj.weight"),
        (shared.output_gate, "shared_expert_gate.weight"),
    ):
        assert np.asarray(array[...]).tobytes() == tensors[f"{V3}.{name}"].tobytes(), name


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v4_hashed"])
def test_over_a_mesh(name: str) -> None:
    single, spread = (
        empty(name, "fp8_block"),
        empty(name, "fp8_block", mesh=cases.ep_mesh(8), axis="ep"),
    )
    for block in (single, spread):
        block.load(tensors_of(name), BY_NAME[name].layer_index)
    assert_alike(single, spread)
    assert len(spread.experts.routed.w2_weight.sharding.device_set) == 8
    for param in (spread.router.weight, spread.shared_expert.gate_proj):
        assert param.sharding.is_fully_replicated and len(param.sharding.device_set) == 8


def test_loading_again_rewrites_everything() -> None:
    """A, B, A gives A bit for bit; B is the checkpoint with all tensors halved."""
    first, second = tensors_of("gpt_oss"), {}
    for name, array in first.items():
        second[name] = (array.astype(np.float32) / 2).astype(array.dtype)
    block, want = empty("gpt_oss", "mxfp4"), empty("gpt_oss", "mxfp4")
    want.load(first, 1)
    for tensors in (first, second):
        block.load(tensors, 1)
    changed = [
        name
        for name, array in state_of(block).items()
        if array.tobytes() == state_of(want)[name].tobytes()
    ]
    assert all("w13_weight" in name or "w2_weight" in name for name in changed)
    block.load(first, 1)
    assert_alike(block, want)


def test_fp8_shared_expert_that_is_not_fused() -> None:
    """DeepSeek-V3 as published: FP8 in 128x128 blocks, the shared expert decoded to bfloat16."""
    rng = np.random.default_rng(0)
    stored = checkpoint_files.fp8_block(rng, 17, 256, 128)
    names = dict(weight="weight", scale="weight_scale_inv")
    tensors = checkpoint_files.per_expert(stored, **names, prefix=f"{V3}.experts")
    shared = {name: tensors.pop(name) for name in list(tensors) if ".experts.16." in name}
    tensors |= {name.replace("experts.16", "shared_experts"): a for name, a in shared.items()}
    router = {name: a for name, a in tensors_of("deepseek_v3").items() if ".gate." in name}
    block = empty("deepseek_v3", "fp8_block")
    block.load(tensors | router, 1)
    for part, attribute in checkpoint_files.PROJ.items():
        want = stored[part].values[16].astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(
            np.asarray(getattr(block.shared_expert, attribute)[...]), want
        )
    gate, _, _ = mm.dequantize_experts(block.config, block.experts.weights)
    np.testing.assert_array_equal(gate, stored["gate"].values[:16])


def test_deepseek_v4_as_published() -> None:
    """FP4 under exponents per 32 for the routed experts, FP8 in blocks under exponents for the
    shared one, which is fused in MXFP8."""
    rng, files = np.random.default_rng(0), checkpoint_files
    hf_config = BY_NAME["deepseek_v4"].hf_config | dict(
        expert_dtype="fp4",
        quantization_config=dict(
            quant_method="fp8", fmt="e4m3", scale_fmt="ue8m0", weight_block_size=[128, 128]
        ),
    )
    routed, shared = files.mxfp4(rng, 16, 256, 128), files.fp8_block(rng, 1, 256, 128, powers=True)
    prefix = "layers.1.ffn"
    tensors = files.per_expert(
        {part: each._replace(weight=each.weight.view(np.int8)) for part, each in routed.items()},
        names=files.W123,
        scale="scale",
        prefix=f"{prefix}.experts",
    )
    for part, name in files.W123.items():
        scale = shared[part].scale[0].astype(ml_dtypes.float8_e8m0fnu)
        tensors[f"{prefix}.shared_experts.{name}.weight"] = shared[part].weight[0]
        tensors[f"{prefix}.shared_experts.{name}.scale"] = scale
    router = {name: a for name, a in tensors_of("deepseek_v4").items() if ".gate." in name}
    block = mm.MegaMoEBlock.from_config(hf_config, layer_index=1, max_num_tokens=32)
    assert block.config.weight_format is mm.MXFP4 and block.config.num_shared_experts == 1
    block.load(tensors | router, 1)
    for array, part in zip(
        mm.dequantize_experts(block.config, block.experts.weights), routed.values(), strict=True
    ):
        np.testing.assert_array_equal(array, part.values)
    decoded = dequantize_shared(block.config, block.experts.weights)
    for array, part in zip(decoded, shared.values(), strict=True):
        # E4M3 again, under a scale of its own: of normal values most stay what they are.
        error = cases.relative_error(array, part.values[0])
        assert error < tolerances.ACCURACY["mxfp8"].activations[0]


def test_gpt_oss_as_published() -> None:
    """MXFP4 blocks; sizes that are no multiples of 128, filled with zeros."""
    rng = np.random.default_rng(0)
    routed = checkpoint_files.mxfp4(rng, 16, 192, 160)
    sizes = dict(gate=160, up=160, down=192)
    biases = {p: rng.standard_normal((16, n)).astype(ml_dtypes.bfloat16) for p, n in sizes.items()}
    tensors = checkpoint_files.gpt_oss(routed, biases, prefix=f"{V3}.experts")
    router = {name: a for name, a in tensors_of("gpt_oss").items() if ".router." in name}
    hf_config = BY_NAME["gpt_oss"].hf_config | dict(quantization_config=dict(quant_method="mxfp4"))
    block = mm.MegaMoEBlock.from_config(hf_config, layer_index=1, max_num_tokens=32)
    assert block.config.weight_format is mm.MXFP4
    block.load(tensors | router, 1)
    gate, up, down = mm.dequantize_experts(block.config, block.experts.weights)
    for array, part in ((gate, "gate"), (up, "up"), (down, "down")):
        rows, columns = routed[part].values.shape[1:]
        np.testing.assert_array_equal(array[:, :rows, :columns], routed[part].values)
        assert not array[:, rows:].any() and not array[:, :, columns:].any()
    got = dequantize_biases(block.experts.weights)
    for part, values in biases.items():
        array = got[f"{part}_bias"]
        np.testing.assert_array_equal(array[:, : sizes[part]], values.astype(np.float32))


@pytest.mark.parametrize(
    ("dtype", "kept"), [("float32", "float32"), ("float16", "float32"), ("bfloat16", "bfloat16")]
)
def test_precision_of_the_router(dtype: str, kept: str) -> None:
    tensors = tensors_of("qwen3_moe")
    name = f"{V3}.gate.weight"
    stored = (tensors[name].astype(np.float32) * np.float32(1.001)).astype(jnp.dtype(dtype))
    block = empty("qwen3_moe")
    block.load(tensors | {name: stored}, 1)
    assert block.router.weight.dtype == kept
    np.testing.assert_array_equal(np.asarray(block.router.weight[...]), stored.astype(kept))


def test_names_of_multi_token_prediction_are_passed_over() -> None:
    tensors = tensors_of("qwen3_next")
    mtp = {name.replace("model.", "mtp."): array * 0 for name, array in tensors.items()}
    block, want = empty("qwen3_next"), empty("qwen3_next")
    block.load(mtp | tensors, 1)
    want.load(tensors, 1)
    assert_alike(block, want)


def test_a_block_made_from_its_parts_is_found_by_its_names() -> None:
    tensors = {
        name.replace("model.", "language_model.model."): a
        for name, a in tensors_of("qwen3_moe").items()
    }
    cfg = cases.config("bf16")
    router = mm.Router(num_experts=16, top_k=4, renormalize=True)
    block = mm.MegaMoEBlock(cfg, router, rngs=nnx.Rngs(0))
    block.load(tensors, 1)
    other = mm.MegaMoEBlock(cfg, router, rngs=nnx.Rngs(1))
    other.load(tensors, 1, prefix="language_model.model.layers.1.mlp")
    assert_alike(block, other)


class TestErrors:
    @staticmethod
    def refused(
        name: str,
        tensors: Any,
        message: str,
        kind: type[Exception] = ValueError,
        layer_index: int = 1,
        form: str = "bf16",
    ) -> None:
        """The error, and that the block holds what it held."""
        block = empty(name, form, rngs=nnx.Rngs(0))
        before = state_of(block)
        with pytest.raises(kind, match=message):
            block.load(tensors, layer_index)
        for field, array in state_of(block).items():
            assert array.tobytes() == before[field].tobytes(), field

    def test_dense_layer_by_the_config(self) -> None:
        message = r"layer 0: expected an MoE layer, got a dense one \(first_k_dense_replace is 1\)"
        self.refused("deepseek_v3", tensors_of("deepseek_v3"), message, layer_index=0)

    def test_dense_layer_by_the_checkpoint(self) -> None:
        tensors = {"model.layers.1.mlp.gate_proj.weight": np.zeros((4, 4), np.float32)}
        message = "layer 1: expected an MoE layer, got a dense layer: its names have no"
        self.refused("qwen3_moe", tensors, message)

    def test_layer_that_the_model_has_not(self) -> None:
        message = "layer_index: expected one of the model's 2 layers, got 2"
        self.refused("qwen3_moe", tensors_of("qwen3_moe"), message, layer_index=2)

    def test_layer_that_the_checkpoint_has_not(self) -> None:
        message = r"checkpoint: expected names with layers\.0\., got none"
        self.refused("qwen3_moe", tensors_of("qwen3_moe"), message, layer_index=0)

    def test_two_models_in_one_checkpoint(self) -> None:
        tensors = tensors_of("qwen3_moe")
        tensors |= {f"draft.{name}": array for name, array in tensors.items()}
        message = (
            r"layer 1: expected one MoE block, got \['draft.model.layers.1.mlp', .*pass prefix="
        )
        self.refused("qwen3_moe", tensors, message)

    def test_layer_of_another_kind(self) -> None:
        tensors = tensors_of("deepseek_v4_hashed")
        message = (
            "layer 0: expected one that scores experts, got one that looks experts up by token id; "
            r"make the block with from_config\(..., layer_index=0\)"
        )
        self.refused("deepseek_v4", tensors, message, layer_index=0)

    @pytest.mark.parametrize(
        ("name", "missing", "message"),
        [
            (
                "qwen3_moe",
                "gate.weight",
                f"{V3}: expected a tensor gate.weight or router.weight or",
            ),
            (
                "deepseek_v3",
                "gate.e_score_correction_bias",
                r"a tensor gate.e_score_correction_bias or gate.bias or .*, got none of \[",
            ),
            ("gpt_oss", "router.bias", "expected a tensor router.bias"),
            ("deepseek_v4_hashed", "gate.tid2eid", "expected a tensor gate.tid2eid"),
            ("qwen3_next", "shared_expert_gate.weight", "a tensor shared_expert_gate.weight"),
            (
                "qwen3_next",
                "shared_expert.up_proj.weight",
                f"{V3}.shared_expert: expected every tensor of every expert, got no weight of",
            ),
            ("deepseek_v3", "shared_experts.up_proj.weight", "every tensor of every expert"),
            (
                "qwen3_moe",
                "experts.3.up_proj.weight",
                "every tensor of every expert, got no weight of expert 3's up",
            ),
            ("gpt_oss", "experts.down_proj_bias", "every tensor of every expert"),
        ],
    )
    def test_missing_tensor(self, name: str, missing: str, message: str) -> None:
        case = BY_NAME[name]
        tensors = tensors_of(name)
        del tensors[f"{case.prefix}.{missing}"]
        self.refused(name, tensors, message, layer_index=case.layer_index)

    @pytest.mark.parametrize(
        ("name", "extra"),
        [
            ("qwen3_moe", "gate.e_score_correction_bias"),
            ("qwen3_moe", "shared_expert.up_proj.weight"),
            ("deepseek_v3", "shared_expert_gate.weight"),
            ("qwen3_moe", "router.bias"),
        ],
    )
    def test_tensor_without_a_use(self, name: str, extra: str) -> None:
        tensors = tensors_of(name) | {f"{V3}.{extra}": np.zeros(16, np.float32)}
        message = (
            f"{V3}: expected only tensors that this block has parameters for, got {extra}; is it"
        )
        self.refused(name, tensors, message)

    def test_no_shared_expert(self) -> None:
        tensors = {k: v for k, v in tensors_of("qwen3_next").items() if ".shared_expert." not in k}
        message = f"{V3}: expected a shared expert, shared_experts., shared_expert., shared_mlp."
        self.refused("qwen3_next", tensors, message)

    def test_biases_that_the_block_has_not(self) -> None:
        tensors = tensors_of("qwen3_moe")
        tensors |= {
            f"{V3}.experts.{expert}.{part}.bias": np.zeros(size, np.float32)
            for expert in range(16)
            for part, size in (("gate_proj", 128), ("up_proj", 128), ("down_proj", 256))
        }
        message = f"{V3}: expected no biases of the experts, got biases of the experts"
        self.refused("qwen3_moe", tensors, message)

    @pytest.mark.parametrize(
        ("name", "tensor", "value", "kind", "message"),
        [
            (
                "qwen3_moe",
                "gate.weight",
                np.zeros((8, 256), np.float32),
                ValueError,
                r"gate.weight in the pairs given: expected shape \[16, 256\], got shape \[8, 256\]",
            ),
            (
                "qwen3_moe",
                "gate.weight",
                np.zeros((16, 256), ml_dtypes.float8_e4m3fn),
                TypeError,
                r"gate.weight in the pairs given: expected one of the dtypes .* got float8_e4m3fn",
            ),
            (
                "deepseek_v3",
                "gate.e_score_correction_bias",
                np.full(16, np.nan, np.float32),
                ValueError,
                "gate.e_score_correction_bias in the pairs given: expected finite values, got NaN",
            ),
            (
                "deepseek_v4_hashed",
                "gate.tid2eid",
                np.full((64, 4), 16),
                ValueError,
                r"layers.0.ffn.gate.tid2eid: expected experts in \[0, 16\), got experts from 16",
            ),
            (
                "qwen3_next",
                "shared_expert_gate.weight",
                np.full((1, 256), np.inf, np.float32),
                ValueError,
                "shared_expert_gate.weight in the pairs given: expected finite values, got NaN",
            ),
            (
                "qwen3_moe",
                "gate.weight",
                "text",
                TypeError,
                "gate.weight: expected an array, got str",
            ),
        ],
    )
    def test_tensor_of_another_kind(
        self, name: str, tensor: str, value: Any, kind: type[Exception], message: str
    ) -> None:
        case = BY_NAME[name]
        tensors = tensors_of(name) | {f"{case.prefix}.{tensor}": value}
        self.refused(name, tensors, message, kind, layer_index=case.layer_index)

    def test_a_tensor_twice(self) -> None:
        pairs = [*tensors_of("qwen3_moe").items()] * 2
        message = f"{V3}.gate.weight: expected each tensor once, got it twice"
        self.refused("qwen3_moe", pairs, message)

    def test_packed_int4(self, tmp_path: Path) -> None:
        config = dict(quantization_config=dict(quant_method="awq", bits=4))
        folder = checkpoint_files.write_folder(tmp_path / "m", tensors_of("qwen3_moe"))
        (folder / "config.json").write_text(json.dumps(config))
        self.refused(
            "qwen3_moe",
            folder,
            "quantization_config.quant_method in .*config.json: expected",
            NotImplementedError,
        )

    def test_no_file(self, tmp_path: Path) -> None:
        message = "checkpoint: expected a folder or a file, got"
        self.refused("qwen3_moe", tmp_path / "none", message, FileNotFoundError)
