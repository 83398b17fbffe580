"""Variables that every device of a mesh has a copy of."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array


def replicated(
    array: Array | np.ndarray, mesh: Mesh | None, kind: type[nnx.Variable[Any]] = nnx.Param
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
