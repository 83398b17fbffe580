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


def turned(ids: Array, turn: Array | int, num_experts: int) -> Array:
    """The ids of a turn: every one further by that many strides."""
    return (ids + turn * max(1, num_experts // ROUTINGS)) % num_experts


def rotated(layer: Callable[..., Array], num_experts: int) -> Any:
    """f(x, ids, factors, parameters): `ROUTINGS` layers in one program, the nth with every id
    further by n strides; each reads the tokens of the one before, to which nothing is added."""

    def step(x: Array, n: Array, ids: Array, *rest: Any) -> tuple[Array, None]:
        y = layer(x, turned(ids, n, num_experts), *rest)
        # 0 times y keeps the layer in the program; where y is not finite, that shows.
        return x + y * jnp.bfloat16(0), None

    def run(x: Array, *rest: Any) -> Array:
        turns = jnp.arange(ROUTINGS, dtype=jnp.int32)
        return lax.scan(lambda carry, n: step(carry, n, *rest), x, turns)[0]

    return jax.jit(run)
