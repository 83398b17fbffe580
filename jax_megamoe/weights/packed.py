"""Layouts with codes and scales of a 4-bit matrix in one array, and what a kernel makes of them.

Each matrix [..., N, K] of an expert has a float32 factor beside it, which loading chooses so that
the kernel decodes every weight (`flashinfer_factors`).
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import BFloat16, Float32

from jax_megamoe.formats import FLASHINFER_MXFP4, FLASHINFER_NVFP4
from jax_megamoe.numerics import quantization
from jax_megamoe.weights import flashinfer_layout as layouts
from jax_megamoe.weights.flashinfer_factors import Fitted, fit_mxfp4, fit_nvfp4

Array = Any
"""A NumPy or JAX array: in the same call all are of one kind."""

_log = logging.getLogger("jax_megamoe")

_E4M3_STEP = 2.0**-9
_E4M3_NORMAL = 2.0**-6


@dataclass(frozen=True)
class PackedLayout:
    """One layout.

    Attributes:
        weight_format: name of the format that it holds.
        shape: of the array for a matrix of N rows and K columns.
        fit: codes and scale bytes so that the kernel decodes them, and their factor.
        pack: codes uint8 [..., N, K / 2] and scale bytes into the array.
        unpack: its inverse.
        decode: bfloat16 [..., N, K] of codes and scale bytes, as the kernel has them.
    """

    weight_format: str
    shape: Callable[[int, int], tuple[int, ...]]
    fit: Callable[[Array, Array], Fitted]
    pack: Callable[[Array, Array], Array]
    unpack: Callable[[Array], tuple[Array, Array]]
    decode: Callable[[jax.Array, jax.Array], BFloat16[jax.Array, "*e n k"]]

    def packed(
        self, codes: Array, scales: Array, *, w13: bool, global_scale: Array | None = None
    ) -> tuple[Array, Array, Array]:
        """A matrix in checkpoint order for the kernel: its array, its factor, and how many weights
        became other numbers.

        Args:
            codes: uint8 [..., N, K / 2].
            scales: bytes [..., N, K / block], in any 8-bit type.
            w13: whether rows are gate's, then up's.
            global_scale: float32 [...], NVFP4's.
        """
        octets = scales.view("uint8")
        fitted = self.fit(codes, octets)
        moved = fitted.codes, fitted.scales
        if w13:
            moved = tuple(layouts.interleave_rows(each) for each in moved)
        factor = fitted.factor if global_scale is None else fitted.factor * global_scale
        return self.pack(*moved), factor, fitted.rounded

    def values(self, stored: jax.Array) -> BFloat16[jax.Array, "*e n k"]:
        """What the kernel decodes, rows in stored order, the factor left out."""
        return self.decode(*self.unpack(stored))


def _nvfp4_values(codes: jax.Array, scales: jax.Array) -> BFloat16[jax.Array, "*e n k"]:
    """Products of codes and scales rounded to E4M3."""
    numbers = lax.bitcast_convert_type(scales, jnp.float8_e4m3fn)
    exact = quantization.dequantize_nvfp4(codes, numbers, jnp.float32(1))
    return _rounded_to_e4m3(exact).astype(jnp.bfloat16)


def _rounded_to_e4m3(x: Float32[jax.Array, "*shape"]) -> Float32[jax.Array, "*shape"]:
    """The nearest E4M3 number, of magnitudes up to 448; without casts, which XLA may undo."""
    normal = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=3)
    small = jnp.round(x / _E4M3_STEP) * _E4M3_STEP
    return jnp.where(jnp.abs(x) < _E4M3_NORMAL, small, normal)


def _mxfp4_values(codes: jax.Array, scales: jax.Array) -> BFloat16[jax.Array, "*e n k"]:
    """Codes times scales: `fit_mxfp4` leaves none that the kernel has not."""
    return quantization.dequantize_mxfp4(codes, scales).astype(jnp.bfloat16)


def _tile_shape(rows: int, columns: int) -> tuple[int, ...]:
    return rows // layouts.TILE, columns // layouts.TILE, layouts.TILE_BYTES


def _row_shape(rows: int, columns: int) -> tuple[int, ...]:
    return rows, columns // layouts.TILE * layouts.ROW_BYTES


PACKED_LAYOUTS: Mapping[str, PackedLayout] = MappingProxyType(
    {
        FLASHINFER_MXFP4: PackedLayout(
            "mxfp4",
            _tile_shape,
            fit_mxfp4,
            layouts.mxfp4_tiles,
            layouts.mxfp4_from_tiles,
            _mxfp4_values,
        ),
        FLASHINFER_NVFP4: PackedLayout(
            "nvfp4",
            _row_shape,
            fit_nvfp4,
            layouts.nvfp4_rows,
            layouts.nvfp4_from_rows,
            _nvfp4_values,
        ),
    }
)
"""By the tag that parameters carry."""


def log_rounded(what: str, rounded: int) -> None:
    """Says how many weights became other numbers in a packed layout, if any did."""
    if rounded:
        _log.warning(
            "%s: %d weights are rounded for FlashInfer's kernel: its E4M3 does not hold them "
            "(MXFP4: by at most 2^-15 of the expert's largest weight; NVFP4: scales that are not "
            "powers of two, by up to 4.8 %% of a weight)",
            what,
            rounded,
        )
