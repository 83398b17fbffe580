"""Writes small checkpoints: safetensors shards with an index, experts in each published dialect.

Matrices are dicts from ``gate``, ``up`` and ``down`` to a `Stored` of all experts, [E, N, K].
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_megamoe.config import MoEConfig
from jax_megamoe.numerics import quantization
from jax_megamoe.weights.checkpoint.header import DTYPES
from jax_megamoe.weights.params import ExpertWeights

PREFIX = "model.layers.3.mlp.experts"

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
PROJ = dict(gate="gate_proj", up="up_proj", down="down_proj")
W123 = dict(gate="w1", up="w3", down="w2")


class Stored(NamedTuple):
    """One projection of all experts as stored, and the float32 values it stands for."""

    weight: np.ndarray
    scale: np.ndarray | None
    global_scale: np.ndarray | None
    values: np.ndarray


Experts = dict[str, Stored]


def write_file(path: Path, tensors: Mapping[str, Any]) -> Path:
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
    return path


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


def sizes(part: str, experts: int, hidden: int, inter: int) -> tuple[int, int, int]:
    """Shape of a projection of all experts."""
    return (experts, hidden, inter) if part == "down" else (experts, inter, hidden)


def floats(
    rng: np.random.Generator, experts: int, hidden: int, inter: int, dtype: Any = jnp.bfloat16
) -> Experts:
    """Normal numbers in a float dtype."""
    made: Experts = {}
    for part in PROJ:
        weight = rng.standard_normal(sizes(part, experts, hidden, inter)).astype(dtype)
        made[part] = Stored(weight, None, None, weight.astype(np.float32))
    return made


def fp8_block(
    rng: np.random.Generator,
    experts: int,
    hidden: int,
    inter: int,
    *,
    block: tuple[int, int] = (128, 128),
    powers: bool = False,
) -> Experts:
    """E4M3 under float32 scales; powers of two if asked for."""
    made: Experts = {}
    for part in PROJ:
        shape = sizes(part, experts, hidden, inter)
        weight = _e4m3(rng, shape)
        grid = (shape[0], -(-shape[1] // block[0]), -(-shape[2] // block[1]))
        scale = rng.uniform(1e-3, 3e-3, grid).astype(np.float32)
        if powers:
            scale = np.exp2(rng.integers(-12, -7, grid)).astype(np.float32)
        fine = scale.repeat(block[0], 1)[:, : shape[1]].repeat(block[1], 2)[:, :, : shape[2]]
        made[part] = Stored(weight, scale, None, weight.astype(np.float32) * fine)
    return made


def mxfp8(rng: np.random.Generator, experts: int, hidden: int, inter: int) -> Experts:
    """E4M3 under UE8M0 bytes per 32."""
    made: Experts = {}
    for part in PROJ:
        shape = sizes(part, experts, hidden, inter)
        weight = _e4m3(rng, shape)
        scale = rng.integers(114, 122, (*shape[:2], shape[2] // 32)).astype(np.uint8)
        made[part] = Stored(weight, scale, None, quantization.dequantize_mxfp8(weight, scale))
    return made


def mxfp4(rng: np.random.Generator, experts: int, hidden: int, inter: int) -> Experts:
    """E2M1 pairs under UE8M0 bytes per 32."""
    made: Experts = {}
    for part in PROJ:
        rows, columns = (experts, hidden), inter
        if part != "down":
            rows, columns = (experts, inter), hidden
        weight = _e2m1(rng, (*rows, columns // 2))
        scale = rng.integers(118, 124, (*rows, columns // 32)).astype(np.uint8)
        made[part] = Stored(weight, scale, None, quantization.dequantize_mxfp4(weight, scale))
    return made


def nvfp4(rng: np.random.Generator, experts: int, hidden: int, inter: int) -> Experts:
    """E2M1 pairs under E4M3 scales per 16 and a global scale, gate's and up's alike."""
    made: Experts = {}
    # Powers of two, whose reciprocals (compressed-tensors' divisors) are exact.
    shared = np.exp2(rng.integers(-12, -8, experts)).astype(np.float32)
    for part in PROJ:
        rows, columns = (experts, hidden), inter
        if part != "down":
            rows, columns = (experts, inter), hidden
        weight = _e2m1(rng, (*rows, columns // 2))
        scale = rng.uniform(1, 400, (*rows, columns // 16)).astype(ml_dtypes.float8_e4m3fn)
        glob = shared if part != "down" else shared * np.float32(2)
        values = quantization.dequantize_nvfp4(weight, scale, glob)
        made[part] = Stored(weight, scale, glob, values)
    return made


SOURCES: dict[str, Callable[..., Experts]] = {
    "bf16": floats,
    "fp8_block": fp8_block,
    "mxfp8": mxfp8,
    "mxfp4": mxfp4,
    "nvfp4": nvfp4,
}
"""What makes experts that are stored in each format."""


def make_config(
    weight_format: str, experts: int, hidden: int, inter: int, **changes: Any
) -> MoEConfig:
    """A layer of these sizes."""
    sizes = dict(num_experts=experts, hidden_size=hidden, intermediate_size=inter)
    rest = dict(top_k=2, max_num_tokens=8, weight_format=weight_format)
    return MoEConfig(**(sizes | rest | changes))


def assert_same(a: ExpertWeights, b: ExpertWeights) -> None:
    """The same fields, bit for bit."""
    assert a.arrays().keys() == b.arrays().keys()
    for name, array in a.arrays().items():
        other = b.arrays()[name]
        assert array.dtype == other.dtype, name
        assert np.asarray(array).tobytes() == np.asarray(other).tobytes(), name


def per_expert(
    experts: Experts,
    *,
    names: Mapping[str, str] = PROJ,
    weight: str = "weight",
    scale: str = "weight_scale",
    global_scale: str = "weight_scale_2",
    prefix: str = PREFIX,
) -> dict[str, np.ndarray]:
    """One tensor an expert, projection and kind, with these suffixes."""
    tensors: dict[str, np.ndarray] = {}
    for part, stored in experts.items():
        kinds = {weight: stored.weight, scale: stored.scale, global_scale: stored.global_scale}
        for suffix, array in kinds.items():
            for expert in range(0 if array is None else len(stored.weight)):
                tensors[f"{prefix}.{expert}.{names[part]}.{suffix}"] = array[expert]
    return tensors


def qwen(prefix: str, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> dict[str, np.ndarray]:
    """Float matrices [E, I, H], [E, I, H], [E, H, I] under Qwen3-MoE's names."""
    parts = dict(gate_proj=gate, up_proj=up, down_proj=down)
    return {
        f"{prefix}.{expert}.{part}.weight": array[expert]
        for expert in range(len(gate))
        for part, array in parts.items()
    }


