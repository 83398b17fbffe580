"""One projection of one expert, gathered from its tensors: shapes and dtypes checked, then read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import ml_dtypes
import numpy as np

from jax_megamoe import _checks
from jax_megamoe.formats import WeightFormat
from jax_megamoe.weights.checkpoint.dialects import Kind, Role
from jax_megamoe.weights.checkpoint.tensors import Tensor
from jax_megamoe.weights.requantize import QuantizedMatrix, SourceMatrix, requantize

FLOATS = ("bfloat16", "float16", "float32")
PACKED = ("uint8", "int8")
"""Dtypes of E2M1 pairs."""
UNPACKED = (*FLOATS, "float8_e4m3fn")
"""Dtypes of weights with one value an element, whose stacks may be stored transposed."""
_E8M0_ONE = 127
_BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128)
_GRID_BLOCKS = (1, 16, 32, 64, 128)

GLOBAL_SCALE_TOLERANCE = 1e-5
"""Largest relative difference of w1's and w3's global scales: the kernel takes one for both."""

Cache = dict[tuple[str, int | None], np.ndarray]
"""Slices read already, for pieces that share one."""


@dataclass(frozen=True)
class Piece:
    """A tensor's part for one projection of one expert, as [N, K] (a bias: [N]) when read.

    Attributes:
        tensor: the tensor it is cut from.
        role: what the tensor is.
        index: which entry of the tensor's leading axis; None: all of it.
        half: 0 for gate and 1 for up in a tensor with both, else None.
        transposed: stored as [K, N].
        alternating: gate and up rows in turns, rather than gate rows first.
        rows: N, for a scale, which may cover rows of gate and of up; 0: one scale a row.
    """

    tensor: Tensor
    role: Role
    index: int | None = None
    half: int | None = None
    transposed: bool = False
    alternating: bool = False
    rows: int = 0

    @property
    def where(self) -> str:
        """The tensor's name and file, for messages."""
        return f"{self.tensor.name} in {self.tensor.origin}"

    @cached_property
    def dtype(self) -> str:
        return str(self.tensor.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape when read."""
        shape = self._stored_shape[:: -1 if self.transposed else 1]
        if not self._splits(shape):
            return shape
        taken = self._own_rows(shape[0])
        rows = len(range(shape[0])[taken]) if isinstance(taken, slice) else taken.size
        return (rows, *shape[1:])

    @property
    def _stored_shape(self) -> tuple[int, ...]:
        """Of one matrix, or of gate and up."""
        shape = self.tensor.shape[0 if self.index is None else 1 :]
        if self.role.blocks and len(shape) == 3:
            return (shape[0], shape[1] * shape[2])
        if self.role.kind == "scale" and len(shape) == 4 and shape[1] == shape[3] == 1:
            return (shape[0], shape[2])  # ModelOpt's FP8_PB_WO
        return shape

    @property
    def num_bytes(self) -> int:
        """Bytes when read."""
        return math.prod(self.shape) * self.tensor.dtype.itemsize

    def read(self, cache: Cache) -> np.ndarray:
        """The values; a slice that pieces share is read once a cache."""
        key = (self.tensor.name, self.index)
        if key not in cache:
            cache[key] = self.tensor.read(self.index)
        array = cache[key] if self.half is not None else cache.pop(key)
        array = array.reshape(self._stored_shape)
        if self.transposed:
            array = array.T
        return array[self._own_rows(len(array))] if self._splits(array.shape) else array

    def _splits(self, shape: tuple[int, ...]) -> bool:
        # One number, as a scale of both halves is, belongs to each.
        return self.half is not None and bool(shape) and shape[0] > 1

    def _own_rows(self, entries: int) -> slice | np.ndarray:
        """This half's of the rows of a tensor with both; of scales, one for each of its rows, or
        for as many as no scale ends among."""
        assert self.half is not None
        block = _block(2 * self.rows, entries) if self.rows else 1
        if block is None and (self.alternating or entries % 2):
            return slice(None)  # no grid over both, which the check of its shape says
        if block in (None, 1):  # None: each half has scales of its own, the last for fewer rows
            middle = entries // 2
            halves = (slice(middle), slice(middle, None))
            return slice(self.half, None, 2) if self.alternating else halves[self.half]
        step = block // 2 if self.alternating else math.gcd(block, self.rows)
        own = np.arange(0, self.rows, step)
        return (2 * own if self.alternating else own + self.half * self.rows) // block


@dataclass
class Projection:
    """The pieces of one matrix [N, K] of one expert.

    Attributes:
        stored: N and K as stored.
        padded: N and K of the layer: the matrix is filled up with zeros.
        pieces: by kind.
    """

    stored: tuple[int, int]
    padded: tuple[int, int]
    pieces: dict[Kind, Piece] = field(default_factory=dict[Kind, Piece])

    def add(self, piece: Piece) -> None:
        """Keeps a piece.

        Raises:
            ValueError: there is one of that kind, or it has the wrong shape.
            TypeError: it has a wrong dtype.
            NotImplementedError: packed int4.
        """
        kind = piece.role.kind
        if kind in self.pieces:
            got = f"{piece.where} and {self.pieces[kind].where}"
            raise ValueError(_checks.message(f"{kind} of a projection", "one tensor", got))
        if kind == "scale":
            piece = replace(piece, rows=self.stored[0])
        _check_piece(piece, self.stored)
        self.pieces[kind] = piece
        weight, scale = self.pieces.get("weight"), self.pieces.get("scale")
        if weight is not None and scale is not None and kind in ("weight", "scale"):
            self.pieces["scale"] = _oriented(scale, weight, self.stored)

    @property
    def missing(self) -> str | None:
        """What a complete matrix still lacks; None for nothing."""
        weight, scale = self.pieces.get("weight"), self.pieces.get("scale")
        if weight is None:
            return "weight"
        if weight.dtype in FLOATS:
            return None
        if scale is None:
            return "scale"
        needs_global = scale.dtype == "float8_e4m3fn" and "global_scale" not in self.pieces
        return "global scale" if needs_global else None

    def source(self, cache: Cache) -> SourceMatrix:
        """The matrix, read, padded and checked.

        Raises:
            ValueError: values or scales that are not finite, a scale that does not tile the weight.
            TypeError: a scale's dtype that the weight's does not go with, or a scale of floats.
        """
        weight, scale = self.pieces["weight"], self.pieces.get("scale")
        values = _padded(weight.read(cache), self._padded_shape(weight), 0)
        scales = None if scale is None else self._padded_scale(scale.read(cache))
        name = "" if scale is None else scale.where
        return SourceMatrix(weight.where, values, scales, self._global_scale(cache), name)

    @property
    def is_nvfp4(self) -> bool:
        """Whether the matrix is stored as NVFP4."""
        return "scale" in self.pieces and self.pieces["scale"].dtype == "float8_e4m3fn"

    def _padded_shape(self, weight: Piece) -> tuple[int, int]:
        rows, columns = self.padded
        return rows, columns // 2 if weight.dtype in PACKED else columns

    def _padded_scale(self, scale: np.ndarray) -> np.ndarray:
        grid = scale.reshape(-1, 1) if scale.ndim == 1 and scale.size > 1 else scale
        grid = grid.reshape(1, 1) if grid.ndim < 2 else grid
        if self.stored == self.padded:
            return grid
        shape = [
            wanted // granularity(size, entries, wanted)
            for size, entries, wanted in zip(self.stored, grid.shape, self.padded, strict=True)
        ]
        exponents = grid.dtype in (np.uint8, ml_dtypes.float8_e8m0fnu)
        return _padded(grid, (shape[0], shape[1]), _E8M0_ONE if exponents else 1)

    def _global_scale(self, cache: Cache) -> np.ndarray | None:
        piece = self.pieces.get("global_scale")
        return None if piece is None else scalar(piece, cache)


def _oriented(scale: Piece, weight: Piece, stored: tuple[int, int]) -> Piece:
    """The scale as a grid over [N, K]: stored as the weight is, which may be [K, N].

    Raises:
        ValueError: it is no such grid.
    """
    across = replace(scale, transposed=True)
    if weight.transposed and _fits_grid(across.shape, stored):
        return across
    if not _fits_grid(scale.shape, stored):
        expected = f"a grid of scales over {list(stored)} in blocks of 1, 16, 32, 64 or 128"
        got = f"shape {list(scale.shape)}"
        raise ValueError(_checks.message(scale.where, expected, got, _hint(scale)))
    return scale


def scalar(piece: Piece, cache: Cache) -> np.ndarray:
    """A scale of one number, float32 []: the reciprocal of a divisor.

    Raises:
        ValueError: not finite, negative, a divisor of 0, or a scale that is denormal, which CPUs
            and GPUs multiply by differently.
    """
    value = piece.read(cache).reshape(()).astype(np.float32)
    divisor = piece.role.divisor
    with np.errstate(divide="ignore", over="ignore"):
        scale = np.float32(1) / value if divisor else value
    is_zero = scale == 0 and not divisor
    if not (is_zero or np.finfo(np.float32).tiny <= scale < np.inf):
        expected = "a finite number >= 0, not denormal"
        if divisor:
            expected = "a finite number > 0 with a finite, normal reciprocal"
        raise ValueError(_checks.message(piece.where, expected, value.item()))
    return scale


def bias(piece: Piece, size: int, cache: Cache) -> np.ndarray:
    """A bias as float32 [size], filled up with zeros.

    Raises:
        ValueError: a value that is not finite.
    """
    values = piece.read(cache).astype(np.float32)
    if not np.isfinite(values).all():
        raise ValueError(_checks.message(piece.where, "finite numbers", "NaN or infinity"))
    return np.pad(values, (0, size - values.size))


def agreed_global_scale(expert: int, gate: SourceMatrix, up: SourceMatrix) -> np.ndarray:
    """The one global scale of an expert's gate and up, both NVFP4.

    A scale of 0, which only weights that are all 0 have, agrees with any.

    Raises:
        ValueError: they differ by more than `GLOBAL_SCALE_TOLERANCE`.
    """
    scales = [np.asarray(source.global_scale, np.float32) for source in (gate, up)]
    low, high = min(scales), max(scales)
    if low > 0 and high - low > GLOBAL_SCALE_TOLERANCE * high:
        got = f"{scales[0]:.6g} for {gate.name} and {scales[1]:.6g} for {up.name}"
        expected = f"one for gate and up, to a relative {GLOBAL_SCALE_TOLERANCE}"
        raise ValueError(_checks.message(f"global scales of expert {expert}", expected, got))
    return scales[0] if low > 0 else high


def gate_and_up(
    expert: int, projections: tuple[Projection, Projection], form: WeightFormat, cache: Cache
) -> list[QuantizedMatrix]:
    """An expert's gate and up in a format, one matrix each or, where they must be quantised under
    one global scale, one for both.

    Args:
        expert: for messages.
        projections: of gate and of up.
        form: the target.
        cache: of slices.
    """
    sources = [projection.source(cache) for projection in projections]
    if all(projection.is_nvfp4 for projection in projections):
        shared = agreed_global_scale(expert, *sources)
        return [requantize(each, form)._replace(global_scale=shared) for each in sources]
    if form.weight.has_global_scale:
        return [requantize(stacked(*sources), form)]
    return [requantize(each, form) for each in sources]


def stacked(gate: SourceMatrix, up: SourceMatrix) -> SourceMatrix:
    """Gate over up as one matrix, to be quantised under one global scale.

    Raises:
        TypeError: they are stored in different dtypes.
    """
    for other, this in ((gate.weight, up.weight), (gate.scale, up.scale)):
        if getattr(other, "dtype", None) != getattr(this, "dtype", None):
            raise TypeError(
                _checks.message(
                    up.name,
                    f"the dtype of its gate, {getattr(other, 'dtype', 'no scale')}",
                    getattr(this, "dtype", "no scale"),
                )
            )
    if gate.scale is None or up.scale is None:
        return SourceMatrix(gate.name, np.concatenate([gate.weight, up.weight]))
    return SourceMatrix(
        gate.name,
        np.concatenate([gate.weight, up.weight]),
        np.concatenate([gate.scale, up.scale]),
    )


def granularity(size: int, entries: int, padded: int) -> int:
    """Rows (or columns) under one of `entries` scales of an axis of `size`.

    The last scale may cover fewer: 2880 rows have 23 scales of 128.

    Raises:
        ValueError: no power of two divides the axis so, and it is not one scale for all.
    """
    if entries == 1:
        return padded
    block = _block(size, entries)
    if block is not None:
        return block
    expected = f"a scale for each 1, 2, 4, ..., or 128 of {size} values"
    raise ValueError(_checks.message("scale", expected, f"{entries} scales"))


def _block(size: int, entries: int) -> int | None:
    """The power of two up to 128 of which `entries` cover `size`, the last perhaps less."""
    return next((b for b in _BLOCKS if -(-size // b) == entries), None)


def _padded(array: np.ndarray, shape: tuple[int, int], fill: int) -> np.ndarray:
    if array.shape == shape:
        return array
    octets = array.view(np.uint8) if array.dtype.itemsize == 1 and fill == _E8M0_ONE else array
    whole = np.full(shape, fill, octets.dtype)
    whole[: array.shape[0], : array.shape[1]] = octets
    return whole.view(array.dtype)


_DTYPES: Mapping[Kind, tuple[str, ...]] = {
    "weight": (*UNPACKED, *PACKED),
    "scale": ("float32", "bfloat16", "uint8", "float8_e8m0fnu", "float8_e4m3fn"),
    "global_scale": ("float32",),
    "input_scale": ("float32",),
    "bias": FLOATS,
}


def _check_piece(piece: Piece, stored: tuple[int, int]) -> None:
    kind, rows, columns = piece.role.kind, *stored
    if kind == "weight" and piece.dtype == "int32":
        expected = "weights in BF16, FP16, FP8, MXFP8, MXFP4 or NVFP4"
        raise NotImplementedError(_checks.message(piece.where, expected, "packed int4 (int32)"))
    _checks.dtype(piece.where, piece, _DTYPES[kind])
    if kind == "weight":
        stored_columns = columns // 2 if piece.dtype in PACKED else columns
        _checks.shape(piece.where, piece, (rows, stored_columns), _hint(piece))
    elif kind == "bias":
        _checks.shape(piece.where, piece, (rows,), _hint(piece))
    elif kind != "scale" and math.prod(piece.shape) != 1:
        raise ValueError(_checks.message(piece.where, "one number", f"shape {list(piece.shape)}"))


def _hint(piece: Piece) -> str:
    """The whole tensor's shape, where one expert's part of it has another."""
    is_whole = piece.index is None and piece.half is None
    return "" if is_whole else f"one expert's part of {list(piece.tensor.shape)}"


def _fits_grid(shape: tuple[int, ...], stored: tuple[int, int]) -> bool:
    if len(shape) < 2:
        shape = (*shape, 1) if math.prod(shape) > 1 else (1, 1)
    return len(shape) == 2 and all(
        entries == 1 or _block(size, entries) in _GRID_BLOCKS
        for size, entries in zip(stored, shape, strict=True)
    )
