"""`RouterLayer`: a router's arrays as a Flax (nnx) module, and its call over a mesh."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, BFloat16, Bool, Int32

from jax_megamoe import _checks
from jax_megamoe.mesh import gathered, reshard
from jax_megamoe.nn.variables import Buffer, held, replicated
from jax_megamoe.op.transforms import Place, zero_padding
from jax_megamoe.routing.router import Router, RouterParams, Routing, check_route, route
from jax_megamoe.weights.checkpoint.block_tensors import BlockTensors


class RouterLayer(nnx.Module):
    """A router's arrays, a copy on every device.

    Attributes:
        settings: how experts are chosen.
        weight, bias, correction_bias, table: see `RouterParams`; None for those that the settings
            do not have.
    """

    def __init__(
        self,
        settings: Router,
        hidden_size: int,
        *,
        mesh: Mesh | AbstractMesh | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Draws the weight, of variance 1 / hidden_size, and a table; biases are 0."""
        self.settings = settings
        experts = settings.num_experts
        weight = jax.random.normal(rngs.params(), (experts, hidden_size), jnp.float32)
        self.weight = replicated((weight * hidden_size**-0.5).astype(jnp.bfloat16), mesh)
        zeros = jnp.zeros(experts, jnp.float32)
        self.bias: Any = replicated(zeros, mesh) if settings.has_bias else None
        corrected = settings.has_correction_bias
        self.correction_bias: Any = replicated(zeros, mesh, Buffer) if corrected else None
        table = _drawn_table(settings, rngs) if settings.table_size else None
        self.table: Any = None if table is None else replicated(table, mesh, Buffer)

    @property
    def params(self) -> RouterParams:
        """The arrays as `route` takes them.

        Raises:
            ValueError: they have not been loaded, or were deleted.
        """
        variables = (getattr(self, name) for name in RouterParams._fields)
        name = "the router's parameters"
        return RouterParams(*(None if each is None else held(each, name) for each in variables))

    def __call__(
        self,
        x: BFloat16[Array, "tokens hidden"],
        *,
        token_ids: Int32[Array, " tokens"] | None = None,
        padding_mask: Bool[Array, " tokens"] | None = None,
        place: Place,
    ) -> Routing:
        """`route`; over a mesh each rank its own rows.

        Args:
            x: bfloat16 [T, H].
            token_ids: int32 [T], for a router with a table.
            padding_mask: bool [T], True for rows that are no tokens: routed as zeros, so that what
                they hold reaches no gradient.
            place: where the experts run.

        Raises:
            ValueError, TypeError: as `route`; or parameters that were not loaded.
        """
        params = self.params
        check_route(x, params, self.settings, token_ids)
        local = partial(_route, settings=self.settings)
        tokens = (x, token_ids, padding_mask)
        if place.mesh is None or place.inside:
            return local(tokens, params)
        num_tokens, rows = len(x), P(place.token_axes)
        missing = -num_tokens % place.num_parts
        if missing:
            tokens = jax.tree.map(partial(_with_rows, missing=missing), tokens)
        tokens = reshard(tokens, place.mesh, rows)
        routing = jax.shard_map(local, mesh=place.mesh, in_specs=(rows, P()), out_specs=rows)(
            tokens, params
        )
        if missing:
            routing = jax.tree.map(lambda array: array[:num_tokens], gathered(routing))
        return routing

    def read(self, tensors: BlockTensors) -> dict[str, np.ndarray]:
        """The arrays of a checkpoint, by attribute. The weight keeps the precision it is stored in,
        bfloat16 or float32.

        Raises:
            ValueError, TypeError: as `BlockTensors.take`; a table with experts that do not exist.
        """
        settings = self.settings
        experts, hidden_size = self.weight.shape
        names = ("gate.weight", "router.weight", "gate.wg.weight")
        weight = tensors.take(*names, shape=(experts, hidden_size))
        arrays = dict(weight=weight.astype(np.float32) if weight.dtype == np.float16 else weight)
        if settings.has_bias:
            arrays["bias"] = tensors.take("router.bias", shape=(experts,)).astype(np.float32)
        if settings.has_correction_bias:
            name = "e_score_correction_bias"
            names = (f"gate.{name}", "gate.bias", name, f"moe_statics.{name}")
            bias = tensors.take(*names, shape=(experts,), or_row=True)
            arrays["correction_bias"] = bias.astype(np.float32)
        if settings.table_size:
            shape = (settings.table_size, settings.top_k)
            table = tensors.take("gate.tid2eid", shape=shape, dtypes=["int64", "int32"])
            if table.min() < 0 or table.max() >= experts:
                got = f"experts from {table.min()} to {table.max()}"
                where = f"{tensors.prefix}.gate.tid2eid"
                raise ValueError(_checks.message(where, f"experts in [0, {experts})", got))
            arrays["table"] = table.astype(np.int32)
        return arrays


def _drawn_table(settings: Router, rngs: nnx.Rngs) -> Int32[Array, "ids top_k"]:
    """Rows of distinct experts, the first one drawn."""
    shape = (settings.table_size, 1)
    first = jax.random.randint(rngs.params(), shape, 0, settings.num_experts, jnp.int32)
    return (first + jnp.arange(settings.top_k, dtype=jnp.int32)[None]) % settings.num_experts


def _with_rows(array: Array, *, missing: int) -> Array:
    """`array` with more rows of zeros, which are routed as tokens are and then cut off."""
    return jnp.pad(array, ((0, missing), *[(0, 0)] * (array.ndim - 1)))


def _route(
    tokens: tuple[Array, Array | None, Array | None], params: RouterParams, *, settings: Router
) -> Routing:
    x, token_ids, padding_mask = tokens
    return route(zero_padding(x, padding_mask), params, settings, token_ids=token_ids)
