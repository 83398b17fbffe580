"""Blocks that multiply what an expert gets by its routing weight, not what it gives (Llama 4).

Of one expert a token, so that each token has one input. The kernels multiply outputs: here their
weights are 1, and the tokens are multiplied before.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, BFloat16, Bool, Float32

from jax_megamoe.mesh import reshard
from jax_megamoe.op.transforms import Place, add_shared, zero_padding
from jax_megamoe.routing.router import Routing


def weighed(
    x: BFloat16[Array, "tokens hidden"], routing: Routing
) -> tuple[BFloat16[Array, "tokens hidden"], Routing]:
    """Tokens times their weights, rounded to bfloat16, and the routing with weights of 1.

    Args:
        x: bfloat16 [T, H].
        routing: of one expert a token.
    """
    weights = routing.topk_weights
    inputs = (x.astype(jnp.float32) * weights).astype(x.dtype)
    return inputs, Routing(routing.topk_ids, jnp.ones_like(weights))


def plus_shared(
    y: BFloat16[Array, "tokens hidden"],
    x: BFloat16[Array, "tokens hidden"],
    shared_expert: Callable[[Array], Float32[Array, "tokens hidden"]],
    padding_mask: Bool[Array, " tokens"] | None,
    place: Place,
) -> BFloat16[Array, "tokens hidden"]:
    """The routed experts' output plus that of the shared one, whose tokens are not multiplied.

    Args:
        y: bfloat16 [T, H].
        x: bfloat16 [T, H], the tokens as they came.
        shared_expert: gives float32 [T, H].
        padding_mask: bool [T], True for rows that are no tokens: theirs stay 0.
        place: where the experts run.
    """
    if place.mesh is not None and not place.inside:
        rows = P(*jax.typeof(y).sharding.spec[:1])
        x, padding_mask = reshard((x, padding_mask), place.mesh, rows)
    return add_shared(y, shared_expert(zero_padding(x, padding_mask)), padding_mask)
