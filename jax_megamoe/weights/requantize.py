"""One projection of a checkpoint, in whatever precision it is stored, as a target format's arrays.

Elements that the target shares, under scales that it can hold, are kept as stored. Everything else
is dequantised to float32 by value and quantised anew, one jitted call. What a scale is follows from
its dtype: uint8 and float8_e8m0fnu are exponents, float8_e4m3fn, bfloat16 and float32 are numbers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_megamoe import _checks
from jax_megamoe.formats import WeightFormat, as_weight_format
from jax_megamoe.numerics import quantization
from jax_megamoe.numerics.elements import (
    check_tiles,
    expand_scales,
    float32_to_ue8m0,
    to_float32,
    ue8m0_to_float32,
)

_FLOATS = ("bfloat16", "float16", "float32")
_E2M1 = ("uint8", "int8")
_UE8M0 = ("uint8", "float8_e8m0fnu")
_E4M3 = "float8_e4m3fn"
_EXPONENT_BITS = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}
"""All set in infinity and NaN."""
_CACHED = 1 << 20
"""Bytes."""
_TWO_TO_MINUS_127 = 1 << 22
"""The bits of the one power of two that is subnormal in float32 and an exponent of UE8M0."""


class QuantizedMatrix(NamedTuple):
    """A matrix in a `WeightFormat`, rows in checkpoint order.

    Attributes:
        weight: [..., N, K / values_per_element] of the format's storage dtype.
        scale: UE8M0 exponents, uint8 [..., N, K / 32]; float8_e4m3fn [..., N, K / 16] (NVFP4);
            float32 [..., N / 128, K / 128] (fp8_block); None (bf16).
        global_scale: float32 [...] (NVFP4), else None.
    """

    weight: jax.Array | np.ndarray
    scale: jax.Array | np.ndarray | None = None
    global_scale: jax.Array | np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class SourceMatrix:
    """A projection as a checkpoint stores it; checked when made, on concrete arrays.

    Attributes:
        name: the tensor, for messages.
        weight: [..., N, K] bfloat16, float16, float32 or float8_e4m3fn; [..., N, K / 2] uint8 or
            int8, E2M1 pairs.
        scale: a grid that tiles [N, K]: uint8 or float8_e8m0fnu (2^(b - 127)), bfloat16 or float32
            for E4M3 and E2M1 weights, float8_e4m3fn under a global scale for E2M1; None for floats.
        global_scale: float32 [...], a multiplier; only with float8_e4m3fn scales.
        scale_name: the scale's tensor, for messages; empty: the weight's name and "scale".

    Raises:
        TypeError: a dtype that is none of these (float8_e5m2, a scale for float weights, ...).
        ValueError: a scale missing or not tiling the weight; a value or scale that is not finite; a
            negative E4M3 or global scale; a global scale of 0 for weights that are not all 0.
    """

    name: str
    weight: jax.Array | np.ndarray
    scale: jax.Array | np.ndarray | None = None
    global_scale: jax.Array | np.ndarray | None = None
    scale_name: str = ""

    def __post_init__(self) -> None:
        if not self.scale_name:
            object.__setattr__(self, "scale_name", f"{self.name} scale")
        _checks.dtype(self.name, self.weight, [*_FLOATS, _E4M3, *_E2M1])
        self._check_scale_dtype()
        if self.scale is not None:
            check_tiles(self.scale_name, self.scale.shape, self.shape)
            _check_values(self.scale_name, self.scale, is_scale=True)
        if self._dtype not in _E2M1:
            _check_values(self.name, self.weight, is_scale=False)
        if self.global_scale is not None:
            self._check_global_scale(self.global_scale)

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., N, K], in values."""
        *leading, stored = self.weight.shape
        return (*leading, stored * (2 if self._dtype in _E2M1 else 1))

    @cached_property
    def _dtype(self) -> str:
        return str(self.weight.dtype)

    def _check_scale_dtype(self) -> None:
        if self._dtype in _FLOATS:
            if self.scale is not None or self.global_scale is not None:
                message = _checks.message(self.scale_name, f"none for {self._dtype}", "one")
                raise TypeError(message)
            return
        if self.scale is None:
            message = _checks.message(self.scale_name, f"one for {self._dtype}", "none")
            raise ValueError(message)
        dtypes = [*_UE8M0, "bfloat16", "float32"]
        nvfp4 = [_E4M3] if self._dtype in _E2M1 else []
        _checks.dtype(self.scale_name, self.scale, dtypes + nvfp4)
        needs_global = str(self.scale.dtype) == _E4M3
        if needs_global != (self.global_scale is not None):
            expected = "one with E4M3 scales" if needs_global else "none without E4M3 scales"
            got = "none" if needs_global else f"one with {self.scale.dtype} scales"
            raise ValueError(_checks.message(f"{self.name} global scale", expected, got))

    def _check_global_scale(self, scale: jax.Array | np.ndarray) -> None:
        name = f"{self.name} global scale"
        _checks.dtype(name, scale, ["float32"])
        _checks.shape(name, scale, self.weight.shape[:-2])
        values = np.asarray(scale)
        if not (np.isfinite(values) & (values >= 0)).all():
            raise ValueError(_checks.message(name, "finite numbers >= 0", values.tolist()))
        if (values > 0).all():
            return
        used = np.asarray((self.weight & 0x77).any(axis=(-2, -1)))
        if (used & (values == 0)).any():
            expected = "a number > 0 for weights that are not all 0"
            raise ValueError(_checks.message(name, expected, values.tolist()))


