"""A small checkpoint with one MoE layer, in the files and under the names of Qwen3-MoE."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save

from jax_megamoe import _checks, _files
from jax_megamoe.config import MoEConfig

LAYER = "model.layers.0.mlp"
ROUTER = f"{LAYER}.gate.weight"
EXPERTS = f"{LAYER}.experts"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

_MADE_BY = "jax_megamoe.cli.demo"
"""In the config.json of every checkpoint that `write_checkpoint` made."""


def expert_name(expert: int, projection: str) -> str:
    """The tensor of one projection."""
    return f"{EXPERTS}.{expert}.{projection}.weight"


def write_checkpoint(folder: Path, config: MoEConfig, *, seed: int, shards: int = 4) -> int:
    """Writes config.json, an index and `shards` safetensors files with random bfloat16 weights.

    Weights are normal with variance 1 / fan-in, so that a layer keeps the size of its tokens.

    The index comes last: a folder that was not written to its end has none.

    Args:
        folder: made if it is not there. One that an earlier call wrote is overwritten.
        config: sizes of the layer; its format does not matter.
        seed: of the weights.
        shards: number of files, at most one an expert.

    Returns:
        Bytes of the tensors.

    Raises:
        ValueError: a folder with files of another origin, which may be somebody's model.
    """
    _check_own(folder)
    folder.mkdir(parents=True, exist_ok=True)
    index = folder / "model.safetensors.index.json"
    index.unlink(missing_ok=True)
    model_config = _model_config(config) | {"made_by": _MADE_BY}
    _files.write(folder / "config.json", json.dumps(model_config, indent=2))
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
        _files.write(folder / name, save(tensors, metadata={"format": "np"}))
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _files.write(index, json.dumps(content, indent=2))
    return total


def _check_own(folder: Path) -> None:
    """Raises ValueError for a folder with files that `write_checkpoint` did not write."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    try:
        found = _files.read_json(folder / "config.json")
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or found.get("made_by") != _MADE_BY:
        expected = "no folder, an empty one, or one that the demo wrote"
        raise ValueError(_checks.message(str(folder), expected, "other files", "move them"))


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
