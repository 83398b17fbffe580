"""The portable implementation: sort by expert, exchange over the EP axis, grouped matmuls.

`moe` is the layer, `gradients` its backward pass: the same rows take the same way, now with the
cotangents of their tokens, and each expert's part is computed again where it is differentiated.
Forward, NVIDIA GPUs multiply the rows of all experts at once (`pallas_experts`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float32, Int32, UInt16

from jax_megamoe.config import MoEConfig
from jax_megamoe.formats import GROUPED_LAYOUTS, INTERLEAVE_8, RECIPES
from jax_megamoe.mesh import Axis
from jax_megamoe.numerics import expert
from jax_megamoe.numerics.tokens import QuantizedTokens, restore_tokens
from jax_megamoe.op import one_expert, pallas_experts
from jax_megamoe.op.exchange import exchanged
from jax_megamoe.op.one_expert import Mlp
from jax_megamoe.op.staged_tokens import StagedTokens
from jax_megamoe.weights.params import ExpertWeights, recipe_for

_MIN_ROWS = 8
_MAX_BLOCK = 128
"""Rows of one expert that are multiplied at once, at most."""


class _Rows(NamedTuple):
    """Tokens on their way through the experts, one row per (token, slot).

    The tokens are their bits as unsigned integers: XLA:CPU widens whole arrays of small floats
    before it slices, scatters or updates them.
    """

    tokens: QuantizedTokens
    weight: Float32[Array, " rows"]
    cotangent: UInt16[Array, "rows hidden"] | None = None
    """In the backward pass: of the token's output."""


def moe(
    staged: StagedTokens,
    weights: ExpertWeights,
    *,
    config: MoEConfig,
    axis: Axis | None = None,
    num_ranks: int = 1,
) -> Float32[Array, "tokens hidden"]:
    """The layer on one rank's staged tokens and experts, on any JAX device.

    Dropless: a token's row goes to its expert's rank and back whatever the skew. Rows of one rank
    are exchanged in rounds of at most 1.25 / num_ranks of them to each peer: one round when the
    routing is near even, at most num_ranks when every token goes to one rank. Experts are decoded
    one at a time, and only those that have tokens; `pallas_experts` reads them as they are stored.

    Peak memory over parameters and staged tokens, for n = num_tokens * top_k rows of b bytes (b = 2
    H in bf16, about H in the 8-bit and H / 2 in the 4-bit formats): 2 n H bytes for the outputs of
    all slots; up to 1.25 n (3 b + 6 H) bytes for the rows of one round sent, received and sorted
    and their outputs on the way back; one decoded expert, 6 I H bytes (12 I H for fp8_block); and
    the hidden values of one block of at most 128 rows.

    Args:
        staged: this rank's tokens.
        weights: this rank's experts.
        config: the layer.
        axis: the manual mesh axis (axes) of expert parallelism; None on one rank.
        num_ranks: its size.

    Returns:
        float32 [T, H], before the last rounding.
    """
    with jax.named_scope("mega_moe/experts"):
        mlp = _routed_mlp(weights, config, axis)
        bits = _slots(staged, None, weights, mlp, axis, num_ranks)
        slots = lax.bitcast_convert_type(bits, jnp.bfloat16)
    with jax.named_scope("mega_moe/shared"):
        shared = shared_expert(staged.shared_tokens, weights, config)
    with jax.named_scope("mega_moe/combine"):
        factors = staged.topk_weights if mlp.recipe.rounding.weighs_in_combine else None
        return expert.combine(slots, factors, shared)


def gradients(
    staged: StagedTokens,
    cotangent: Float32[Array, "tokens hidden"],
    weights: ExpertWeights,
    *,
    config: MoEConfig,
    axis: Axis | None = None,
    num_ranks: int = 1,
) -> tuple[Float32[Array, "tokens hidden"], Float32[Array, "tokens top_k"]]:
    """What `moe` pulls a cotangent back to, for the tokens before they were quantised and for
    their top-k weights.

    Roundings count as the identity, the parameters as constants. Nothing of the forward pass is
    kept: hidden values are computed again, those of one block of rows at a time.

    Peak memory: as `moe`'s with 4 H bytes more a row (its gradient is float32) and 2 H (its
    cotangent); and a fused shared expert's hidden values of all tokens.

    Args:
        staged: as `moe` had it.
        cotangent: of `moe`'s result; rounded to BF16, as the layer's output is.
        weights, config, axis, num_ranks: as of `moe`.

    Returns:
        float32 [T, H] and float32 [T, K], 0 where unrouted.
    """
    with jax.named_scope("mega_moe/experts"):
        mlp = _routed_mlp(weights, config, axis)
        slots = _slots(staged, cotangent.astype(jnp.bfloat16), weights, mlp, axis, num_ranks)
        of_tokens, of_factors = slots[..., :-1].sum(axis=1), slots[..., -1]
    if staged.shared_tokens is None:
        return of_tokens, of_factors
    with jax.named_scope("mega_moe/shared"):
        values = staged.shared_tokens.decoded().astype(jnp.float32)
        _, pull = jax.vjp(lambda x: shared_expert(QuantizedTokens(x), weights, config), values)
        return of_tokens + pull(cotangent)[0], of_factors


