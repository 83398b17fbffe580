"""A small checkpoint with one MoE layer, in the files and under the names of Qwen3-MoE."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jax_megamoe.config import MoEConfig

LAYER = "model.layers.0.mlp"
ROUTER = f"{LAYER}.gate.weight"
EXPERTS = f"{LAYER}.experts"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def expert_name(expert: int, projection: str) -> str:
    """The tensor of one projection."""
    return f"{EXPERTS}.{expert}.{projection}.weight"


def write_checkpoint(folder: Path, config: MoEConfig, *, seed: int, shards: int = 4) -> int:
    """Writes config.json, an index and `shards` safetensors files with random bfloat16 weights.

    Weights are normal with variance 1 / fan-in, so that a layer keeps the size of its tokens.

    Args:
        folder: made if it is not there; files of the same names are replaced.
        config: sizes of the layer; its format does not matter.
        seed: of the weights.
        shards: number of files, at most one an expert.

    Returns:
        Bytes of the tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = min(shards, config.num_experts)
    rng = np.random.default_rng(seed)
    router = _normal(rng, config.num_experts, config.hidden_size)
    weight_map: dict[str, str] = {}
    total = 0
    for shard, experts in enumerate(np.array_split(np.arange(config.num_experts), shards)):
        tensors = {ROUTER: router} if shard == 0 else {}
        for expert in experts:
            tensors |= _expert(rng, int(expert), config)
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "np"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(json.dumps(_model_config(config), indent=2))
    return total


def _expert(
    rng: np.random.Generator, expert: int, config: MoEConfig
) -> Iterator[tuple[str, np.ndarray]]:
    hidden, inter = config.hidden_size, config.intermediate_size
    sizes = ((inter, hidden), (inter, hidden), (hidden, inter))
    for projection, size in zip(PROJECTIONS, sizes, strict=True):
        yield expert_name(expert, projection), _normal(rng, *size)


def _normal(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    values = rng.standard_normal((rows, columns), np.float32) * np.float32(columns**-0.5)
    return values.astype(ml_dtypes.bfloat16)


def _model_config(config: MoEConfig) -> dict[str, Any]:
    """config.json, the fields that describe the layer."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "moe_intermediate_size": config.intermediate_size,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.top_k,
        "norm_topk_prob": True,
        "num_hidden_layers": 1,
    }
