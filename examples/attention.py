"""Attention of a decoder over a key-value cache that stays where it is.

Inside a scan, XLA on a GPU copies a layer's slice of an array of all layers before its own products
or a Pallas kernel read it; to cuBLAS it hands a slice as it is. So `mixed_by_xla` takes the slice,
for cuBLAS. `mixed_by_kernel`, one token a sequence, takes the cache of all layers and a layer's
index: it reads the positions which the token sees once, where they lie. It divides them among
several programs (flash decoding), whose sums XLA merges.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

triton: Any
try:
    from jax.experimental.pallas import triton
except ImportError:  # JAX will drop it one day
    triton = None

FULL = 1 << 30
"""The window of a layer that attends to every position."""
BLOCK = 64
"""Positions that a program reads at a time."""
PROGRAMS = 1024
"""About as many are wanted: several for each multiprocessor."""
LEAST = float(jnp.finfo(jnp.float32).min)


class Cache(NamedTuple):
    """Keys and values of all layers, bfloat16 [layers, sequences, kv_heads, positions, head_dim].

    Positions are next to last: each head's matrix lies in one piece, as a batched product reads it.
    """

    keys: Any
    values: Any

    def first(self, count: int) -> "Cache":
        """The first positions."""
        return Cache(*(array[..., :count, :] for array in self))

    def put(self, rows: "Cache", positions: jax.Array) -> "Cache":
        """With rows [layers, B, T, kv_heads, head_dim] at positions [B, T], in place under jit."""
        sequence = jnp.arange(len(positions))[:, None]
        pairs = zip(self, rows, strict=True)
        return Cache(
            *(all.at[:, sequence, :, positions].set(jnp.moveaxis(new, 0, 2)) for all, new in pairs)
        )


class Place(NamedTuple):
    """Where a layer's attention happens.

    Attributes:
        cache: of all layers, before the tokens, as the kernel reads it.
        sliced: this layer's, as the scan slices it. Not made where nothing reads it.
        layer: its index.
        windows: how many positions back each layer's tokens see, themselves included, int32.
        positions: of the tokens [B, T].
        turns: sines and cosines of the rotary embedding, float32 [B, T, 1, head_dim / 2] each.
    """

    cache: Cache
    sliced: Cache
    layer: jax.Array
    windows: jax.Array
    positions: jax.Array
    turns: tuple[jax.Array, jax.Array]


def rotated(heads: jax.Array, turns: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Each pair (value i, value i + head_dim / 2) turned by its angle."""
    sin, cos = (each.astype(heads.dtype) for each in turns)
    first, second = jnp.split(heads, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def attend(heads: jax.Array, place: Place, sinks: jax.Array | None, has_kernel: bool) -> jax.Array:
    """Values that tokens see, mixed, bfloat16 [B, T, heads, head_dim].

    Args:
        heads: queries, keys and values, bfloat16 [B, T, heads + 2 kv_heads, head_dim].
        place: where that is.
        sinks: logits that take probability and give nothing [heads].
        has_kernel: by the kernel where that can be: one token each, an NVIDIA GPU.
    """
    if not has_kernel or triton is None or heads.shape[1] > 1 or not place.cache.keys.shape[3]:
        return mixed_by_xla(heads, place, sinks)
    by_kernel = partial(mixed_by_kernel, interpret=False)
    return jax.lax.platform_dependent(heads, place, sinks, cuda=by_kernel, default=mixed_by_xla)


def parts(heads: jax.Array, kv_heads: int) -> tuple[jax.Array, Cache]:
    """Queries, and the keys and values beside them."""
    q, k, v = jnp.split(heads, [heads.shape[2] - 2 * kv_heads, heads.shape[2] - kv_heads], axis=2)
    return q, Cache(k, v)


def mixed_by_xla(heads: jax.Array, place: Place, sinks: jax.Array | None) -> jax.Array:
    """`attend` in JAX. Scores of cache and rows are apart: joined, they would be copied."""
    cache, positions = place.sliced, place.positions
    kv_heads, _, size = cache.keys.shape[1:]
    q, rows = parts(heads, kv_heads)
    groups = q.reshape(*q.shape[:2], kv_heads, -1, size)

    def scores(product: str, keys: jax.Array, at: jax.Array) -> jax.Array:
        """float32 [B, kv_heads, group, T, S] of keys at positions [B, S]."""
        found = jnp.einsum(product, groups, keys).astype(jnp.float32) * size**-0.5
        distance = positions[:, :, None] - at[:, None]
        seen = (distance >= 0) & (distance < place.windows[place.layer])
        return jnp.where(seen[:, None, None], found, -jnp.inf)

    cached = jnp.arange(cache.keys.shape[2])
    cached = jnp.where(cached < positions[:, :1], cached, FULL)
    past = scores("btkgd,bksd->bkgts", cache.keys, cached)
    own = scores("btkgd,bskd->bkgts", rows.keys, positions)
    sink = jnp.full((kv_heads, groups.shape[3]), -jnp.inf)
    if sinks is not None:
        sink = sinks.reshape(kv_heads, -1).astype(jnp.float32)
    sink = sink[:, :, None, None]
    largest = jnp.maximum(own.max(-1, keepdims=True), sink)
    if cached.size:
        largest = jnp.maximum(largest, past.max(-1, keepdims=True))
    past, own = jnp.exp(past - largest), jnp.exp(own - largest)
    total = past.sum(-1, keepdims=True) + own.sum(-1, keepdims=True) + jnp.exp(sink - largest)
    past, own = ((weights / total).astype(q.dtype) for weights in (past, own))
    mixed = jnp.einsum("bkgts,bksd->btkgd", past, cache.values)
    return (mixed + jnp.einsum("bkgts,bskd->btkgd", own, rows.values)).reshape(q.shape)


def mixed_by_kernel(
    heads: jax.Array, place: Place, sinks: jax.Array | None, *, interpret: bool
) -> jax.Array:
    """`attend` for one token a sequence, on a GPU or interpreted by JAX."""
    sequences, kv_heads, length, size = place.cache.keys.shape[1:]
    count = heads.shape[2] - 2 * kv_heads
    splits = max(1, min(pl.cdiv(length, BLOCK), PROGRAMS // (sequences * kv_heads)))
    shapes = (splits, sequences, count, size), *((splits, sequences, count),) * 2
    scalars = jnp.stack([place.layer, place.windows[place.layer]])
    mixed, total, largest = pl.pallas_call(
        partial(_kernel, splits=splits),
        grid=(sequences, kv_heads, splits),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="decode_attention",
    )(scalars, place.positions[:, 0], heads[:, 0], *place.cache)
    highest = largest.max(0)
    sink = jnp.full(count, -jnp.inf) if sinks is None else sinks.astype(jnp.float32)
    highest = jnp.maximum(highest, sink[None])
    factor = jnp.exp(largest - highest)
    total = (total * factor).sum(0) + jnp.exp(sink[None] - highest)
    mixed = (mixed * factor[..., None]).sum(0) / total[..., None]
    return mixed.astype(heads.dtype)[:, None]


def _kernel(*refs: Any, splits: int) -> None:
    """One part of a sequence's positions, for the query heads of one key-value head.

    Leaves the values' sum weighed by exp(score - largest), the weights' sum, the largest score.
    """
    scalars, positions, all_heads, keys, values, *results = refs
    sequence, kv_head, split = (pl.program_id(axis) for axis in range(3))
    kv_heads, length, size = keys.shape[2:]
    heads = all_heads.shape[1] - 2 * kv_heads
    group, scale = heads // kv_heads, size**-0.5
    layer, window, position = scalars[0], scalars[1], positions[sequence]
    rows = jnp.arange(max(16, pl.next_power_of_2(group)), dtype=jnp.int32)  # a tensor core's least
    head = kv_head * group + jnp.minimum(rows, group - 1)

    def grid(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        columns = jnp.arange(size, dtype=jnp.int32)
        shape = (index.shape[0], size)
        return jnp.broadcast_to(index[:, None], shape), jnp.broadcast_to(columns[None], shape)

    q = triton.load(all_heads.at[(sequence, *grid(head))])
    own = heads + kv_head, heads + kv_heads + kv_head
    key, value = (all_heads[sequence, each, :].astype(jnp.float32)[None] for each in own)
    # The token itself is the first program's.
    is_first = split == 0
    score = (q.astype(jnp.float32) * key).sum(1) * scale
    largest = jnp.where(is_first, score, jnp.full_like(score, LEAST))
    total = jnp.where(is_first, jnp.ones_like(score), jnp.zeros_like(score))
    mixed = jnp.broadcast_to(jnp.where(is_first, value, jnp.zeros_like(value)), q.shape)

    def step(block: jax.Array, carry: Any) -> Any:
        mixed, total, largest = carry
        column = block * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        seen = ((column < position) & (column > position - window))[None]
        place = (layer, sequence, kv_head, *grid(jnp.minimum(column, length - 1)))
        scores = _dot(q, triton.load(keys.at[place]), 1) * scale
        scores = jnp.where(seen, scores, LEAST)
        new = jnp.maximum(largest, scores.max(1))
        weights = jnp.where(seen, jnp.exp(scores - new[:, None]), 0.0)
        factor = jnp.exp(largest - new)
        more = _dot(weights.astype(q.dtype), triton.load(values.at[place]), 0)
        return mixed * factor[:, None] + more, total * factor + weights.sum(1), new

    first = jnp.maximum(position - window + 1, 0) // BLOCK
    end = pl.cdiv(jnp.minimum(position, length), BLOCK)
    each = pl.cdiv(end - first, splits)
    start = first + split * each
    carry = mixed, total, largest
    end = jnp.minimum(start + each, end)
    mixed, total, largest = jax.lax.fori_loop(start, end, step, carry)
    # Out of bounds where it is not stored, so that the interpreter writes no row twice.
    inside = rows < group
    head = jnp.where(inside, head, heads)
    for ref, sums in zip(results, (mixed, total, largest), strict=True):
        at, mask = (grid(head), inside[:, None]) if sums.ndim > 1 else ((head,), inside)
        triton.store(ref.at[(split, sequence, *at)], sums, mask=jnp.broadcast_to(mask, sums.shape))


def _dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """Product over a's last axis and that one of b, in float32."""
    return jax.lax.dot_general(
        a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32
    )
