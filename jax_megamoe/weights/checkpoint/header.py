"""One safetensors file: its header, checked, and its tensors, read by slices.

The header is read here rather than through the safetensors package: that has no slices of FP8 and
E8M0 tensors for NumPy, and errors are to name the tensor and the file. Format:
https://huggingface.co/docs/safetensors, a little-endian uint64 length, a JSON header, the bytes.
What that package refuses is refused here, but for one thing: a dtype matters when its tensor is
asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import ml_dtypes
import numpy as np

from jax_megamoe import _checks
from jax_megamoe._files import MAX_JSON, OpenFile, parse_json

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

PAIRS = "F4"
"""E2M1 in a safetensors header, where shapes count values; read as uint8, two values a byte."""

_BITS = {name: 8 * dtype.itemsize for name, dtype in DTYPES.items()} | {
    PAIRS: 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "C64": 64,
}
"""Of one value, for every dtype that the format has."""

_LARGEST = 2**63
"""No count of values is as large, in any file."""


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a safetensors file, its bytes not read.

    Attributes:
        name: the tensor.
        file: the file that its header was read from.
        stored_dtype: as the header names it.
        stored_shape: as the header has it.
        offset: in bytes from the file's start.
        num_bytes: of the tensor.
    """

    name: str
    file: OpenFile
    stored_dtype: str
    stored_shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def origin(self) -> str:
        return self.file.path.name

    @property
    def where(self) -> str:
        """Its name and file, for messages."""
        return f"{self.name} in {self.origin}"

    @property
    def dtype(self) -> np.dtype:
        """The dtype as read: uint8, two values a byte, for F4.

        Raises:
            TypeError: one that is not in `DTYPES`.
        """
        if self.stored_dtype == PAIRS:
            return np.dtype(np.uint8)
        if self.stored_dtype not in DTYPES:
            expected = f"one of the dtypes {[*DTYPES, PAIRS]}"
            raise TypeError(_checks.message(self.where, expected, self.stored_dtype))
        return DTYPES[self.stored_dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape as read.

        Raises:
            ValueError: an odd last axis of F4.
        """
        is_pairs = self.stored_dtype == PAIRS
        return paired(self.where, self.stored_shape) if is_pairs else self.stored_shape

    def read(self, index: int | None = None) -> np.ndarray:
        """The whole tensor, or `index` of its leading axis, reading those bytes only.

        Raises:
            ValueError: the file was written since its header was read.
            TypeError: as `dtype`.
        """
        if index is None:
            return self._values(self.offset, self.num_bytes, self.shape)
        return self.read_rows(index, index + 1)[0]

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        """Entries `start` to `stop` of the leading axis, reading those bytes only."""
        size = self.num_bytes // max(self.shape[0], 1)
        shape = (stop - start, *self.shape[1:])
        return self._values(self.offset + start * size, (stop - start) * size, shape)

    def _values(self, offset: int, size: int, shape: tuple[int, ...]) -> np.ndarray:
        return self.file.read(offset, size).view(self.dtype).reshape(shape)


def paired(where: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of E2M1 values two a byte.

    Raises:
        ValueError: an odd last axis, or none.
    """
    if not shape or shape[-1] % 2:
        expected = "E2M1 values in pairs along the last axis"
        raise ValueError(_checks.message(where, expected, f"shape {list(shape)}"))
    return (*shape[:-1], shape[-1] // 2)


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Tensors by name and the metadata of one safetensors file, which stays open; no tensor is
    read.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a safetensors file by the rules of its package: no JSON object of tensors
            and strings, a tensor twice, tensors that overlap, leave bytes between them or have
            another number of bytes than their shape says, or a file that is shorter or longer.
    """
    file = OpenFile(path)
    file.check_not_a_pointer("a safetensors file")
    length = int.from_bytes(file.read(0, min(8, file.size)).tobytes(), "little")
    if length > min(file.size - 8, MAX_JSON):
        expected = "a safetensors file: its first 8 bytes are its header's length"
        raise ValueError(_checks.message(path.name, expected, f"length {length} in {file.size}"))
    header = parse_json(file.read(8, length).tobytes(), path.name, "a JSON header")
    if not isinstance(header, dict):
        raise ValueError(_checks.message(path.name, "a header of tensors", json_kind(header)))
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        expected = "strings by name, or none"
        raise ValueError(
            _checks.message(f"__metadata__ of {path.name}", expected, json_kind(metadata))
        )
    start = 8 + length
    tensors = {name: _stored(name, file, entry, start) for name, entry in header.items()}
    _check_cover(file, tensors, start)
    return tensors, metadata


def _stored(name: str, file: OpenFile, entry: object, data_start: int) -> StoredTensor:
    where = f"{json_name(name, file.path)} in {file.path.name}"
    if not isinstance(entry, dict):
        raise ValueError(_checks.message(where, "dtype, shape and data_offsets", json_kind(entry)))
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str):
        raise ValueError(_checks.message(f"dtype of {where}", "a string", json_kind(dtype)))
    if not _are_sizes(shape):
        raise ValueError(_checks.message(f"shape of {where}", "a list of integers >= 0", shape))
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        expected = "two integers, 0 <= begin <= end"
        raise ValueError(_checks.message(f"data_offsets of {where}", expected, offsets))
    begin, end = offsets
    values = 1
    for size in shape:
        values *= size
        if values >= _LARGEST:
            expected = "fewer than 2^63 values"
            raise ValueError(_checks.message(f"shape of {where}", expected, shape))
    if dtype in _BITS and values * _BITS[dtype] != 8 * (end - begin):
        expected = f"{values * _BITS[dtype] / 8:.15g} bytes for {dtype} {shape}"
        raise ValueError(_checks.message(where, expected, end - begin))
    return StoredTensor(name, file, dtype, tuple(shape), data_start + begin, end - begin)


def _check_cover(file: OpenFile, tensors: Mapping[str, StoredTensor], start: int) -> None:
    """Raises ValueError unless the tensors follow each other from `start` to the file's end."""
    covered = start
    for tensor in sorted(tensors.values(), key=lambda each: (each.offset, each.num_bytes)):
        if tensor.offset != covered:
            expected = f"{covered - start}, where the tensor before it ends"
            got = tensor.offset - start
            raise ValueError(_checks.message(f"begin of {tensor.where}", expected, got))
        covered += tensor.num_bytes
        if covered > file.size:
            expected = f"a file of at least {covered} bytes"
            raise ValueError(_checks.message(tensor.where, expected, file.size))
    if covered != file.size:
        expected = f"{covered} bytes, to the end of its last tensor"
        raise ValueError(_checks.message(file.path.name, expected, file.size))


def _are_sizes(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < _LARGEST for value in values
    )


def json_name(name: str, path: Path) -> str:
    """A name from a JSON file, which can hold half of a surrogate pair: nothing prints that.

    Raises:
        ValueError: such a name.
    """
    try:
        name.encode()
    except UnicodeEncodeError as error:
        where = f"a name in {path.name}"
        raise ValueError(_checks.message(where, "Unicode", ascii(name))) from error
    return name


def json_kind(value: object) -> str:
    """What a JSON value is, however long."""
    return f"{value!r}" if value is None or isinstance(value, bool) else type(value).__name__
