"""Tensors of a checkpoint: safetensors files read by slices, and arrays handed over in pairs.

The safetensors header is read here rather than through the safetensors package: that has no slices
of FP8 and E8M0 tensors for NumPy, and errors are to name the tensor and the file. Format:
https://huggingface.co/docs/safetensors, a little-endian uint64 length, a JSON header, the bytes.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from jax_megamoe import _checks

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""NumPy dtypes by their name in a safetensors header."""

_MAX_HEADER = 100_000_000


class Tensor(Protocol):
    """A named tensor whose bytes may not have been read yet."""

    @property
    def name(self) -> str: ...
    @property
    def origin(self) -> str:
        """Where it comes from, for messages."""
        ...

    @property
    def dtype(self) -> np.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, index: int | None = None) -> np.ndarray:
        """The whole tensor, or `index` of its leading axis."""
        ...


@dataclass(frozen=True)
class HeldTensor:
    """A tensor of a (name, array) pair."""

    name: str
    array: Any
    origin: str = "the pairs given"

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.array.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    def read(self, index: int | None = None) -> np.ndarray:
        return np.asarray(self.array if index is None else self.array[index])


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file: `offset` is counted in bytes from the file's start."""

    name: str
    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def origin(self) -> str:
        return self.path.name

    def read(self, index: int | None = None) -> np.ndarray:
        """The whole tensor, or `index` of its leading axis, reading those bytes only.

        Raises:
            ValueError: the file ends before the tensor does.
        """
        shape = self.shape if index is None else self.shape[1:]
        size = math.prod(shape) * self.dtype.itemsize
        offset = self.offset + (index or 0) * size
        data = np.fromfile(self.path, np.uint8, count=size, offset=offset)
        if data.size != size:
            raise ValueError(
                _checks.message(f"{self.name} in {self.origin}", f"{size} bytes", data.size)
            )
        return data.view(self.dtype).reshape(shape)


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Tensors by name and the metadata of one safetensors file; no tensor is read.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a safetensors file, a tensor twice, or one that runs past the file's end.
        TypeError: a dtype that is not in `DTYPES`.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            expected = "a safetensors file, whose first 8 bytes are its header's length"
            raise ValueError(_checks.message(path.name, expected, f"length {length} in {size}"))
        text = file.read(length)
    try:
        header: dict[str, Any] = json.loads(text, object_pairs_hook=_no_name_twice)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(_checks.message(path.name, "a JSON header", error)) from error
    except KeyError as error:
        expected = "each tensor once"
        raise ValueError(_checks.message(path.name, expected, f"{error} twice")) from error
    metadata = header.pop("__metadata__", {})
    tensors = {name: _stored(name, path, entry, 8 + length) for name, entry in header.items()}
    for tensor in tensors.values():
        end = tensor.offset + math.prod(tensor.shape) * tensor.dtype.itemsize
        if end > size:
            expected = f"a file of at least {end} bytes"
            raise ValueError(_checks.message(f"{tensor.name} in {path.name}", expected, size))
    return tensors, metadata


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for name, value in pairs:
        if name in unique:
            raise KeyError(name)
        unique[name] = value
    return unique


def _stored(name: str, path: Path, entry: dict[str, Any], data_start: int) -> StoredTensor:
    where = f"{name} in {path.name}"
    if entry["dtype"] not in DTYPES:
        raise TypeError(_checks.message(where, f"one of the dtypes {list(DTYPES)}", entry["dtype"]))
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if end - begin != math.prod(shape) * dtype.itemsize:
        expected = f"{math.prod(shape) * dtype.itemsize} bytes for {dtype} {list(shape)}"
        raise ValueError(_checks.message(where, expected, end - begin))
    return StoredTensor(name, path, dtype, shape, data_start + begin)


class Checkpoint:
    """A safetensors file, or a folder of them with or without an index; headers are read on demand.

    Args:
        path: a file, or a folder with one ``*.safetensors.index.json``, or else with safetensors
            files whose tensors are all taken.

    Raises:
        FileNotFoundError: no such path, no safetensors file in the folder, or an indexed file that
            is absent.
        ValueError: an index without a weight map, several indices, or a tensor in two files.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.exists():
            raise FileNotFoundError(_checks.message("checkpoint", "a folder or a file", path))
        self._headers: dict[Path, dict[str, StoredTensor]] = {}

    @cached_property
    def files(self) -> dict[str, Path]:
        """The file of every tensor, by the tensor's name."""
        if self.path.is_file():
            return dict.fromkeys(self._header(self.path), self.path)
        indices = sorted(self.path.glob("*.safetensors.index.json"))
        if len(indices) > 1:
            raise ValueError(
                _checks.message(
                    f"checkpoint {self.path}",
                    "one safetensors index",
                    [index.name for index in indices],
                )
            )
        return self._from_index(indices[0]) if indices else self._from_headers()

    def _from_index(self, index: Path) -> dict[str, Path]:
        content = json.loads(index.read_text())
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict):
            expected = "a JSON object with weight_map: tensor name to file name"
            raise ValueError(_checks.message(index.name, expected, f"keys {list(content)[:5]}"))
        return {name: self.path / file for name, file in weight_map.items()}

    def _from_headers(self) -> dict[str, Path]:
        paths = sorted(self.path.glob("*.safetensors"))
        if not paths:
            expected = "a folder with *.safetensors files"
            raise FileNotFoundError(_checks.message("checkpoint", expected, self.path))
        files: dict[str, Path] = {}
        for path in paths:
            for name in self._header(path):
                if name in files:
                    got = f"one in {files[name].name} and one in {path.name}"
                    raise ValueError(_checks.message(name, "one tensor of that name", got))
                files[name] = path
        return files

    def tensor(self, name: str) -> StoredTensor:
        """The tensor of that name, its bytes not read.

        Raises:
            FileNotFoundError: the index names a file that is absent.
            ValueError: the file holds no such tensor.
        """
        path = self.files[name]
        if not path.exists():
            expected = f"the file {path.name}, which the index names"
            raise FileNotFoundError(_checks.message(f"{name} in {self.path}", expected, "no file"))
        tensors = self._header(path)
        if name not in tensors:
            got = f"{len(tensors)} others"
            raise ValueError(_checks.message(f"{name} in {path.name}", "that tensor", got))
        return tensors[name]

    def strays(self) -> Iterator[StoredTensor]:
        """Tensors of the files opened so far that the index has elsewhere, or not at all."""
        for path, tensors in self._headers.items():
            for name, tensor in tensors.items():
                if self.files.get(name) != path:
                    yield tensor

    def _header(self, path: Path) -> dict[str, StoredTensor]:
        if path not in self._headers:
            self._headers[path], _ = read_header(path)
        return self._headers[path]
