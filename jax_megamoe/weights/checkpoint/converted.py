"""Parameters on disk in kernel layout: a safetensors file that is mapped and handed to the devices.

The header's metadata says what is in it: a version, the format, the layout and the sizes. A file of
another version, format, layout or size is refused, never transformed.
"""

import json
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jax_megamoe import _checks
from jax_megamoe.config import MoEConfig
from jax_megamoe.weights.checkpoint.buffers import Placement, place
from jax_megamoe.weights.checkpoint.tensors import DTYPES, StoredTensor, read_header
from jax_megamoe.weights.layout import join_rows, split_rows
from jax_megamoe.weights.params import (
    ARRAY_FIELDS,
    W13_ROWS,
    ExpertWeights,
    check_weights,
    default_layout,
)

FILE_VERSION = 1
"""Changes when a kernel layout of the same name does."""

_ALIGNMENT = 64
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SIZES = ("num_experts", "hidden_size", "intermediate_size", "num_shared_experts")


def save_experts(path: str | Path, config: MoEConfig, weights: ExpertWeights) -> None:
    """Writes parameters as they are to `path`, one array after another, through a temporary file.

    Args:
        path: the file, usually ``*.safetensors``; an existing one is replaced at the end.
        config: the layer.
        weights: its parameters; every shard must be on a device of this process.

    Raises:
        ValueError: parameters that are not the config's, or shards of other processes.
    """
    check_weights(config, weights)
    arrays = weights.arrays()
    for name, array in arrays.items():
        if not array.is_fully_addressable:
            expected = "an array whose shards are all on this process's devices"
            raise ValueError(_checks.message(f"weights.{name}", expected, array.sharding))
    path = Path(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            shapes = {
                name: _file_shape(name, array, weights.layout) for name, array in arrays.items()
            }
            file.write(_header(_metadata(config, weights.layout), arrays, shapes))
            for name in arrays:
                for block in _blocks(arrays[name]):
                    file.write(np.ascontiguousarray(block).view(np.uint8).data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load_converted(
    path: str | Path,
    config: MoEConfig,
    *,
    mesh: Mesh | None = None,
    axis: str | tuple[str, ...] | None = None,
) -> ExpertWeights:
    """Parameters that `save_experts` wrote, mapped: only this process's experts are read.

    Args:
        path: the file; on a CPU device the parameters stay mapped to it.
        config: the layer, of the format, layout and sizes in the file.
        mesh: shards the experts over `axis`; None: all on the default device.
        axis: the mesh axis, or axes.

    Raises:
        ValueError: no such file of parameters; another version, format, layout or size; named.
        FileNotFoundError: no such file.
    """
    path = Path(path)
    tensors, metadata = read_header(path)
    expected = _metadata(config, default_layout(config))
    for key, value in expected.items():
        if metadata.get(key) != value:
            raise ValueError(
                _checks.message(
                    f"{key} of {path.name}",
                    repr(value),
                    repr(metadata.get(key)),
                    "convert the checkpoint again for this config",
                )
            )
    for name in tensors:
        _checks.one_of(f"tensor in {path.name}", name, ARRAY_FIELDS)
    placement = place(config, mesh, axis)
    layout = default_layout(config)
    arrays: dict[str, Any] = {
        name: _mapped(each, placement, layout) for name, each in tensors.items()
    }
    weights = ExpertWeights(**arrays, format=config.weight_format.name)
    check_weights(config, weights)
    return weights


def _mapped(tensor: StoredTensor, placement: Placement, layout: str) -> jax.Array:
    whole = np.memmap(tensor.path, tensor.dtype, "r", tensor.offset, tensor.shape)
    if tensor.name in W13_ROWS and whole.ndim > 1:
        whole = split_rows(whole, layout, W13_ROWS[tensor.name])
    return placement.to_devices(tensor.name, whole.shape, lambda part: whole[slice(*part)])


def _metadata(config: MoEConfig, layout: str) -> dict[str, str]:
    fused = config.shared_format if config.num_shared_experts else None
    known = dict(
        jax_megamoe_version=FILE_VERSION,
        weight_format=config.weight_format.name,
        layout=layout,
        shared_format=fused,
        **{name: getattr(config, name) for name in _SIZES},
        num_logical_experts=config.logical_experts,
    )
    return {name: str(value) for name, value in known.items()}


def _file_shape(name: str, array: jax.Array, layout: str) -> tuple[int, ...]:
    """A field's shape in the file, where w13's rows are one axis in every order."""
    joined = partial(join_rows, layout=layout, axis=W13_ROWS.get(name, -1))
    return jax.eval_shape(joined, array).shape if name in W13_ROWS else array.shape


def _header(
    metadata: dict[str, str], arrays: dict[str, jax.Array], shapes: dict[str, tuple[int, ...]]
) -> bytes:
    entries: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, array in arrays.items():
        size = array.size * array.dtype.itemsize
        entries[name] = dict(
            dtype=_NAMES[np.dtype(array.dtype)],
            shape=shapes[name],
            data_offsets=[offset, offset + size],
        )
        offset += size
    text = json.dumps(entries).encode()
    # Spaces after the JSON keep the arrays on a boundary that a device can map.
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _blocks(array: jax.Array) -> Iterable[np.ndarray]:
    """The array's bytes in order, a shard at a time."""
    shards = {
        (shard.index[0].start or 0 if shard.index else 0): shard
        for shard in array.addressable_shards
    }
    for start in sorted(shards):
        yield np.asarray(shards[start].data)
