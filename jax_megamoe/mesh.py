"""Mesh axes: their names, and arrays over Explicit and manual axes; the devices of a mesh."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_megamoe import _checks

Axis = str | tuple[str, ...]
"""One mesh axis, or several that are taken together, the last varying fastest."""


def check_mesh(mesh: object, **axes: object) -> None:
    """Checks the kinds of a mesh and of axes under their names; None is right for each.

    Raises:
        TypeError: no mesh, or an axis that is neither a name nor several.
    """
    if not isinstance(mesh, Mesh | AbstractMesh | None):
        raise TypeError(_checks.message("mesh", "a jax.sharding.Mesh", type(mesh).__name__))
    for argument, axis in axes.items():
        names = axis if isinstance(axis, tuple | list) else () if axis is None else (axis,)
        if not all(isinstance(name, str) for name in names):
            expected = "the name of a mesh axis, or a tuple of names"
            raise TypeError(_checks.message(argument, expected, repr(axis)))


def mesh_here(mesh: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh:
    """The mesh that a call with this one works on; None: the current one.

    Inside `shard_map` over some axes of a mesh JAX takes that mesh as it is there, not the one
    with devices.
    """
    context = jax.sharding.get_abstract_mesh()
    if mesh is None or (context.manual_axes and context.shape == mesh.shape):
        return context
    return mesh


def axis_names(axis: Axis | None) -> tuple[str, ...]:
    """The names of one axis, of several, or of none."""
    return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)


def default_device() -> jax.Device:
    """The device of calls without an axis, where the arrays name none."""
    chosen: jax.Device | str | None = getattr(jax.config, "jax_default_device")
    if isinstance(chosen, jax.Device):
        return chosen
    return jax.local_devices(backend=chosen)[0]


def device_of(mesh: Mesh | AbstractMesh | None) -> jax.Device:
    """A device of a mesh, whose devices are of one kind; without a mesh, or inside a trace, which
    has no devices, the default one."""
    return mesh.devices.flat[0] if isinstance(mesh, Mesh) else default_device()


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
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))

    def explicit(entry: Any) -> tuple[str, ...]:
        return tuple(name for name in axis_names(entry) if kinds[name] == AxisType.Explicit)

    def each(spec: PartitionSpec, arrays: Any) -> Any:
        # On a mesh of both kinds, reshard takes the Explicit axes alone.
        sharding = NamedSharding(mesh, PartitionSpec(*map(explicit, spec)))
        return jax.tree.map(lambda a: jax.reshard(a, sharding), arrays)

    return jax.tree.map(each, specs, tree, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))


def explicit_mesh(tree: Any) -> AbstractMesh | None:
    """The mesh with Explicit axes that an array of the tree is typed by; None without one."""
    meshes = (jax.typeof(array).sharding.mesh for array in jax.tree.leaves(tree))
    return next((mesh for mesh in meshes if has_explicit_axes(mesh)), None)


def gathered(tree: Any) -> Any:
    """A tree of arrays with gathered Explicit axes, so that any index reaches every value."""
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


def known_sharding(array: Any) -> NamedSharding | None:
    """How an array is split over a mesh, as far as JAX says so: of concrete arrays, and of traced
    ones over Explicit axes."""
    if isinstance(array, Tracer):
        sharding = jax.typeof(array).sharding
    else:
        sharding = getattr(array, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


class Split(NamedTuple):
    """How the first dimension of arrays is split: over these axes of a mesh."""

    mesh: Mesh | AbstractMesh
    axes: tuple[str, ...]

    @property
    def sharding(self) -> NamedSharding:
        """Of an array that is split so."""
        return NamedSharding(self.mesh, PartitionSpec(self.axes))


def split_of(tree: Any) -> Split | None:
    """How the first of the tree's arrays that is split along its first dimension alone is split, by
    its `known_sharding`; None without one."""
    for array in jax.tree.leaves(tree):
        sharding = known_sharding(array)
        if sharding is None or not sharding.spec:
            continue
        first, *others = sharding.spec
        is_named = isinstance(first, str | tuple) and not any(others)
        if is_named and not sharding.is_fully_replicated:
            return Split(sharding.mesh, axis_names(first))
    return None


def by_rows(
    function: Callable[..., Any], arrays: Any, *shared: Any, like: Any = None, **static: Any
) -> Any:
    """`function(arrays, *shared, **static)`, each device on its own rows: nothing is sent.

    Args:
        function: a module's own, which takes and returns trees of arrays [E, ...] (or [T, ...]) and
            treats each row alone.
        arrays: the tree; if an array is split along its first dimension (`split_of`), all are then,
            and the result is.
        *shared: trees of arrays that every row needs.
        like: arrays whose split counts where `arrays` have none.
        **static: hashable.
    """
    split = split_of((arrays, like))
    return _by_rows(arrays, shared, function, split, tuple(static.items()))


@partial(jax.jit, static_argnums=(2, 3, 4))
def _by_rows(
    arrays: Any,
    shared: tuple[Any, ...],
    function: Callable[..., Any],
    split: Split | None,
    static: tuple[tuple[str, Any], ...],
) -> Any:
    local = partial(function, **dict(static))
    if split is None:
        return local(arrays, *shared)
    rows, everywhere = split.sharding.spec, PartitionSpec()
    specs = (rows, *(everywhere for _ in shared))
    given = reshard((arrays, *shared), split.mesh, specs)
    return jax.shard_map(local, mesh=split.mesh, in_specs=specs, out_specs=rows)(*given)


def take_rows(array: Any, rows: Any, split: Split | None) -> Any:
    """`array[rows]`, the result split as `split` says."""
    return array[rows] if split is None else _take_rows(array, rows, split)


@partial(jax.jit, static_argnums=2)
def _take_rows(array: Any, rows: Any, split: Split) -> Any:
    if has_explicit_axes(split.mesh):
        return array.at[rows].get(out_sharding=split.sharding)
    return lax.with_sharding_constraint(array[rows], split.sharding)


def varying_axes(array: Any) -> frozenset[str]:
    """Manual mesh axes that `array` varies over; empty outside `shard_map`."""
    return jax.typeof(array).manual_axis_type.varying


def vary(array: Any, axes: frozenset[str]) -> Any:
    """`array`, varying over all of `axes`: `ffi_call` needs operands to agree, and does not mark
    its results."""
    missing = tuple(sorted(axes - varying_axes(array)))
    return lax.pcast(array, missing, to="varying") if missing else array