def requantize(source: SourceMatrix, target: str | WeightFormat) -> QuantizedMatrix:
    """The projection in the format `target`.

    Kept as stored: BF16; E4M3 and E2M1 under scales that are powers of two on a grid no finer than
    the MX format's; block-FP8 under a grid no finer than 128x128; NVFP4. Coarser scales are
    repeated. A float32 scale counts as the exponent that it equals, so that one scale stored in
    three dtypes gives the same bits.

    Raises:
        ValueError: an unknown target, sizes that its blocks do not divide, or FP4 weights under
            float32 scales that are not powers of two.
    """
    form = as_weight_format(target, "target")
    rows, columns = form.weight.block
    if rows:
        _checks.multiple(f"{source.name} rows", source.shape[-2], rows)
        _checks.multiple(f"{source.name} columns", source.shape[-1], columns)
    weight, scale = source.weight, _canonical_scale(source)
    if str(weight.dtype) in _E2M1:
        weight = weight.view(np.uint8)
        if scale is not None and scale.dtype == jnp.float32:
            expected = "powers of two for FP4 weights"
            raise ValueError(_checks.message(source.scale_name, expected, "other numbers"))
    if str(weight.dtype) == form.weight.storage:
        kept = _kept_scale(source.shape, scale, form)
        if kept is not None or scale is None:
            return QuantizedMatrix(weight, kept, source.global_scale)
    return _converted(weight, scale, source.global_scale, form=form)


def concatenated(first: QuantizedMatrix, second: QuantizedMatrix) -> QuantizedMatrix:
    """The rows of two matrices with one global scale, or none, as NumPy arrays."""
    weight, scale = (
        np.concatenate([np.asarray(one), np.asarray(other)])
        for one, other in zip(first[:2], second[:2], strict=True)
    )
    return QuantizedMatrix(weight, scale, first.global_scale)


def quantize_matrix(w: jax.Array, form: WeightFormat) -> QuantizedMatrix:
    """A float matrix [..., N, K] in the format `form`; jit-able.

    Raises:
        TypeError: `w` is not bfloat16, float16 or float32.
        ValueError: N or K is not a multiple of the format's block.
    """
    if form.weight.scale == "none":
        return QuantizedMatrix(to_float32("w", w).astype(jnp.bfloat16))
    if form.weight.scale == "float32":
        return QuantizedMatrix(*quantization.quantize_fp8_block(w))
    if form.weight.has_global_scale:
        global_scale = quantization.nvfp4_global_scale(w)
        return QuantizedMatrix(*quantization.quantize_nvfp4(w, global_scale), global_scale)
    if form.weight.values_per_element == 2:
        return QuantizedMatrix(*quantization.quantize_mxfp4(w))
    return QuantizedMatrix(*quantization.quantize_mxfp8(w))


