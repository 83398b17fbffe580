"""The einsum oracle: every expert applied to every token, rounding where the kernel rounds."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, BFloat16, Bool, Float, Float32, Int32

from jax_megamoe.config import Activation, MoEConfig
from jax_megamoe.formats import RECIPES, Recipe
from jax_megamoe.mesh import Axis, Split, gathered, has_explicit_axes, reshard, split_of
from jax_megamoe.numerics import expert
from jax_megamoe.numerics.tokens import QuantizedTokens
from jax_megamoe.op.staged_tokens import StagedTokens, check_tokens, physical_routing, stage
from jax_megamoe.routing.replicas import ReplicaMap
from jax_megamoe.weights.experts import dequantize_biases, dequantize_experts, dequantize_shared
from jax_megamoe.weights.folded_biases import unfold_biases
from jax_megamoe.weights.params import ExpertWeights, check_weights, recipe_for

_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


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
    """The layer as plain einsums, to compare with: on one device, or on those of split experts.

    Costs num_experts / top_k times the FLOPs of the layer and holds one expert's hidden values of
    all tokens: for tests and notebooks. Of experts that are split over devices each device has its
    own; all tokens go to all of them. (In a trace that takes Explicit axes.)

    Differentiable, forwards and backwards, for `x` and `topk_weights` (exact: biases and scales
    too); a rounding counts as the identity, also where it saturates. `jax.vmap` works.

    Args:
        x: bfloat16 [T, H]; float32 too if exact.
        topk_ids: int32 [T, K], logical expert ids, -1 for unrouted; checked as by `mega_moe`.
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
        ValueError, TypeError: an argument that is not the config's, see `mega_moe`.
    """
    check_weights(config, weights)
    tokens = (x, topk_ids, topk_weights, padding_mask)
    dtypes = ("bfloat16", "float32") if exact else ("bfloat16",)
    check_tokens(*tokens, eplb, config=config, dtypes=dtypes)
    weights = unfold_biases(weights)
    split, rows = split_of(weights), split_of(tokens)
    y = _on_devices(tokens, weights, eplb, config=config, exact=exact, split=split)
    return y if rows is None else _as_rows(y, rows)


@partial(jax.jit, static_argnames="rows")
def _as_rows(y: Array, rows: Split) -> Array:
    """y, split as x was."""
    if has_explicit_axes(rows.mesh):
        return jax.reshard(y, rows.sharding)
    return lax.with_sharding_constraint(y, rows.sharding)


Rows = tuple[Array, Array, Array, Array | None]
"""x, topk_ids, topk_weights and padding_mask."""


@partial(jax.jit, static_argnames=("config", "exact", "split"))
def _on_devices(
    tokens: Rows,
    weights: ExpertWeights,
    eplb: ReplicaMap | None,
    *,
    config: MoEConfig,
    exact: bool,
    split: Split | None,
) -> Array:
    """`_einsum_moe` where the experts are; all tokens everywhere."""
    local = partial(_einsum_moe, config=config, exact=exact)
    tokens, eplb = gathered((tokens, eplb))
    if split is None:
        return local(tokens, gathered(weights), eplb)
    specs = (P(), weights.partition_specs(split.axes), P())
    arrays = reshard((tokens, weights, eplb), split.mesh, specs)
    return jax.shard_map(
        partial(local, axis=split.axes), mesh=split.mesh, in_specs=specs, out_specs=P()
    )(*arrays)


def _einsum_moe(
    tokens: Rows,
    weights: ExpertWeights,
    eplb: ReplicaMap | None,
    *,
    config: MoEConfig,
    exact: bool,
    axis: Axis | None = None,
) -> Array:
    x, topk_ids, topk_weights, padding_mask = tokens
    if padding_mask is not None:
        x = jnp.where(padding_mask[:, None], jnp.zeros_like(x), x)  # else NaN in the gradients
    if exact:
        ids, factors = physical_routing(
            topk_ids, topk_weights, config=config, padding_mask=padding_mask, eplb=eplb
        )
        unrounded = QuantizedTokens(x.astype(jnp.float32))
        staged = StagedTokens(unrounded, ids, factors, unrounded)
    else:
        fused = weights.shared is not None
        staged = stage(
            x,
            topk_ids,
            topk_weights,
            config=config,
            recipe=recipe_for(config, weights),
            padding_mask=padding_mask,
            eplb=eplb,
            fused_shared=fused,
        )
        staged = _straight_through(staged, x)
    total = moe(staged, weights, config=config, axis=axis, exact=exact, has_all_tokens=True)
    if padding_mask is not None:
        total = jnp.where(padding_mask[:, None], 0, total)
    return total if exact else total.astype(jnp.bfloat16)


def moe(
    staged: StagedTokens,
    weights: ExpertWeights,
    *,
    config: MoEConfig,
    axis: Axis | None = None,
    num_ranks: int = 1,
    exact: bool = False,
    has_all_tokens: bool = False,
) -> Float32[Array, "tokens hidden"]:
    """The layer on one rank's staged tokens: as `xla.moe`, but all ranks' tokens go everywhere.

    Args:
        staged: this rank's tokens.
        weights: this rank's experts.
        config: the layer.
        axis: the manual mesh axis (axes) of expert parallelism; None on one rank.
        num_ranks: its size.
        exact: float32 throughout.
        has_all_tokens: every rank is given the tokens of all, and gets all of y.
    """
    recipe = recipe_for(config, weights)
    scale = None
    if recipe.activations.has_global_scale and not exact:
        scale = expert.input_scale(weights.routed.w2_input_scale, axis)
    everyone, first_expert = staged, jnp.int32(0)
    if axis is not None and not has_all_tokens:
        gather = partial(lax.all_gather, axis_name=axis, axis=0, tiled=True)
        everyone = jax.tree.map(gather, staged)
    if axis is not None:
        first_expert = lax.axis_index(axis) * weights.routed.w13_weight.shape[0]
    slots = _slots(everyone, weights, config, first_expert, scale, exact)
    if axis is not None and has_all_tokens:
        slots = lax.psum(slots, axis)
    elif axis is not None:
        slots = lax.psum_scatter(slots, axis, scatter_dimension=0, tiled=True)
    shared = _shared(staged, weights, config, exact)
    weighs = exact or recipe.rounding.weighs_in_combine
    return expert.combine(slots, staged.topk_weights if weighs else None, shared)


def gradients(
    staged: StagedTokens,
    cotangent: Float32[Array, "tokens hidden"],
    weights: ExpertWeights,
    *,
    config: MoEConfig,
    axis: Axis | None = None,
    num_ranks: int = 1,
) -> tuple[Float32[Array, "tokens hidden"], Float32[Array, "tokens top_k"]]:
    """As `xla.gradients`, by JAX's own rules; holds the hidden values of all experts."""

    def total(x: Array, topk_weights: Array) -> Array:
        smooth = _straight_through(replace(staged, topk_weights=topk_weights), x)
        return moe(smooth, weights, config=config, axis=axis, num_ranks=num_ranks)

    # Straight through the cast, x's value does not matter.
    _, pull = jax.vjp(total, jnp.zeros_like(cotangent), staged.topk_weights)
    return pull(cotangent)


