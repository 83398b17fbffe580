"""Variables of the modules: where they lie, which are trained, and what they hold."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jax_megamoe import _checks
from jax_megamoe.weights.params import MATRIX_FIELDS, ExpertMatrices


class ExpertVariable(nnx.Variable):
    """An array of experts that is held constant: a matrix, its scales, a bias, a replica map.

    It is no `nnx.Param`, so gradients and optimisers pass it over unless told otherwise.
    """


class Buffer(nnx.Variable):
    """A value that is loaded and not trained: a router's correction bias or table."""


class MatrixVariables(nnx.Module):
    """An `ExpertMatrices` as a module: each array is an `ExpertVariable` of the same name."""

    w13_weight: Any
    w2_weight: Any
    w13_weight_scale: Any
    w2_weight_scale: Any
    w13_weight_scale_2: Any
    w2_weight_scale_2: Any
    w2_input_scale: Any
    w13_bias: Any
    w2_bias: Any

    def __init__(
        self,
        matrices: ExpertMatrices,
        specs: ExpertMatrices | None = None,
        mesh: Mesh | AbstractMesh | None = None,
    ) -> None:
        """Makes the module.

        Args:
            matrices: the arrays.
            specs: a PartitionSpec for each; None: they are on one device.
            mesh: what the specs refer to.
        """
        for name in MATRIX_FIELDS:
            array, variable = getattr(matrices, name), None
            if array is not None and specs is None:
                variable = ExpertVariable(array)
            elif array is not None:
                # nnx takes the empty spec of a replicated array for none at all.
                spec = tuple(getattr(specs, name)) or (None,) * array.ndim
                variable = ExpertVariable(array, out_sharding=spec, mesh=mesh)
            setattr(self, name, variable)

    def matrices(self, read: Callable[[ExpertVariable], Any]) -> ExpertMatrices:
        """The same tree with what `read` makes of each variable."""
        named = {name: getattr(self, name) for name in MATRIX_FIELDS}
        return ExpertMatrices(
            **{name: None if each is None else read(each) for name, each in named.items()}
        )


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
        array: its value. Each process places its own copy of a NumPy array: all must be equal.
        mesh: the devices.
        kind: the class of the variable.
    """
    if mesh is None:
        return kind(jnp.asarray(array))
    if isinstance(array, np.ndarray):
        sharding = NamedSharding(mesh, PartitionSpec())
        array = jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    return kind(array, out_sharding=(None,) * array.ndim, mesh=mesh)


def put(variable: nnx.Variable[Any], array: Any) -> None:
    """Replaces a variable's array, on the devices that it is on."""
    old = variable.get_value()
    is_placed = isinstance(old, jax.Array) and not isinstance(old, Tracer) and old.committed
    if is_placed or (getattr(old, "sharding", None) is not None and not isinstance(old, jax.Array)):
        array = jax.device_put(array, old.sharding)
    variable.set_value(jnp.asarray(array))