@partial(jax.jit, static_argnames="form")
def _converted(
    weight: jax.Array,
    scale: jax.Array | None,
    global_scale: jax.Array | None,
    *,
    form: WeightFormat,
) -> QuantizedMatrix:
    if scale is None:
        return quantize_matrix(weight, form)
    if global_scale is not None:
        values = quantization.dequantize_nvfp4(weight, scale, global_scale)
    elif weight.dtype == jnp.uint8:
        values = quantization.dequantize_mxfp4(weight, scale)
    elif scale.dtype == jnp.uint8:
        values = quantization.dequantize_mxfp8(weight, scale)
    else:
        values = quantization.dequantize_fp8_block(weight, scale)
    return quantize_matrix(values, form)


_exponents = jax.jit(float32_to_ue8m0)


def _canonical_scale(source: SourceMatrix) -> jax.Array | np.ndarray | None:
    """The scale as uint8 exponents where it is powers of two, else float32 or E4M3 numbers."""
    scale = source.scale
    if scale is None or str(scale.dtype) == _E4M3:
        return scale
    if str(scale.dtype) in _UE8M0:
        return scale.view(np.uint8)
    if isinstance(scale, np.ndarray):
        numbers = scale.astype(np.float32)
        bits = numbers.view(np.int32)
        if ((bits & 0x7FFFFF != 0) & (bits != _TWO_TO_MINUS_127)).any():
            return numbers
    numbers = to_float32(source.scale_name, scale)
    exponents = _exponents(numbers)
    return numbers if bool((exponents == 255).any()) else exponents


def _kept_scale(
    shape: tuple[int, ...], scale: jax.Array | np.ndarray | None, form: WeightFormat
) -> jax.Array | np.ndarray | None:
    """The scale of elements kept as stored, on the format's grid; None if it cannot hold it."""
    kind = form.weight.scale
    held = {"ue8m0": ["uint8"], "e4m3": [_E4M3], "float32": ["uint8", "float32"], "none": []}[kind]
    if scale is None or str(scale.dtype) not in held:
        return None
    rows, columns = form.weight.block
    grid = (*shape[:-2], shape[-2] // rows, shape[-1] // columns)
    if any(want % have for have, want in zip(scale.shape, grid, strict=True)):
        return None
    known: Any = scale  # either kind of array
    if kind == "float32" and known.dtype == jnp.uint8:
        known = ue8m0_to_float32(known)
    return expand_scales("scale", known, grid)


def _check_values(name: str, array: jax.Array | np.ndarray, *, is_scale: bool) -> None:
    """Raises ValueError for NaN, infinity, and a sign on an E4M3 scale, which UE4M3 has not.

    By the bits, as integers: NumPy looks at those ten times as fast as at 16-bit floats.
    """
    dtype = str(array.dtype)
    if dtype == _E4M3:
        mask, limit = (0xFF, 0x7E) if is_scale else (0x7F, 0x7E)
        expected = "finite E4M3 numbers" + (" without a sign" if is_scale else "")
    elif dtype in _UE8M0:
        mask, limit = 0xFF, 0xFE
        expected = "UE8M0 exponents below 255, which is NaN"
    else:
        mask, expected = _EXPONENT_BITS[dtype], "finite numbers"
        limit = mask - 1
    integer = np.dtype(f"uint{8 * array.dtype.itemsize}")
    largest = integer.type(limit)
    bad = 0
    for rows in _cached_rows(array):
        bits = rows.view(integer) & integer.type(mask)
        if bits.size and bits.max() > largest:
            bad += int(np.count_nonzero(bits > largest))
    if bad:
        raise ValueError(_checks.message(name, expected, f"{bad} others among {array.size}"))


def _cached_rows(array: jax.Array | np.ndarray) -> Iterator[jax.Array | np.ndarray]:
    """The array in pieces small enough for a core's cache; a JAX array whole."""
    if isinstance(array, jax.Array) or not array.size:
        yield array
        return
    step = max(1, _CACHED * len(array) // array.nbytes)
    for start in range(0, len(array), step):
        yield array[start : start + step]