def _straight_through(staged: StagedTokens, x: Float[Array, "tokens hidden"]) -> StagedTokens:
    """The same with tokens decoded to float32, which have the derivative of `x`."""
    x = x.astype(jnp.float32)

    def decoded(tokens: QuantizedTokens, scale: Array | None) -> QuantizedTokens:
        values = tokens.decoded().astype(jnp.float32)
        exact = x if scale is None else x / scale[:, None]
        return QuantizedTokens(expert.straight_through(exact, values), None, scale)

    shared, scale = staged.shared_tokens, staged.tokens.token_scale
    if scale is not None:
        # The scale of a token that goes nowhere may be NaN.
        scale = jnp.where((staged.topk_ids >= 0).any(axis=1), scale, jnp.float32(1))
    if shared is not None:
        shared = decoded(shared, shared.token_scale)
    return replace(staged, tokens=decoded(staged.tokens, scale), shared_tokens=shared)


def _only(tokens: QuantizedTokens, rows: Bool[Array, " tokens"]) -> QuantizedTokens:
    """The tokens of some rows, the others 0."""

    def keep(array: Array) -> Array:
        return jnp.where(rows.reshape(-1, *(1,) * (array.ndim - 1)), array, jnp.zeros_like(array))

    return jax.tree.map(keep, tokens)


