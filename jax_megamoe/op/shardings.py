"""How many rows a call has, and how its arrays are split, as far as JAX says so."""

import logging
from functools import lru_cache
from typing import Any

import jax
from jax.core import Tracer
from jax.errors import InconclusiveDimensionOperation
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_megamoe import _checks
from jax_megamoe.config import MoEConfig
from jax_megamoe.mesh import Axis, axis_names, known_sharding
from jax_megamoe.op.transforms import Place
from jax_megamoe.weights.params import ExpertWeights

_log = logging.getLogger("jax_megamoe")


def check_num_tokens(num_tokens: int, config: MoEConfig, place: Place, pads: bool) -> None:
    """Checks the number of rows; a symbolic one, in jax.export, by its constraints."""
    if not isinstance(num_tokens, int) and place.num_ranks > 1:
        hint = "export a program for each number that is needed, or pad x to one"
        expected = "a number where experts are on several ranks"
        raise NotImplementedError(_checks.message("x rows", expected, num_tokens, hint))
    try:
        _check_rows(num_tokens, config, place, pads)
    except InconclusiveDimensionOperation as error:
        expected = f"a size with the constraint {num_tokens} <= {config.max_num_tokens}"
        hint = "pass it to jax.export.symbolic_shape(..., constraints=)"
        raise ValueError(_checks.message("x rows", expected, num_tokens, hint)) from error


def _check_rows(num_tokens: int, config: MoEConfig, place: Place, pads: bool) -> None:
    if not place.inside and not pads:
        _checks.multiple("x rows", num_tokens, place.num_parts, "pad x and mask the padding")
    rows = place.rows_of_rank(num_tokens)
    _checks.at_most("num_tokens", rows, config.max_num_tokens, "max_num_tokens")


def check_shardings(place: Place, tokens: dict[str, Any], weights: ExpertWeights) -> None:
    """Refuses inputs that JAX would gather silently: sharded in another way than the axis does.

    Sees what `known_sharding` does.
    """
    if place.inside:
        return
    allowed, rows = set(axis_names(place.axis)), set(axis_names(place.token_axes))
    over = "split over {} along the first dimension alone"
    hint = "name the axes in token_axes=, or call inside your own jax.shard_map"
    inner = "there is no tensor parallelism inside an expert"
    if not allowed:
        over, hint, inner = "one device's array", "pass mesh= and axis=", "pass mesh= and axis="
    for name, array in tokens.items():
        _check_sharding(name, array, rows, over.format(sorted(rows)), hint)
    over = over.format(sorted(allowed))
    for name, array in weights.routed.arrays().items():
        _check_sharding(f"weights.routed.{name}", array, allowed, over, inner)
    if weights.shared is None:
        return
    hint = "pass a sharded shared expert as the function shared_experts="
    for name, array in weights.shared.arrays().items():
        _check_sharding(f"weights.shared.{name}", array, set(), "a replicated array", hint)


def say_what_is_unseen(place: Place, x: Any) -> None:
    """Logs, once each, that x lies on a mesh over whose Auto axes JAX does not say how it is split:
    where the call does not split rows over them either, JAX gathers them.
    """
    if place.inside or not isinstance(x, Tracer):
        return
    mesh, rows = jax.typeof(x).sharding.mesh, axis_names(place.token_axes)
    kinds = zip(mesh.axis_names, mesh.axis_types, mesh.axis_sizes, strict=True)
    unseen = tuple(
        name
        for name, kind, size in kinds
        if kind == AxisType.Auto and size > 1 and name not in rows
    )
    if unseen:
        _log_unseen(unseen, place.axis)


@lru_cache
def _log_unseen(unseen: tuple[str, ...], axis: Axis | None) -> None:
    if axis is None:
        level, hint = logging.WARNING, "pass mesh= and axis="
    else:  # every group does all work, as the manual says: wanted where x is no more split
        level, hint = logging.INFO, "name them in token_axes="
    text = "x lies on a mesh with the axes %s, which the call does not name: if its rows are split "
    text += "over them, JAX gathers the rows and every device computes all of them; %s"
    _log.log(level, text, list(unseen), hint)


def _check_sharding(name: str, array: Any, allowed: set[str], expected: str, hint: str) -> None:
    spec = _spec(array)
    used = {axis for entry in spec[:1] for axis in entry}
    if used - allowed or any(spec[1:]):
        raise ValueError(_checks.message(name, expected, f"sharding {spec}", hint))


def _spec(array: Any) -> tuple[tuple[str, ...], ...]:
    """The known partition spec of an array over axes of more than one device, or ()."""
    sharding = known_sharding(array)
    if sharding is None:
        return ()
    sizes = sharding.mesh.shape
    return tuple(
        tuple(axis for axis in _names(entry) if sizes[axis] > 1) for entry in sharding.spec
    )


def _names(entry: Any) -> tuple[str, ...]:
    """Axes in one entry of a PartitionSpec, or in an `Axis`."""
    if entry is None or entry is P.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)
