"""Tokens as each format dispatches them: quantised values and their scales."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float32

from jax_megamoe.formats import ActivationFormat, Recipe
from jax_megamoe.numerics import quantization


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedTokens:
    """Tokens as one format dispatches them.

    Attributes:
        values: [T, H], float8_e4m3fn (MXFP8, fp8_block) or bfloat16; NVFP4: uint8 [T, H / 2].
        scale: uint8 exponents [T, H / 32] (MXFP8), float8_e4m3fn [T, H / 16] (NVFP4), float32
            [T, H / 128] (fp8_block), None (BF16).
        token_scale: float32 [T], NVFP4's scale of the whole token; None elsewhere.
    """

    values: Array
    scale: Array | None = None
    token_scale: Float32[Array, " tokens"] | None = None

    def decoded(self) -> Array:
        """The values the first matmul sees, [T, H]: block scales in, the token scale left out.

        bfloat16 where that is exact (MXFP8, NVFP4, BF16), float32 for fp8_block.
        """
        if self.scale is None:
            return self.values
        if self.token_scale is not None:
            one = jnp.float32(1)
            return quantization.dequantize_nvfp4(self.values, self.scale, one).astype(jnp.bfloat16)
        if self.scale.dtype == jnp.uint8:
            return quantization.dequantize_mxfp8(self.values, self.scale).astype(jnp.bfloat16)
        return quantization.dequantize_tokens_fp8_block(self.values, self.scale)


_SCALE_DTYPES = {
    "ue8m0": jnp.uint8,
    "e4m3": jnp.float8_e4m3fn,
    "float32": jnp.float32,
    "none": None,
}


def restore_tokens(bits: QuantizedTokens, activations: ActivationFormat) -> QuantizedTokens:
    """Tokens from their bits as unsigned integers (a token scale's: uint32)."""

    def cast(array: Array | None, dtype: Any) -> Array | None:
        return None if array is None else lax.bitcast_convert_type(array, dtype)

    return QuantizedTokens(
        lax.bitcast_convert_type(bits.values, jnp.dtype(activations.storage)),
        cast(bits.scale, _SCALE_DTYPES[activations.scale]),
        cast(bits.token_scale, jnp.float32),
    )


def quantize_tokens(x: BFloat16[Array, "tokens hidden"], recipe: Recipe) -> QuantizedTokens:
    """Tokens as kernels of a recipe dispatch them.

    Args:
        x: bfloat16 [T, H].
        recipe: whose activation format and rounding they get.
    """
    match recipe.activations.name:
        case "bf16":
            return QuantizedTokens(x)
        case "mxfp8":
            return QuantizedTokens(*quantization.quantize_tokens_mxfp8(x))
        case "nvfp4":
            floors = recipe.rounding.floors_scales
            return QuantizedTokens(*quantization.quantize_tokens_nvfp4(x, floors_scales=floors))
        case _:
            return QuantizedTokens(*quantization.quantize_tokens_fp8_block(x))
