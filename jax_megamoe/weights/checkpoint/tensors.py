"""Tensors of a checkpoint: in safetensors files, and in arrays handed over in pairs."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np

from jax_megamoe import _checks
from jax_megamoe._files import read_json
from jax_megamoe.weights.checkpoint.header import (
    StoredTensor,
    json_kind,
    json_name,
    paired,
    read_header,
)

_LONGEST_PATH = 255
"""Bytes of a path in an index; file systems take no longer name."""


class Tensor(Protocol):
    """A named tensor; its bytes may not have been read yet."""

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
    """A tensor of a (name, array) pair; float4_e2m1fn, a value a byte, is read as uint8 pairs."""

    name: str
    array: Any
    origin: str = "the pairs given"

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint8) if self._is_e2m1 else np.dtype(self.array.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.array.shape)
        return paired(f"{self.name} in {self.origin}", shape) if self._is_e2m1 else shape

    def read(self, index: int | None = None) -> np.ndarray:
        array = np.asarray(self.array if index is None else self.array[index])
        if not self._is_e2m1:
            return array
        codes = array.view(np.uint8) & 15
        return codes[..., ::2] | codes[..., 1::2] << 4

    @property
    def _is_e2m1(self) -> bool:
        return str(self.array.dtype) == "float4_e2m1fn"


def _shard(index: Path, file: object, where: str) -> Path:
    """The file that an index names beside it.

    A link is followed: the folders of Hugging Face's cache are made of links.

    Raises:
        ValueError: no path within the folder.
    """
    path = PurePosixPath(json_name(file, index) if isinstance(file, str) else "/")
    is_within = path.parts and not path.is_absolute() and not {"..", "."} & {*path.parts}
    if not is_within or "\0" in str(path) or len(os.fsencode(path)) > _LONGEST_PATH:
        got = repr(file) if isinstance(file, str) else json_kind(file)
        raise ValueError(_checks.message(where, "a file in the index's folder", got))
    return index.parent / path


class Checkpoint:
    """A safetensors file, or a folder of them with or without an index.

    Headers are read on demand. A file is opened once and stays open as long as a tensor of it.

    Args:
        path: a file, or a folder with one ``*.safetensors.index.json``, or else with safetensors
            files whose tensors are all taken.

    Raises:
        FileNotFoundError: no such path, no safetensors file in the folder, or an indexed file that
            is absent.
        ValueError: an index without a weight map, or that names a file outside the folder; several
            indices; a tensor in two files.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.exists():
            raise FileNotFoundError(_checks.message("checkpoint", "a folder or a file", path))
        self._headers: dict[Path, dict[str, StoredTensor]] = {}

    @cached_property
    def files(self) -> dict[str, Path]:
        """The file of every tensor, by the tensor's name."""
        if not self.path.is_dir():
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
        content = read_json(index)
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict):
            expected = "a JSON object with weight_map: tensor name to file name"
            got = f"keys {list(content)[:5]}" if isinstance(content, dict) else json_kind(content)
            raise ValueError(_checks.message(index.name, expected, got))
        shards: dict[object, Path] = {}
        files: dict[str, Path] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or file not in shards:
                shards[file] = _shard(index, file, f"{json_name(name, index)} in {index.name}")
            files[name] = shards[file]
        return files

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
        try:
            tensors = self._header(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            expected = f"the file {path.name}, which the index names"
            where = f"{name} in {self.path}"
            raise FileNotFoundError(_checks.message(where, expected, "no file")) from error
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