def _routed_mlp(weights: ExpertWeights, config: MoEConfig, axis: Axis | None) -> Mlp:
    recipe = recipe_for(config, weights)
    scale = None
    if recipe.activations.has_global_scale:
        scale = expert.input_scale(weights.routed.w2_input_scale, axis)
    if weights.layout in GROUPED_LAYOUTS:
        return Mlp(config, recipe, INTERLEAVE_8, scale, weights.layout)
    return Mlp(config, recipe, weights.layout, scale)


def _bits(array: Array) -> Array:
    """The array's bits, an unsigned integer an element."""
    return lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")


def _token_rows(
    staged: StagedTokens, cotangent: BFloat16[Array, "tokens hidden"] | None, rows: Array
) -> _Rows:
    """Rows of (token, slot) indices: bits of the token and its cotangent, the slot's weight."""
    of_tokens = rows // staged.topk_ids.shape[1]
    tokens, sent = jax.tree.map(lambda array: _bits(array)[of_tokens], (staged.tokens, cotangent))
    return _Rows(tokens, staged.topk_weights.reshape(-1)[rows], sent)


def _slots(
    staged: StagedTokens,
    cotangent: BFloat16[Array, "tokens hidden"] | None,
    weights: ExpertWeights,
    mlp: Mlp,
    axis: Axis | None,
    num_ranks: int,
) -> Array:
    """What `_grouped` makes of every slot, [T, K, width]; 0 where unrouted."""
    num_tokens, top_k = staged.topk_ids.shape
    # One rank has nothing to exchange; its rows skip the rounds and their padding.
    if num_ranks == 1:
        slots = _local_slots(staged, cotangent, weights, mlp)
    else:
        assert axis is not None
        slots = _exchanged_slots(staged, cotangent, weights, mlp, axis, num_ranks)
    return slots.reshape(num_tokens, top_k, -1)


def _local_slots(
    staged: StagedTokens, cotangent: Array | None, weights: ExpertWeights, mlp: Mlp
) -> Array:
    """Every slot's row when all experts are here."""
    num_experts = weights.routed.w13_weight.shape[0]
    ids = staged.topk_ids.reshape(-1)
    # Unrouted slots sort behind the last expert, where no group reaches them.
    local_id = jnp.where(ids < 0, num_experts, ids)

    def one_by_one() -> Array:
        order = jnp.argsort(local_id, stable=True)
        counts = expert.count_tokens(staged.topk_ids, num_experts)
        sorted_out = _grouped(_token_rows(staged, cotangent, order), counts, weights, mlp)
        return sorted_out[jnp.argsort(order)]

    tokens = staged.tokens if cotangent is None else None
    factors = staged.topk_weights.reshape(-1)
    slots = _by_platform(one_by_one, tokens, local_id, factors, weights, mlp)
    return jnp.where((ids >= 0)[:, None], slots, 0)


def _by_platform(
    one_by_one: Callable[[], Array],
    tokens: QuantizedTokens | None,
    local_id: Array,
    factors: Array,
    weights: ExpertWeights,
    mlp: Mlp,
) -> Array:
    """Every slot's row by Pallas kernels where those run, chosen as the program is lowered, else
    `one_by_one()`; tokens None in the backward pass, which has no kernel."""
    if tokens is None or not pallas_experts.runs(local_id.size, weights, mlp):
        return one_by_one()
    at_once = partial(pallas_experts.outputs, tokens, local_id, factors, weights, mlp)
    return lax.platform_dependent(cuda=at_once, default=one_by_one)


def _exchanged_slots(
    staged: StagedTokens,
    cotangent: Array | None,
    weights: ExpertWeights,
    mlp: Mlp,
    axis: Axis,
    num_ranks: int,
) -> Array:
    """Every slot's row, sent to its expert's rank and back in rounds."""
    local_experts = weights.routed.w13_weight.shape[0]
    ids = staged.topk_ids.reshape(-1)

    def apply(rows: _Rows, local_id: Array) -> Array:
        def one_by_one() -> Array:
            by_expert = jnp.argsort(local_id, stable=True)
            received = jnp.zeros(local_experts, jnp.int32).at[local_id].add(1, mode="drop")
            taken = jax.tree.map(lambda array: array[by_expert], rows)
            return _grouped(taken, received, weights, mlp)[jnp.argsort(by_expert)]

        tokens = None
        if cotangent is None:
            tokens = restore_tokens(rows.tokens, mlp.recipe.activations)
        return _by_platform(one_by_one, tokens, local_id, rows.weight, weights, mlp)

    return exchanged(
        ids,
        _empty(ids.size, cotangent is not None, mlp, ids, weights.routed.w13_weight),
        lambda row: _token_rows(staged, cotangent, row),
        apply,
        local_experts=local_experts,
        axis=axis,
        num_ranks=num_ranks,
    )


