"""What enters the symmetric buffer: quantised tokens, their scales and the routing."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Bool, Float32, Int32

from jax_megamoe.config import MoEConfig
from jax_megamoe.numerics import quantization
from jax_megamoe.routing.replicas import ReplicaMap, initial_map, to_physical


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StagedTokens:
    """One rank's input as the kernel reads it.

    Attributes:
        tokens: what is dispatched to the routed experts.
        topk_ids: int32 [T, K], physical expert slots, -1 where unrouted.
        topk_weights: float32 [T, K], 0 where unrouted.
        shared_tokens: input of a fused shared expert; None without one.
    """

    tokens: QuantizedTokens
    topk_ids: Int32[Array, "tokens top_k"]
    topk_weights: Float32[Array, "tokens top_k"]
    shared_tokens: QuantizedTokens | None = None


_TOKEN_DTYPES = {
    "mxfp8": (jnp.float8_e4m3fn, jnp.uint8),
    "nvfp4": (jnp.uint8, jnp.float8_e4m3fn),
    "bf16": (jnp.bfloat16, None),
    "fp8_block": (jnp.float8_e4m3fn, jnp.float32),
}
"""dtypes of the values and their block scales, by activation format."""


def restore_tokens(bits: QuantizedTokens, activation_format: str) -> QuantizedTokens:
    """Tokens from their bits as unsigned integers (a token scale's: uint32)."""
    values, scale = _TOKEN_DTYPES[activation_format]

    def cast(array: Array | None, dtype: Any) -> Array | None:
        return None if array is None else lax.bitcast_convert_type(array, dtype)

    return QuantizedTokens(
        lax.bitcast_convert_type(bits.values, values),
        cast(bits.scale, scale),
        cast(bits.token_scale, jnp.float32),
    )


def quantize_tokens(x: BFloat16[Array, "tokens hidden"], activation_format: str) -> QuantizedTokens:
    """Tokens in the form a format dispatches them.

    Args:
        x: bfloat16 [T, H].
        activation_format: ``"mxfp8"``, ``"nvfp4"``, ``"bf16"`` or ``"fp8_block"``.
    """
    if activation_format == "bf16":
        return QuantizedTokens(x)
    quantise = {
        "mxfp8": quantization.quantize_tokens_mxfp8,
        "nvfp4": quantization.quantize_tokens_nvfp4,
        "fp8_block": quantization.quantize_tokens_fp8_block,
    }[activation_format]
    return QuantizedTokens(*quantise(x))


def logical_ids(
    topk_ids: Int32[Array, "tokens top_k"],
    *,
    config: MoEConfig,
    padding_mask: Bool[Array, " tokens"] | None = None,
) -> Int32[Array, "tokens top_k"]:
    """The ids with padding and what is out of range set to -1."""
    known = (topk_ids >= 0) & (topk_ids < config.logical_experts)
    if padding_mask is not None:
        known &= ~padding_mask[:, None]
    return jnp.where(known, topk_ids, -1)


def physical_ids(
    ids: Int32[Array, "tokens top_k"], *, config: MoEConfig, eplb: ReplicaMap | None = None
) -> Int32[Array, "tokens top_k"]:
    """Physical slots of one rank's `logical_ids`; eplb None: the config's initial map."""
    if eplb is not None:
        return to_physical(ids, eplb, config.num_experts)
    if config.logical_experts != config.num_experts:
        return to_physical(ids, initial_map(config), config.num_experts)
    return ids


def route(
    topk_ids: Int32[Array, "tokens top_k"],
    topk_weights: Float32[Array, "tokens top_k"],
    *,
    config: MoEConfig,
    padding_mask: Bool[Array, " tokens"] | None = None,
    eplb: ReplicaMap | None = None,
) -> tuple[Int32[Array, "tokens top_k"], Float32[Array, "tokens top_k"]]:
    """Physical slots and weights: padding and what is out of range become -1 with weight 0."""
    ids = logical_ids(topk_ids, config=config, padding_mask=padding_mask)
    slots = physical_ids(ids, config=config, eplb=eplb)
    return slots, jnp.where(slots >= 0, topk_weights, jnp.float32(0))


def stage(
    x: BFloat16[Array, "tokens hidden"],
    topk_ids: Int32[Array, "tokens top_k"],
    topk_weights: Float32[Array, "tokens top_k"],
    *,
    config: MoEConfig,
    padding_mask: Bool[Array, " tokens"] | None = None,
    eplb: ReplicaMap | None = None,
    fused_shared: bool = False,
) -> StagedTokens:
    """What would enter the symmetric buffer for one rank's tokens.

    Args:
        x: bfloat16 [T, H].
        topk_ids: int32 [T, K], logical expert ids, -1 for unrouted.
        topk_weights: float32 [T, K].
        config: the layer.
        padding_mask: bool [T], True for rows that are no tokens.
        eplb: where replicas are; None: the config's initial map.
        fused_shared: the weights hold a fused shared expert.

    Returns:
        Tokens quantised by the rules of the format (behaviour.md section 4), physical ids and
        weights, the weight 0 wherever the id is -1.
    """
    ids, weights = route(
        topk_ids, topk_weights, config=config, padding_mask=padding_mask, eplb=eplb
    )
    activation_format = config.weight_format.activation_format
    tokens = quantize_tokens(x, activation_format)
    shared_tokens = None
    if fused_shared and config.shared_format is not None:
        same = config.shared_format == activation_format
        shared_tokens = tokens if same else quantize_tokens(x, config.shared_format)
    return StagedTokens(tokens, ids, weights, shared_tokens)
