"""Writes small checkpoints: safetensors shards with an index, in any dtype, and models in each
published dialect.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jax_megamoe.weights.source import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_file(path: Path, tensors: Mapping[str, Any]) -> None:
    """One safetensors file."""
    arrays = {name: np.asarray(array) for name, array in tensors.items()}
    header: dict[str, Any] = {}
    offset = 0
    for name, array in arrays.items():
        header[name] = dict(
            dtype=_NAMES[array.dtype],
            shape=array.shape,
            data_offsets=[offset, offset + array.nbytes],
        )
        offset += array.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(array.tobytes())


def write_folder(
    folder: Path, tensors: Mapping[str, Any], *, shards: int = 2, config: Any = None
) -> Path:
    """A folder of shards with an index, and config.json where `config` is given."""
    folder.mkdir(exist_ok=True)
    weight_map: dict[str, str] = {}
    names = list(tensors)
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        held = names[shard::shards]
        write_file(folder / file, {name: tensors[name] for name in held})
        weight_map |= dict.fromkeys(held, file)
    index = dict(metadata=dict(total_size=0), weight_map=weight_map)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def qwen(prefix: str, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> dict[str, np.ndarray]:
    """Float matrices [E, I, H], [E, I, H], [E, H, I] under Qwen3-MoE's names."""
    parts = dict(gate_proj=gate, up_proj=up, down_proj=down)
    return {
        f"{prefix}.{expert}.{part}.weight": array[expert]
        for expert in range(len(gate))
        for part, array in parts.items()
    }
