"""The einsum oracle: every expert applied to every token, rounding where the kernel rounds."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Bool, Float32, Int32

from jax_megamoe import expert, quantization
from jax_megamoe.config import MoEConfig
from jax_megamoe.eplb import ReplicaMap
from jax_megamoe.formats import WEIGHT_FORMATS, WeightFormat
from jax_megamoe.staging import QuantizedTokens, StagedTokens, route, stage
from jax_megamoe.weights.experts import dequantize_biases, dequantize_experts, dequantize_shared
from jax_megamoe.weights.params import ExpertWeights, check_weights

_einsum = partial(
    jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
)


@partial(jax.jit, static_argnames=("config", "exact"))
def einsum_moe(
    x: BFloat16[Array, "tokens hidden"],
    topk_ids: Int32[Array, "tokens top_k"],
    topk_weights: Float32[Array, "tokens top_k"],
    weights: ExpertWeights,
    *,
    config: MoEConfig,
    exact: bool = False,
    padding_mask: Bool[Array, " tokens"] | None = None,
    eplb: ReplicaMap | None = None,
) -> Array:
    """The layer as plain einsums on one device, to compare with.

    Costs num_experts / top_k times the FLOPs of the layer and holds one expert's hidden values of
    all tokens: for tests and notebooks.

    Args:
        x: bfloat16 [T, H].
        topk_ids: int32 [T, K], logical expert ids, -1 for unrouted.
        topk_weights: float32 [T, K].
        weights: all experts.
        config: the layer.
        exact: float32 throughout, no quantisation of tokens or hidden values (the weights stay what
            they are): the truth to measure errors against.
        padding_mask: bool [T], True for rows that are no tokens; their output is 0.
        eplb: where replicas are.

    Returns:
        bfloat16 [T, H]; float32 if exact.

    Raises:
        ValueError, TypeError: `weights` are not the config's.
    """
    check_weights(config, weights)
    if exact:
        ids, factors = route(
            topk_ids, topk_weights, config=config, padding_mask=padding_mask, eplb=eplb
        )
        tokens = QuantizedTokens(x.astype(jnp.float32))
        staged = StagedTokens(tokens, ids, factors, tokens)
    else:
        fused = weights.shared is not None
        staged = stage(
            x,
            topk_ids,
            topk_weights,
            config=config,
            padding_mask=padding_mask,
            eplb=eplb,
            fused_shared=fused,
        )
    slots = expert_outputs(staged, weights, config, exact=exact)
    total = finish(slots, staged, weights, config, exact=exact)
    if padding_mask is not None:
        total = jnp.where(padding_mask[:, None], 0, total)
    return total if exact else total.astype(jnp.bfloat16)


def expert_outputs(
    staged: StagedTokens,
    weights: ExpertWeights,
    config: MoEConfig,
    *,
    first_expert: int | Array = 0,
    activation_scale: Array | None = None,
    exact: bool = False,
) -> Float32[Array, "tokens top_k hidden"]:
    """Each (token, slot)'s expert output, zero where `weights` do not hold the slot's expert.

    Args:
        staged: the tokens.
        weights: experts first_expert, first_expert + 1, ...
        config: the layer.
        first_expert: physical id of the first expert in `weights`.
        activation_scale: NVFP4's scale of the second input; None: from `weights`.
        exact: float32 throughout.
    """
    form = config.weight_format
    if activation_scale is None and form.weight.has_global_scale:
        activation_scale = expert.input_scale(weights.w2_input_scale)
    x = staged.tokens.decoded().astype(jnp.float32)
    row_scale = staged.tokens.token_scale
    gate, up, down = dequantize_experts(config, weights)
    local = dict(gate=gate, up=up, down=down) | dequantize_biases(config, weights)
    local["id"] = first_expert + jnp.arange(gate.shape[0], dtype=jnp.int32)

    def add_expert(slots: Array, e: dict[str, Array]) -> tuple[Array, None]:
        y = _expert(x, row_scale, staged.topk_weights, e, config, form, activation_scale, exact)
        return jnp.where((staged.topk_ids == e["id"])[..., None], y, slots), None

    shape = (*staged.topk_ids.shape, config.hidden_size)
    empty = jnp.zeros(shape, jnp.float32) + expert.varying_zero(x, gate)
    return lax.scan(add_expert, empty, local)[0]


def finish(
    slots: Float32[Array, "tokens top_k hidden"],
    staged: StagedTokens,
    weights: ExpertWeights,
    config: MoEConfig,
    *,
    exact: bool = False,
) -> Float32[Array, "tokens hidden"]:
    """The combine, with the fused shared expert if the weights hold one."""
    weighs = exact or config.weight_format.weighs_in_combine
    shared = None
    if weights.shared is not None and staged.shared_tokens is not None:
        gate, up, down = dequantize_shared(config, weights)
        assert config.shared_format is not None
        form = WEIGHT_FORMATS[config.shared_format]
        x = staged.shared_tokens.decoded().astype(jnp.float32)
        ones = jnp.ones((x.shape[0], 1), jnp.float32)
        parts = dict(gate=gate, up=up, down=down)
        shared = _expert(x, None, ones, parts, config, form, None, exact)[:, 0]
    return expert.combine(slots, staged.topk_weights if weighs else None, shared)


def _expert(
    x: Array,
    row_scale: Array | None,
    topk_weights: Array,
    parts: dict[str, Any],
    config: MoEConfig,
    form: WeightFormat,
    activation_scale: Array | None,
    exact: bool,
) -> Float32[Array, "tokens top_k hidden"]:
    """One expert on all tokens, once for each slot's top-k weight."""
    gate = _einsum("th,ih->ti", x, parts["gate"])
    up = _einsum("th,ih->ti", x, parts["up"])
    if row_scale is not None:
        gate, up = gate * row_scale[:, None], up * row_scale[:, None]
    if "gate_bias" in parts:
        gate, up = gate + parts["gate_bias"], up + parts["up_bias"]
    if exact:
        act = expert.activate(gate, up, config.activation)[:, None]
    else:
        act = expert.rounded_activation(gate, up, config.activation, form)[:, None]
    factor = jnp.ones_like(topk_weights) if exact or form.weighs_in_combine else topk_weights
    act = act * factor[..., None]
    if not exact:
        act = expert.requantize(act, form, activation_scale).astype(jnp.float32)
        if activation_scale is not None:
            act = act * activation_scale
    y = _einsum("tki,hi->tkh", act, parts["down"])
    if "down_bias" in parts:
        y = y + factor[..., None] * parts["down_bias"]
    return y if exact else expert.round_bf16(y)