def _slots(
    staged: StagedTokens,
    weights: ExpertWeights,
    config: MoEConfig,
    first_expert: Array,
    activation_scale: Array | None,
    exact: bool,
) -> Float32[Array, "tokens top_k hidden"]:
    """Each (token, slot)'s output, zero where `weights` do not hold the slot's expert."""
    recipe = recipe_for(config, weights)
    gate, up, down = dequantize_experts(config, weights)
    local = dict(gate=gate, up=up, down=down) | dequantize_biases(weights)
    local["id"] = first_expert + jnp.arange(gate.shape[0], dtype=jnp.int32)

    def add_expert(slots: Array, parts: dict[str, Array]) -> tuple[Array, None]:
        here = staged.topk_ids == parts["id"]
        y = _expert(
            # What other tokens would overflow here must not reach their gradients, as 0 * inf.
            _only(staged.tokens, here.any(axis=1)),
            staged.topk_weights,
            parts,
            (config.activation, recipe, exact),
            activation_scale,
        )
        return jnp.where(here[..., None], y, slots), None

    shape = (*staged.topk_ids.shape, config.hidden_size)
    empty = jnp.zeros(shape, jnp.float32) + expert.varying_zero(staged.topk_ids, gate)
    return lax.scan(add_expert, empty, local)[0]


def _shared(
    staged: StagedTokens, weights: ExpertWeights, config: MoEConfig, exact: bool
) -> Float32[Array, "tokens hidden"] | None:
    if weights.shared is None or staged.shared_tokens is None or config.shared_format is None:
        return None
    parts: dict[str, Any] = dict(
        zip(("gate", "up", "down"), dequantize_shared(config, weights), strict=True)
    )
    ones = jnp.ones((staged.topk_ids.shape[0], 1), jnp.float32)
    how = (config.activation, RECIPES[config.shared_format], exact)
    return _expert(staged.shared_tokens, ones, parts, how, None)[:, 0]


def _expert(
    tokens: QuantizedTokens,
    topk_weights: Float32[Array, "tokens slots"],
    parts: dict[str, Any],
    how: tuple[Activation, Recipe, bool],
    activation_scale: Array | None,
) -> Float32[Array, "tokens slots hidden"]:
    """One expert on all tokens, once for each slot's top-k weight."""
    activation, recipe, exact = how
    x = tokens.decoded().astype(jnp.float32)
    gate = _einsum("th,ih->ti", x, parts["gate"])
    up = _einsum("th,ih->ti", x, parts["up"])
    if tokens.token_scale is not None:
        gate, up = gate * tokens.token_scale[:, None], up * tokens.token_scale[:, None]
    if "gate_bias" in parts:
        gate, up = gate + parts["gate_bias"][None], up + parts["up_bias"][None]
    if exact:
        act = expert.activate(gate, up, activation)
    else:
        act = expert.rounded_activation(gate, up, activation, recipe)
    act = jnp.broadcast_to(act[:, None], (*topk_weights.shape, act.shape[-1]))
    early = not (exact or recipe.rounding.weighs_in_combine)
    if not exact:
        factor = topk_weights[..., None] if early else None
        act = expert.second_input(act, factor, recipe, activation_scale).astype(jnp.float32)
    y = _einsum("tki,hi->tkh", act, parts["down"])
    if activation_scale is not None:
        y = y * activation_scale
    if "down_bias" in parts:
        bias = parts["down_bias"][None, None]
        y = y + (topk_weights[..., None] * bias if early else bias)
    return y if exact else expert.round_bf16(y)
