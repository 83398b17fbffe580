"""Tokens and routings of a timed layer, the same for ours and for peers in other processes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_megamoe.cli.gpu.models import Model
from jax_megamoe.config import MoEConfig

ROUTINGS = 16
"""Layers of a timed program, each with another routing: what one read is not in the L2 cache when
the next reads."""

PROGRAMS, UNROLLED = "layers of a program", "unrolled"
"""Name and value, among a result's versions, of how programs of our own kernels are made. Older
results lack it: theirs had a loop, which computed each layer's ids between the layers."""


def tokens(sizes: Model | MoEConfig, num_tokens: int, seed: int = 1) -> tuple[Array, Array, Array]:
    """x bfloat16 [T, H] and a random routing: ids int32 [T, K], weights float32 [T, K], sum 1."""
    first, second = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(first, (num_tokens, sizes.hidden_size), jnp.bfloat16)
    return x, *routing(sizes, num_tokens, second)


drawn = jax.jit(tokens, static_argnames=("sizes", "num_tokens", "seed"))
"""`tokens` as one program."""


def routing(
    sizes: Model | MoEConfig, num_tokens: int, key: Array, lead: tuple[int, ...] = ()
) -> tuple[Array, Array]:
    """Random ids int32 [*lead, T, K], distinct in a token, and weights float32 that sum to 1."""
    logits = jax.random.normal(key, (*lead, num_tokens, sizes.num_experts))
    factors, ids = lax.top_k(jax.nn.softmax(logits), sizes.top_k)
    return ids, factors / factors.sum(-1, keepdims=True)


def turns(ids: Array, num_experts: int) -> tuple[Array, ...]:
    """The ids of every turn, each an array of its own: every id a stride further than before."""
    stride = max(1, num_experts // ROUTINGS)
    return tuple((ids + turn * stride) % num_experts for turn in range(ROUTINGS))


def in_turn(layer: Callable[..., Array], *, unrolled: bool) -> Any:
    """f(x, ids of all turns, factors, parameters) -> y: `ROUTINGS` layers in one program, one after
    the other, and nothing beside them.

    Args:
        layer: f(x, ids, factors, parameters) -> y.
        unrolled: the program has the layer once for each routing, as a CUDA graph of peers has it,
            and gives back every y; else it has a loop, which XLA compiles in less time and which
            copies each turn's ids first, and gives back the last y.
    """

    def apart(x: Array, ids: tuple[Array, ...], *rest: Any) -> tuple[Array, ...]:
        found: list[Array] = []
        for each in ids:
            # Without the barrier nothing would order the layers.
            after = lax.optimization_barrier((x, *found[-1:]))[0]
            found.append(layer(after, each, *rest))
        return tuple(found)

    def looped(x: Array, ids: tuple[Array, ...], *rest: Any) -> Array:
        def step(_: Array, each: Array) -> tuple[Array, None]:
            return layer(x, each, *rest), None

        return lax.scan(step, jnp.zeros_like(x), jnp.stack(ids))[0]

    return jax.jit(apart if unrolled else looped)
