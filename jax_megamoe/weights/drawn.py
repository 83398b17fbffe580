"""Random parameters in kernel layout, drawn where they are to be."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array

from jax_megamoe.config import ExpertSpec
from jax_megamoe.formats import INTERLEAVE_8, WEIGHT_FORMATS, WeightFormat
from jax_megamoe.mesh import Axis, axis_names
from jax_megamoe.weights import layout as layouts
from jax_megamoe.weights.experts import ROUNDED, expert_fields
from jax_megamoe.weights.params import ExpertMatrices, ExpertWeights, default_layout


def random_experts(
    config: ExpertSpec,
    key: Array,
    *,
    layout: str | None = None,
    has_biases: bool = False,
    mesh: Mesh | AbstractMesh | None = None,
    axis: Axis | None = None,
) -> ExpertWeights:
    """Parameters drawn from a normal distribution of variance 1 / fan-in, made an expert at a time.

    They do not depend on the mesh, and each device of it makes its own experts alone.

    Args:
        config: the layer; with num_shared_experts a fused shared expert where the format has one.
        key: a JAX PRNG key.
        layout: row order of w13; None: the config's.
        has_biases: with biases, 0.
        mesh: shards the experts over `axis`; None: all are on one device.
        axis: the mesh axis, or axes.
    """
    layout = default_layout(config) if layout is None else layout
    fields = _random_routed(
        key, config=config, layout=layout, has_biases=has_biases, mesh=mesh, axis=axis
    )
    shared = None
    if config.num_shared_experts and config.shared_format is not None:
        shared = ExpertMatrices(**_random_shared(key, config=config, mesh=mesh))
    return ExpertWeights(ExpertMatrices(**fields), shared, config.weight_format.name, layout)


@partial(jax.jit, static_argnames=("config", "layout", "has_biases", "mesh", "axis"))
def _random_routed(
    key: Array,
    *,
    config: ExpertSpec,
    layout: str,
    has_biases: bool,
    mesh: Mesh | AbstractMesh | None,
    axis: Axis | None,
) -> dict[str, Array]:
    inter, hidden, form = config.intermediate_size, config.hidden_size, config.weight_format

    def slots(key: Array, first: int | Array, count: int) -> dict[str, Array]:
        keys = jax.random.split(key, config.logical_experts + 1)[1:]
        held = (first + jnp.arange(count, dtype=jnp.int32)) % config.logical_experts
        fields = _random(keys[held], inter, hidden, form, layout)
        fields.pop(ROUNDED, None)
        if config.recipe.activations.has_global_scale:
            fields["w2_input_scale"] = jnp.zeros(count, jnp.float32)
        if has_biases:
            zeros = jnp.zeros((count, 2 * inter), jnp.float32)
            fields["w13_bias"] = layouts.split_rows(zeros, layout, axis=-1)
            fields["w2_bias"] = jnp.zeros((count, hidden), jnp.float32)
        return fields

    if mesh is None or axis is None:
        return slots(key, 0, config.num_experts)
    local = config.experts_per_rank(math.prod(mesh.shape[name] for name in axis_names(axis)))

    def on_rank(key: Array) -> dict[str, Array]:
        return slots(key, lax.axis_index(axis) * local, local)

    rows = PartitionSpec(axis)
    return jax.shard_map(on_rank, mesh=mesh, in_specs=PartitionSpec(), out_specs=rows)(key)


@partial(jax.jit, static_argnames=("config", "mesh"))
def _random_shared(
    key: Array, *, config: ExpertSpec, mesh: Mesh | AbstractMesh | None
) -> dict[str, Array]:
    form = WEIGHT_FORMATS[config.shared_format or ""]

    def draw(key: Array) -> dict[str, Array]:
        keys = jax.random.split(key, config.logical_experts + 1)[:1]
        one = _random(keys, config.shared_size, config.hidden_size, form, INTERLEAVE_8)
        return {name: array[0] for name, array in one.items()}

    if mesh is None:
        return draw(key)
    # Every device draws its copy: the key may be on one device, of which reshard makes no more.
    everywhere = PartitionSpec()
    return jax.shard_map(draw, mesh=mesh, in_specs=everywhere, out_specs=everywhere)(key)


def _random(
    keys: Array, inter: int, hidden: int, form: WeightFormat, layout: str
) -> dict[str, Array]:
    def one(key: Array) -> dict[str, Array]:
        first, second = jax.random.split(key)
        w13 = jax.random.normal(first, (2 * inter, hidden), jnp.float32) * hidden**-0.5
        w2 = jax.random.normal(second, (hidden, inter), jnp.float32) * inter**-0.5
        return expert_fields(w13, w2, form, layout)

    return lax.map(one, keys)