def alternating(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """[E, 2I, ...] with rows of gate and up in turns."""
    return np.stack([gate, up], axis=2).reshape(gate.shape[0], -1, *gate.shape[2:])


def gpt_oss(
    experts: Experts, biases: Mapping[str, np.ndarray], prefix: str = PREFIX
) -> dict[str, np.ndarray]:
    """GPT-OSS's blocks, scales and biases."""
    gate, up, down = (experts[part] for part in ("gate", "up", "down"))
    gate_up = alternating(gate.weight, up.weight)
    return {
        f"{prefix}.gate_up_proj_bias": alternating(biases["gate"], biases["up"]),
        f"{prefix}.gate_up_proj_scales": alternating(gate.scale, up.scale),
        f"{prefix}.gate_up_proj_blocks": gate_up.reshape(*gate_up.shape[:2], -1, 16),
        f"{prefix}.down_proj_blocks": down.weight.reshape(*down.weight.shape[:2], -1, 16),
        f"{prefix}.down_proj_scales": down.scale,
        f"{prefix}.down_proj_bias": biases["down"],
    }


def _e4m3(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Normal numbers, each row under a factor of its own, so that a mean over rows is over every
    place that E4M3's steps have within another format's."""
    factor = np.exp2(rng.uniform(-1, 1, (*shape[:-1], 1)))
    return (factor * rng.standard_normal(shape)).astype(ml_dtypes.float8_e4m3fn)


def _e2m1(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Pairs of codes without the negative zero, which no quantiser here makes."""
    codes = rng.integers(0, 15, (*shape, 2)).astype(np.uint8)
    codes = np.where(codes >= 8, codes + 1, codes)
    return (codes[..., 0] | codes[..., 1] << 4).astype(np.uint8)
