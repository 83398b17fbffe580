"""Parameters on disk in kernel layout: a safetensors file that is read and handed to the devices.

The header's metadata says what is in it: a version, the format, the layout and the sizes. A file of
another version, format, layout or size is refused, never transformed. Parameters are copies: what
becomes of the file after loading changes none. (Mapped ones would change with a file written in
place, and end the process where it is cut short.)
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jax_megamoe import _checks
from jax_megamoe._files import replaced
from jax_megamoe.config import ExpertSpec, MoEConfig, check_config
from jax_megamoe.formats import GROUPED_LAYOUTS
from jax_megamoe.weights.checkpoint.buffers import Placement, place
from jax_megamoe.weights.checkpoint.header import DTYPES, StoredTensor, read_header
from jax_megamoe.weights.folded_biases import unfold_biases
from jax_megamoe.weights.layout import SGL_TILE, join_rows, split_rows
from jax_megamoe.weights.params import (
    MATRIX_FIELDS,
    W13_ROWS,
    ExpertMatrices,
    ExpertWeights,
    check_weights,
    default_layout,
    known_layouts,
)

FILE_VERSION = 1
"""Changes when a kernel layout of the same name does."""

_TENSORS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        **{name: ("routed", name) for name in MATRIX_FIELDS},
        "shared_l1_weight": ("shared", "w13_weight"),
        "shared_l1_weight_scale": ("shared", "w13_weight_scale"),
        "shared_l2_weight": ("shared", "w2_weight"),
        "shared_l2_weight_scale": ("shared", "w2_weight_scale"),
    }
)
"""Part and field of each tensor: files of every release have these names."""

_ALIGNMENT = 64
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SIZES = ("num_experts", "hidden_size", "intermediate_size", "num_shared_experts")


def save_experts(path: str | Path, config: ExpertSpec, weights: ExpertWeights) -> None:
    """Writes parameters as they are to `path`, one array after another; folded biases unfolded.

    The file appears whole, at the end, in place of an existing one; after an error that is as it
    was. What a killed process left beside it goes.

    Args:
        path: the file, usually ``*.safetensors``.
        config: the layer.
        weights: its parameters, sharded in any way; every shard must be on a device of this
            process.

    Raises:
        ValueError: parameters that are not the config's, or shards of other processes.
        OSError: the folder cannot be written, or is full; `path` is a folder.
    """
    check_weights(config, weights)
    weights = unfold_biases(weights)
    named = weights.arrays()
    for name, array in named.items():
        if not array.is_fully_addressable:
            expected = "an array with all shards on this process's devices"
            raise ValueError(_checks.message(f"weights.{name}", expected, array.sharding))
    paths = {tensor: ".".join(field) for tensor, field in _TENSORS.items()}
    arrays = {tensor: named[path] for tensor, path in paths.items() if path in named}
    shapes = {name: _file_shape(name, array, weights.layout) for name, array in arrays.items()}
    with replaced(Path(path)) as file:
        file.write(_header(_metadata(config, weights.layout), arrays, shapes))
        for name, array in arrays.items():
            for block in _blocks(paths[name], array):
                file.write(np.ascontiguousarray(block).view(np.uint8).data)


def load_converted(
    path: str | Path,
    config: ExpertSpec,
    *,
    mesh: Mesh | None = None,
    axis: str | tuple[str, ...] | None = None,
) -> ExpertWeights:
    """Parameters that `save_experts` wrote; only this process's experts are read.

    Args:
        path: the file, which may be replaced or removed once this returns.
        config: the layer, of the format, layout and sizes in the file. Layouts of the grouped
            products are right for every config, all layouts for an `ExpertSpec`, which names no
            kernel.
        mesh: shards the experts over `axis`; None: all on the default device.
        axis: the mesh axis, or axes.

    Raises:
        ValueError: no such file of parameters; another version, format, layout or size; named;
            a file that is damaged, or written meanwhile.
        TypeError: a parameter of another dtype.
        FileNotFoundError: no such file.
    """
    check_config(config, ExpertSpec)
    path = Path(path)
    tensors, metadata = read_header(path)
    layout = default_layout(config)
    stored = metadata.get("layout", layout)
    if stored in (GROUPED_LAYOUTS if isinstance(config, MoEConfig) else known_layouts(config)):
        layout = stored
    expected = _metadata(config, layout)
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
        _checks.one_of(f"tensor in {path.name}", name, _TENSORS)
    structs = {name: _struct(each, layout) for name, each in tensors.items()}
    # Before a tensor is read.
    check_weights(config, _weights(structs, config, layout))
    placement = place(config, mesh, axis)
    arrays = {name: _copied(each, placement, structs[name].shape) for name, each in tensors.items()}
    return _weights(arrays, config, layout)


def _weights(tensors: Mapping[str, Any], config: ExpertSpec, layout: str) -> ExpertWeights:
    """Parameters of what stands for each tensor of a file; None for a matrix that it lacks."""
    parts: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, array in tensors.items():
        part, field = _TENSORS[name]
        parts[part][field] = array
    lacking = dict(w13_weight=None, w2_weight=None)
    matrices = {part: ExpertMatrices(**lacking | found) for part, found in parts.items()}
    routed = matrices.get("routed", ExpertMatrices(**lacking))
    return ExpertWeights(routed, matrices.get("shared"), config.weight_format.name, layout)


def _struct(tensor: StoredTensor, layout: str) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a field by its tensor's, where w13's rows are one axis."""
    struct = jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)
    axis = W13_ROWS.get(tensor.name)
    if axis is None or struct.ndim < 2 or struct.shape[axis] % SGL_TILE:
        return struct
    return jax.eval_shape(partial(split_rows, layout=layout, axis=axis), struct)


def _copied(tensor: StoredTensor, placement: Placement, shape: tuple[int, ...]) -> jax.Array:
    def part(rows: tuple[int, int]) -> np.ndarray:
        return tensor.read_rows(*rows).reshape(-1, *shape[1:])

    return placement.to_devices(_TENSORS[tensor.name][0], shape, part)


def _metadata(config: ExpertSpec, layout: str) -> dict[str, str]:
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


def _blocks(name: str, array: jax.Array) -> Iterable[np.ndarray]:
    """The array in order, a range of its leading axis at a time, put together from all shards.

    Raises:
        ValueError: the shards do not cover the array.
    """
    ranges: dict[tuple[int, int], dict[tuple[Any, ...], jax.Array]] = defaultdict(dict)
    for shard in array.addressable_shards:
        start, stop, _ = shard.index[0].indices(array.shape[0])
        inner = tuple((each.start, each.stop) for each in shard.index[1:])
        ranges[start, stop][inner] = shard.data  # replicas are equal
    covered = 0
    for (start, stop), parts in sorted(ranges.items()):
        size = (stop - start) * math.prod(array.shape[1:])
        if start != covered or sum(part.size for part in parts.values()) != size:
            expected = "shards that cover it, each entry once"
            raise ValueError(_checks.message(f"weights.{name}", expected, array.sharding))
        covered = stop
        if len(parts) == 1:
            yield np.asarray(next(iter(parts.values())))
            continue
        block = np.empty((stop - start, *array.shape[1:]), array.dtype)
        for inner, part in parts.items():
            block[slice(None), *(slice(*bounds) for bounds in inner)] = part
        yield block