def _empty(num_rows: int, backward: bool, mlp: Mlp, *like: Array) -> Array:
    """Zeros for `_grouped`'s rows, varying over every mesh axis that `like` vary over."""
    width, dtype = mlp.config.hidden_size, jnp.uint16
    if backward:
        width, dtype = width + 1, jnp.float32
    return jnp.zeros((num_rows, width), dtype) + expert.varying_zero(*like).astype(dtype)


def _grouped(
    rows: _Rows, counts: Int32[Array, " experts"], weights: ExpertWeights, mlp: Mlp
) -> Array:
    """Each row through its expert; rows are sorted by expert, the rest is undefined.

    Forward: uint16 [n, H], BF16 bits of the output. Backward, for rows with a cotangent: float32
    [n, H + 1], `_block_gradients`.

    A block that reaches into the next expert's rows writes them too, and the next expert, later in
    the loop, writes them again: so no rows are copied to align the groups.
    """
    num_rows, local_experts = rows.weight.shape[0], counts.shape[0]
    block = _block_rows(num_rows, local_experts)
    # A dynamic slice past the end would be shifted back, onto other rows: pad by one block instead.
    padded = jax.tree.map(lambda a: jnp.pad(a, [(0, block)] + [(0, 0)] * (a.ndim - 1)), rows)
    starts = jnp.cumsum(counts, dtype=jnp.int32) - counts
    # Experts with rows come first, so that the loop ends after them and decodes no other.
    busy = jnp.argsort(counts == 0, stable=True).astype(jnp.int32)
    backward = rows.cotangent is not None
    apply = _block_gradients if backward else _block_outputs

    def of_expert(i: Array, out: Array) -> Array:
        e = busy[i]
        local = one_expert.expert_fields(weights, e, mlp)

        def one_block(j: Array, out: Array) -> Array:
            start = starts[e] + j * block
            part = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, start, block), padded)
            return lax.dynamic_update_slice_in_dim(out, apply(part, local, mlp), start, 0)

        return lax.fori_loop(0, -(-counts[e] // block), one_block, out)

    out = _empty(num_rows + block, backward, mlp, rows.weight, weights.routed.w13_weight)
    num_busy = jnp.sum(counts > 0, dtype=jnp.int32)
    return lax.fori_loop(0, num_busy, of_expert, out)[:num_rows]


def _block_outputs(rows: _Rows, fields: dict[str, Any], mlp: Mlp) -> UInt16[Array, "rows hidden"]:
    tokens = restore_tokens(rows.tokens, mlp.recipe.activations)
    return _bits(one_expert.apply(tokens, rows.weight, fields, mlp))


def _block_gradients(
    rows: _Rows, fields: dict[str, Any], mlp: Mlp
) -> Float32[Array, "rows hidden+1"]:
    """Gradients of a block of rows of one expert: the tokens', and in the last column their
    weights'."""
    assert rows.cotangent is not None
    tokens = restore_tokens(rows.tokens, mlp.recipe.activations)
    cotangent = lax.bitcast_convert_type(rows.cotangent, jnp.bfloat16).astype(jnp.float32)

    def weighted(values: Array, weight: Array) -> Array:
        decoded = QuantizedTokens(values, None, tokens.token_scale)
        y = one_expert.apply(decoded, weight, fields, mlp).astype(jnp.float32)
        return y * weight[:, None] if mlp.recipe.rounding.weighs_in_combine else y

    _, pull = jax.vjp(weighted, tokens.decoded().astype(jnp.float32), rows.weight)
    of_values, of_weight = pull(cotangent)
    if tokens.token_scale is not None:
        of_values = of_values / tokens.token_scale[:, None]
    return jnp.concatenate([of_values, of_weight[:, None]], axis=1)


def _block_rows(num_rows: int, num_experts: int) -> int:
    """Rows of one matmul: about an expert's even share, a power of two from 8 to 128."""
    if not isinstance(num_rows, int):
        return _MAX_BLOCK  # a symbolic number, in jax.export
    share = max(1, num_rows // num_experts)
    return min(_MAX_BLOCK, max(_MIN_ROWS, 1 << (share - 1).bit_length()))


def shared_expert(
    tokens: QuantizedTokens | None, weights: ExpertWeights, config: MoEConfig
) -> Float32[Array, "tokens hidden"] | None:
    """The output of the shared expert in `weights` on this rank's tokens; None without one."""
    shared = weights.shared
    if shared is None or tokens is None or config.shared_format is None:
        return None
    mlp = Mlp(config, RECIPES[config.shared_format], INTERLEAVE_8)
    arrays = shared.arrays()
    fields: dict[str, Any] = {
        "w13": one_expert.decoded(arrays, "w13_weight", mlp),
        "w2": one_expert.decoded(arrays, "w2_weight", mlp),
    }
    ones = jnp.ones(tokens.values.shape[0], jnp.float32)
    fields |= dict.fromkeys(("w13_bias", "w2_bias", "l1_alpha", "l2_alpha"))
    return one_expert.apply(tokens, ones, fields, mlp).astype(jnp.float32)
