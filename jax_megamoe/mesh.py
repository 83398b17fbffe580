"""Mesh axes: their names, and arrays over Explicit and manual axes."""

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


def reshard(tree: Any, mesh: Mesh | AbstractMesh, specs: Any) -> Any:
    """A tree of arrays laid out as `specs`, a tree prefix, where axes of `mesh` are Explicit.

    Over Auto axes the tree is returned as it is: there the compiler chooses layouts.
    """
    if not has_explicit_axes(mesh):
        return tree

    def each(spec: PartitionSpec, arrays: Any) -> Any:
        return jax.tree.map(lambda a: jax.reshard(a, NamedSharding(mesh, spec)), arrays)

    return jax.tree.map(each, specs, tree, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))


def gathered(tree: Any) -> Any:
    """A tree of arrays whose Explicit axes are gathered, so that any index reaches every value."""
    return jax.tree.map(lambda a: reshard(a, jax.typeof(a).sharding.mesh, PartitionSpec()), tree)


def varying_axes(array: Any) -> frozenset[str]:
    """Manual mesh axes that `array` varies over; empty outside `shard_map`."""
    return jax.typeof(array).manual_axis_type.varying


def vary(array: Any, axes: frozenset[str]) -> Any:
    """`array`, varying over all of `axes`: `ffi_call` needs operands to agree, and does not mark
    its results."""
    missing = tuple(sorted(axes - varying_axes(array)))
    return lax.pcast(array, missing, to="varying") if missing else array
