"""Mesh axes: their names, and arrays over Explicit and manual axes."""

import math
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

Axis = str | tuple[str, ...]
"""One mesh axis, or several that are taken together, the last varying fastest."""


def axis_names(axis: Axis | None) -> tuple[str, ...]:
    """The names of one axis, of several, or of none."""
    return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)


def has_explicit_axes(mesh: Mesh | AbstractMesh) -> bool:
    """Whether JAX types arrays by their sharding over an axis of this mesh."""
    return AxisType.Explicit in mesh.axis_types


def current_mesh(axis: Axis | None) -> Mesh | AbstractMesh | None:
    """The mesh of `jax.set_mesh`, if it has the axis and nobody is inside `shard_map` over it.

    Inside a trace it has no devices.
    """
    context, names = jax.sharding.get_abstract_mesh(), set(axis_names(axis))
    if not names or not names <= set(context.shape) or names & set(context.manual_axes):
        return None
    try:
        return jax.sharding.get_mesh()
    except ValueError:  # JAX does not say otherwise whether this is a trace
        return context


def reshard(tree: Any, mesh: Mesh | AbstractMesh, specs: Any) -> Any:
    """A tree of arrays laid out as `specs`, a tree prefix, where axes of `mesh` are Explicit.

    Over Auto axes the tree is returned as it is: there the compiler chooses layouts.
    """
    if not has_explicit_axes(mesh):
        return tree

    def each(spec: PartitionSpec, arrays: Any) -> Any:
        return jax.tree.map(lambda a: jax.reshard(a, NamedSharding(mesh, spec)), arrays)

    return jax.tree.map(each, specs, tree, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))


def explicit_mesh(tree: Any) -> AbstractMesh | None:
    """The mesh with Explicit axes that an array of the tree is typed by; None without one."""
    meshes = (jax.typeof(array).sharding.mesh for array in jax.tree.leaves(tree))
    return next((mesh for mesh in meshes if has_explicit_axes(mesh)), None)


def gathered(tree: Any) -> Any:
    """A tree of arrays whose Explicit axes are gathered, so that any index reaches every value."""
    return jax.tree.map(lambda a: reshard(a, jax.typeof(a).sharding.mesh, PartitionSpec()), tree)


def reshape_rows(array: Any, shape: tuple[int, ...]) -> Any:
    """`array.reshape(shape)` where leading axes become one or one becomes several.

    Over Explicit axes, JAX must be told: the first axis stays split as it is where its new size
    allows, else the array is gathered.
    """
    sharding = jax.typeof(array).sharding
    if array.shape == shape or not has_explicit_axes(sharding.mesh):
        return array.reshape(shape)
    spec = sharding.spec[:1]
    names = [name for entry in spec for name in axis_names(entry)]
    if shape[0] % math.prod(sharding.mesh.shape[name] for name in names):
        spec = ()
    array = reshard(array, sharding.mesh, PartitionSpec(*spec))
    return lax.reshape(
        array, shape, out_sharding=NamedSharding(sharding.mesh, PartitionSpec(*spec))
    )


def varying_axes(array: Any) -> frozenset[str]:
    """Manual mesh axes that `array` varies over; empty outside `shard_map`."""
    return jax.typeof(array).manual_axis_type.varying


def vary(array: Any, axes: frozenset[str]) -> Any:
    """`array`, varying over all of `axes`: `ffi_call` needs operands to agree, and does not mark
    its results."""
    missing = tuple(sorted(axes - varying_axes(array)))
    return lax.pcast(array, missing, to="varying") if missing else array
