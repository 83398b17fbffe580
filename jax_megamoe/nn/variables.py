"""Variables of the modules: where they lie, which are trained, and what they hold."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jax_megamoe import _checks


class ExpertVariable(nnx.Variable):
    """An array of experts that is held constant: a matrix, its scales, a bias, a replica map.

    It is no `nnx.Param`, so gradients and optimisers pass it over unless told otherwise.
    """


class Buffer(nnx.Variable):
    """A value that is loaded and not trained: a router's correction bias or table."""


def held(variable: nnx.Variable[Any], name: str) -> Array:
    """The array of a variable.

    Args:
        variable: of a module.
        name: what messages call it.

    Raises:
        ValueError: it holds a shape alone, or an array that is no longer there.
    """
    value = variable.get_value()
    if isinstance(value, jax.ShapeDtypeStruct):
        expected = "arrays: call load(), put a state in, or make the module with rngs"
        raise ValueError(_checks.message(name, expected, "shapes alone"))
    if isinstance(value, jax.Array) and not isinstance(value, Tracer) and value.is_deleted():
        hint = "keep the state that the function which they were donated to returned, or load them"
        raise ValueError(_checks.message(name, "arrays", "deleted or donated ones", hint))
    return value


def replicated(
    array: Array | np.ndarray,
    mesh: Mesh | AbstractMesh | None,
    kind: type[nnx.Variable[Any]] = nnx.Param,
) -> nnx.Variable[Array]:
    """A variable of this kind, with a copy on every device of the mesh; None: the default device.

    Args:
        array: its value. Of a NumPy array each process places its own, which must be alike.
        mesh: the devices.
        kind: the class of the variable.
    """
    if mesh is None:
        return kind(jnp.asarray(array))
    if isinstance(array, np.ndarray):
        sharding = NamedSharding(mesh, PartitionSpec())
        array = jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    return kind(array, out_sharding=(None,) * array.ndim, mesh=mesh)
