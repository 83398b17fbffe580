"""How a checked call runs: over the mesh's ranks, under `jax.grad` and under `jax.vmap`.

The layers, outside in: jit; the derivative rule; `shard_map`, unless the caller is inside one; the
batching rule; one rank's part.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, BFloat16, Bool, Float32, Int32

from jax_megamoe import _checks
from jax_megamoe.config import MoEConfig
from jax_megamoe.formats import RECIPES
from jax_megamoe.launch import deep_gemm
from jax_megamoe.launch.grouped import GroupedRoute
from jax_megamoe.mesh import Axis, axis_names, check_mesh, mesh_here, reshard, vary, varying_axes
from jax_megamoe.numerics import expert
from jax_megamoe.numerics.tokens import quantize_tokens
from jax_megamoe.op import bias_columns, grouped, reference, xla
from jax_megamoe.op.staged_tokens import StagedTokens, physical_routing, stage
from jax_megamoe.routing.replicas import ReplicaMap
from jax_megamoe.weights.params import ExpertWeights, recipe_for


class Tokens(NamedTuple):
    """The arrays of a call with a row a token, a pytree."""

    x: BFloat16[Array, "tokens hidden"]
    topk_ids: Int32[Array, "tokens top_k"]
    topk_weights: Float32[Array, "tokens top_k"]
    padding_mask: Bool[Array, " tokens"] | None


class Parameters(NamedTuple):
    """The other arrays of a call, a pytree."""

    weights: ExpertWeights
    eplb: ReplicaMap | None

    def partition_specs(self, axis: Axis) -> "Parameters":
        """The same tree of PartitionSpecs: experts split, the rest replicated."""
        eplb = jax.tree.map(lambda _: P(), self.eplb)
        return Parameters(self.weights.partition_specs(axis), eplb)


class Place(NamedTuple):
    """Where a call runs: its axis, the ranks of it, and whether the caller is already inside.

    mesh is the one given, else the current one, which inside a trace has no devices. token_axes,
    the axis and perhaps others, split the rows outside `shard_map`: into num_parts parts.
    """

    axis: Axis | None
    num_ranks: int
    inside: bool
    mesh: Mesh | AbstractMesh | None
    token_axes: Axis | None
    num_parts: int

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Axes over which rows are split and experts are not."""
        if self.inside:
            return ()
        experts = axis_names(self.axis)
        return tuple(name for name in axis_names(self.token_axes) if name not in experts)

    def rows_of_rank(self, num_rows: int) -> int:
        """Rows of one rank in a call of so many, padding included."""
        return num_rows if self.inside else -(-num_rows // self.num_parts)


def place_of(
    config: MoEConfig,
    mesh: Mesh | AbstractMesh | None,
    axis: Axis | None,
    token_axes: Axis | None = None,
) -> Place:
    """Where a call with this mesh and axis runs.

    Raises:
        TypeError: no mesh, or axes that are not names.
        ValueError: a mesh or token axes without an axis, an axis that no mesh has, token axes
            without the axis among them, experts that do not divide.
    """
    check_mesh(mesh, axis=axis, token_axes=token_axes)
    if axis is None:
        if mesh is not None or token_axes is not None:
            raise ValueError(_checks.message("axis", "the expert-parallel axis of the mesh", None))
        return Place(None, 1, False, None, None, 1)
    names = axis_names(axis)
    context = jax.sharding.get_abstract_mesh()
    inside = bool(names) and set(names) <= set(context.manual_axes)
    # Inside, the axis is there already, and a named mesh has the devices that a kernel's ranks are.
    used = mesh if inside and mesh is not None else mesh_here(mesh)
    sizes = _sizes("axis", axis, used)
    num_ranks = math.prod(sizes)
    config.experts_per_rank(num_ranks)
    named = names[0] if len(names) == 1 else names
    if token_axes is None or inside:
        return Place(named, num_ranks, inside, used, named, num_ranks)
    parts = _sizes("token_axes", token_axes, used)
    rows = axis_names(token_axes)
    if not set(names) <= set(rows) or len(set(rows)) < len(rows):
        expected = f"distinct axes with the expert-parallel {list(names)} among them"
        raise ValueError(_checks.message("token_axes", expected, repr(token_axes)))
    return Place(named, num_ranks, inside, used, rows, math.prod(parts))


def _sizes(argument: str, axis: Axis, mesh: Mesh | AbstractMesh) -> list[int]:
    """Sizes of mesh axes."""
    names = axis_names(axis)
    if not names or any(name not in mesh.shape for name in names):
        where = f"one of {list(mesh.shape)}" if mesh.shape else "an axis of a mesh"
        hint = "pass mesh=, use jax.set_mesh, or call inside jax.shard_map over the axis"
        raise ValueError(_checks.message(argument, where, repr(axis), hint))
    return [mesh.shape[name] for name in names]


class Call(NamedTuple):
    """What is static of a call: the implementation chosen, and the route to its kernels."""

    config: MoEConfig
    place: Place
    implementation: str
    route: deep_gemm.Route | GroupedRoute | None = None
    with_stats: bool = False


Result = tuple[BFloat16[Array, "tokens hidden"], Int32[Array, " experts"] | None]


@partial(jax.jit, static_argnames="call")
def run(tokens: Tokens, parameters: Parameters, *, call: Call) -> Result:
    """(y, tokens of each expert), the second for `with_stats` alone."""
    place = call.place
    if tokens.x.shape[0] == 0:
        return tokens.x, _no_counts(tokens, parameters) if call.with_stats else None
    if place.axis is not None and not place.inside:
        mesh = place.mesh
        assert mesh is not None
        tokens = reshard(tokens, mesh, P(place.token_axes))
        parameters = reshard(parameters, mesh, parameters.partition_specs(place.axis))
    return _differentiable(_varying_alike(tokens, parameters), parameters, call)


def _no_counts(tokens: Tokens, parameters: Parameters) -> Int32[Array, " experts"]:
    """Counts of a call without tokens, split as the experts are and varying as x and they do."""
    weight = parameters.weights.routed.w13_weight
    # Computed from them: without operands on its devices JAX refuses an array over Explicit axes.
    firsts = weight[:, *[0] * (weight.ndim - 1)].astype(jnp.float32)
    return vary(jnp.where(jnp.isnan(firsts), 0, 0), varying_axes(tokens.x))


def _varying_alike(tokens: Tokens, parameters: Parameters) -> Tokens:
    """Tokens that vary over every manual axis that any operand does: so does their gradient."""
    arrays = jax.tree.leaves((tokens, parameters))
    axes: frozenset[str] = frozenset().union(*map(varying_axes, arrays))
    return jax.tree.map(lambda array: vary(array, axes), tokens)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _differentiable(tokens: Tokens, parameters: Parameters, call: Call) -> Result:
    place = call.place
    out_specs = (P(place.token_axes), P(place.axis) if call.with_stats else None)
    return _on_ranks(_forward, tokens, parameters, call, out_specs)


def _differentiable_fwd(
    tokens: Tokens, parameters: Parameters, call: Call
) -> tuple[Result, tuple[Tokens, Parameters]]:
    if isinstance(call.route, deep_gemm.Route):
        name = call.implementation
        expected = f"xla or reference where gradients are taken: {name} has none"
        hint = "pass implementation='xla'"
        raise NotImplementedError(_checks.message("implementation", expected, name, hint))
    return _differentiable(tokens, parameters, call), (tokens, parameters)


def _differentiable_bwd(
    call: Call, saved: tuple[Tokens, Parameters], cotangents: tuple[Array, Any]
) -> tuple[Tokens, None]:
    tokens, parameters = saved
    out_specs = (P(call.place.token_axes), P(call.place.token_axes))
    rows = (tokens, cotangents[0])
    of_x, of_weights = _on_ranks(_backward, rows, parameters, call, out_specs)
    return Tokens(of_x, None, of_weights, None), None  # pyright: ignore[reportArgumentType]


_differentiable.defvjp(_differentiable_fwd, _differentiable_bwd)


def _on_ranks(
    local: Callable[..., Any], rows: Any, parameters: Parameters, call: Call, out_specs: Any
) -> Any:
    """`local(rows, parameters, call)` on every rank of the axis, or right here."""
    local = _folding_batches(local, call)
    axis, mesh = call.place.axis, call.place.mesh
    if axis is None or mesh is None or call.place.inside:
        return local(rows, parameters)
    of_rows = P(call.place.token_axes)
    in_specs = (jax.tree.map(lambda _: of_rows, rows), parameters.partition_specs(axis))
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(rows, parameters)


def _folding_batches(local: Callable[..., Any], call: Call) -> Callable[..., Any]:
    """`local` of (rows, parameters) that takes a batch of rows as more rows of one call."""
    folding = custom_vmap(partial(local, call=call))

    @folding.def_vmap
    def fold(size: int, batched: Any, rows: Any, parameters: Parameters) -> tuple[Any, Any]:
        if size == 0:
            raise ValueError(_checks.message("jax.vmap", "at least one element", size))
        if any(jax.tree.leaves(batched[1])):
            expected = "the same for all elements of jax.vmap"
            hint = "call mega_moe for one after the other (jax.lax.map)"
            raise NotImplementedError(
                _checks.message("weights and eplb", expected, "a batch", hint)
            )
        if call.with_stats:
            hint = "count with jax_megamoe.moe_stats"
            raise NotImplementedError(
                _checks.message("return_stats", "False under jax.vmap", True, hint)
            )

        def as_rows(array: Array, is_batched: bool) -> Array:
            if not is_batched:
                array = jnp.broadcast_to(array[None], (size, *array.shape))
            return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])

        def as_batch(array: Array) -> Array:
            return array.reshape(size, array.shape[0] // size, *array.shape[1:])

        rows = jax.tree.map(as_rows, rows, batched[0])
        num_tokens, limit = jax.tree.leaves(rows)[0].shape[0], call.config.max_num_tokens
        _checks.at_most("num_tokens of all of jax.vmap", num_tokens, limit, "max_num_tokens")
        out = jax.tree.map(as_batch, folding(rows, parameters))
        return out, jax.tree.map(lambda _: True, out)

    return folding


def _forward(tokens: Tokens, parameters: Parameters, call: Call) -> Result:
    """One rank's part of the call."""
    given, own = tokens, parameters
    if parameters.weights.folds_biases:
        given, own = _with_constant(tokens, parameters)
    compute = _compute if call.route is None else _launch
    y, counts = compute(given, own, call)
    if parameters.weights.folds_biases:
        with jax.named_scope("mega_moe/second_biases"):
            chosen = _physical(tokens, parameters, call)
            y = bias_columns.plus_second(y, *chosen, parameters.weights, call.place.axis)
    if counts is not None and call.place.data_axes:
        counts = lax.psum(counts, call.place.data_axes)
    return y, counts


def _with_constant(tokens: Tokens, parameters: Parameters) -> tuple[Tokens, Parameters]:
    """What the experts get where first biases are folded: second ones are not their matter."""
    weights = parameters.weights
    given = tokens._replace(x=bias_columns.with_constant(tokens.x, weights))
    return given, parameters._replace(weights=weights.with_routed(w2_bias=None))


def _physical(tokens: Tokens, parameters: Parameters, call: Call) -> tuple[Array, Array]:
    mask, eplb = tokens.padding_mask, parameters.eplb
    return physical_routing(*tokens[1:3], config=call.config, padding_mask=mask, eplb=eplb)


def _compute(tokens: Tokens, parameters: Parameters, call: Call) -> Result:
    """One rank's part of a call by `xla` or `reference`."""
    config, place, weights = call.config, call.place, parameters.weights
    staged = _staged(tokens, parameters, call)
    counts = None
    if call.with_stats:
        counts = expert.count_tokens(staged.topk_ids, config.num_experts)
        if place.axis is not None:
            counts = lax.psum_scatter(counts, place.axis, scatter_dimension=0, tiled=True)
    moe = reference.moe if call.implementation == "reference" else xla.moe
    total = moe(staged, weights, config=config, axis=place.axis, num_ranks=place.num_ranks)
    return zero_padding(total, tokens.padding_mask).astype(jnp.bfloat16), counts


def _launch(tokens: Tokens, parameters: Parameters, call: Call) -> Result:
    """One rank's part of a call by the kernels."""
    config, weights, route = call.config, parameters.weights, call.route
    options: dict[str, Any] = dict(
        config=config,
        axis=call.place.axis,
        padding_mask=tokens.padding_mask,
        eplb=parameters.eplb,
        with_stats=call.with_stats,
    )
    with jax.named_scope("mega_moe/launch"):
        if isinstance(route, GroupedRoute):
            y, counts = grouped.moe(*tokens[:3], weights, route=route, **options)
            fuses_shared = False
        else:
            assert route is not None
            y, counts = deep_gemm.moe(*tokens[:3], weights, route=route, **options)
            fuses_shared = route.fuses_shared
    if weights.shared is None:
        return y, counts  # a row without experts comes out 0
    if not fuses_shared:
        assert config.shared_format is not None
        with jax.named_scope("mega_moe/shared"):
            quantised = quantize_tokens(tokens.x, RECIPES[config.shared_format])
            shared = xla.shared_expert(quantised, weights, config)
            assert shared is not None
            y = add_shared(y, shared, tokens.padding_mask)
    return zero_padding(y, tokens.padding_mask), counts


def _staged(tokens: Tokens, parameters: Parameters, call: Call) -> StagedTokens:
    with jax.named_scope("mega_moe/staging"):
        return stage(
            *tokens[:3],
            config=call.config,
            recipe=recipe_for(call.config, parameters.weights),
            padding_mask=tokens.padding_mask,
            eplb=parameters.eplb,
            fused_shared=parameters.weights.shared is not None,
        )


def _backward(
    rows: tuple[Tokens, BFloat16[Array, "tokens hidden"]], parameters: Parameters, call: Call
) -> tuple[BFloat16[Array, "tokens hidden"], Float32[Array, "tokens top_k"]]:
    """One rank's gradients of x and topk_weights; 0 in padded rows, whatever they hold."""
    tokens, cotangent = rows
    weights = parameters.weights
    ids, _ = _physical(tokens, parameters, call)
    if weights.folds_biases:
        tokens, parameters = _with_constant(tokens, parameters)
    x, mask, place = tokens.x, tokens.padding_mask, call.place
    of_y = zero_padding(cotangent, mask).astype(jnp.float32)
    staged = _staged(tokens, parameters, call)
    gradients = reference.gradients if call.implementation == "reference" else xla.gradients
    of_x, of_weights = gradients(
        staged,
        of_y,
        parameters.weights,
        config=call.config,
        axis=place.axis,
        num_ranks=place.num_ranks,
    )
    of_x = zero_padding(of_x, mask).astype(x.dtype)
    if weights.folds_biases:
        of_x = bias_columns.without_constant(of_x, weights)
        of_weights += bias_columns.gradient_of_second(of_y, ids, weights, place.axis)
    return of_x, of_weights


def widened(rows: Array, config: MoEConfig) -> Array:
    """Rows with zeros up to the config's hidden size."""
    missing = config.hidden_size - rows.shape[1]
    return jnp.pad(rows, ((0, 0), (0, missing))) if missing else rows


def zero_padding(rows: Array, padding_mask: Array | None) -> Array:
    """Rows with 0 where padding_mask is True."""
    return rows if padding_mask is None else jnp.where(padding_mask[:, None], 0, rows)


def add_shared(y: Array, shared: Array, padding_mask: Array | None) -> Array:
    """y plus an unfused shared expert's output, 0 in padded rows."""
    _checks.shape("shared_experts(x)", shared, y.shape)
    total = y.astype(jnp.float32) + shared.astype(jnp.float32)
    return zero_padding(total, padding_mask).astype(y.dtype)
