"""Host buffers of the parameters this process holds: written expert by expert, in kernel layout,
and then handed to the devices.

There is one set of buffers for each range of experts, that is a device's, or several devices' where
other mesh axes replicate it. A buffer is made when its field is first written, aligned so that a
CPU device takes it without a copy.
"""

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jax_megamoe import _checks
from jax_megamoe._files import aligned
from jax_megamoe.config import ExpertSpec, check_config
from jax_megamoe.mesh import axis_names
from jax_megamoe.weights import layout as layouts
from jax_megamoe.weights.checkpoint.dialects import SHARED
from jax_megamoe.weights.packed import PACKED_LAYOUTS
from jax_megamoe.weights.params import ExpertMatrices, ExpertWeights, parameter_shapes
from jax_megamoe.weights.requantize import QuantizedMatrix

Range = tuple[int, int]
"""First and last + 1 entry of a field's leading axis: experts, or a shared expert's rows."""


@dataclass(frozen=True)
class Placement:
    """Which physical experts this process holds, and on which devices.

    Attributes:
        routed: sharding of the routed parameters; None: the default device, uncommitted.
        shared: sharding of a fused shared expert's.
        held: int [num_experts], the logical expert of each physical slot.
    """

    routed: Sharding | None
    shared: Sharding | None
    held: np.ndarray

    def ranges(self, part: str, size: int) -> dict[Range, list[jax.Device | None]]:
        """This process's devices by range of the leading axis of a part's arrays; [None] for the
        default one.
        """
        sharding: Sharding | None = getattr(self, part)
        if sharding is None:
            return {(0, size): [None]}
        ranges: dict[Range, list[jax.Device | None]] = defaultdict(list)
        for device, index in sharding.addressable_devices_indices_map((size,)).items():
            assert index is not None  # the mesh has every device
            start, stop, _ = index[0].indices(size)
            ranges[start, stop].append(device)
        return dict(ranges)

    def to_devices(
        self, part: str, shape: tuple[int, ...], read: Callable[[Range], np.ndarray]
    ) -> jax.Array:
        """A field on its devices.

        Args:
            part: the field's, ``"routed"`` or ``"shared"``.
            shape: of the whole.
            read: its entries in a range of the leading axis.
        """
        sharding: Sharding | None = getattr(self, part)
        ranges = self.ranges(part, shape[0])
        if sharding is None:
            return jax.device_put(read(next(iter(ranges))))
        arrays: list[jax.Array] = []
        for entries, devices in ranges.items():
            held = read(entries)
            arrays += [jax.device_put(held, device) for device in devices]
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)

    @cached_property
    def slots(self) -> dict[int, list[tuple[Range, int]]]:
        """Where each logical expert that this process holds goes: range and index within it."""
        slots: dict[int, list[tuple[Range, int]]] = defaultdict(list)
        for start, stop in self.ranges("routed", self.held.size):
            for physical in range(start, stop):
                slots[int(self.held[physical])].append(((start, stop), physical - start))
        return dict(slots)


def place(
    config: ExpertSpec,
    mesh: Mesh | None,
    axis: str | tuple[str, ...] | None,
    physical_to_logical: np.ndarray | None = None,
) -> Placement:
    """The placement of a config's experts: split evenly over the mesh axis.

    Raises:
        ValueError: a mesh without an axis or the reverse, an axis that the mesh has not, experts
            that do not divide by it, or ids in `physical_to_logical` out of range.
        TypeError: a config of another kind.
    """
    check_config(config, ExpertSpec)
    if (mesh is None) != (axis is None):
        got = f"mesh {'None' if mesh is None else 'given'}, axis {axis!r}"
        raise ValueError(_checks.message("mesh and axis", "both or neither", got))
    held = np.arange(config.num_experts) % config.logical_experts
    if physical_to_logical is not None:
        held = np.asarray(physical_to_logical)
        _checks.shape("physical_to_logical", held, (config.num_experts,))
        if held.min() < 0 or held.max() >= config.logical_experts:
            expected = f"ids in [0, {config.logical_experts})"
            raise ValueError(_checks.message("physical_to_logical", expected, held.tolist()))
    if mesh is None or axis is None:
        return Placement(None, None, held)
    names = axis_names(axis)
    for name in names:
        _checks.one_of("axis", name, mesh.axis_names)
    config.experts_per_rank(int(np.prod([mesh.shape[name] for name in names])))
    routed = NamedSharding(mesh, PartitionSpec(axis))
    return Placement(routed, NamedSharding(mesh, PartitionSpec()), held)


def placement_of(weights: ExpertWeights, placement: Placement) -> Placement:
    """`placement` on the devices that existing parameters are on."""
    shared = weights.shared
    return replace(
        placement,
        routed=_sharding_of(weights.routed.w13_weight),
        shared=None if shared is None else _sharding_of(shared.w13_weight),
    )


def _sharding_of(array: jax.Array) -> Sharding | None:
    return array.sharding if array.committed else None


class ParameterBuffers:
    """Buffers for the parameters of `config` at `placement`.

    Args:
        config: the layer.
        placement: where its experts are.
        layout: row order of w13.
        initial: parameters that untouched entries come from; None: there are none.

    Threads may write different experts, or different projections of one, at the same time.
    """

    def __init__(
        self,
        config: ExpertSpec,
        placement: Placement,
        layout: str,
        initial: ExpertWeights | None = None,
    ) -> None:
        self._config = config
        self._placement = placement
        self._layout = layout
        self._initial = initial
        self._shapes = parameter_shapes(config, layout=layout, has_biases=True)
        # Rows are written one by one, without the tiles in which some layouts hold them; packed
        # layouts are written a matrix at a time.
        by_row = layout if layout in PACKED_LAYOUTS else layouts.INTERLEAVE8.name
        self._row_shapes = parameter_shapes(config, layout=by_row, has_biases=True)
        self._buffers: dict[_Field, dict[Range, np.ndarray]] = {}
        self._lock = threading.Lock()

    def write_matrix(self, expert: int, part: str, matrix: QuantizedMatrix) -> int:
        """Writes a quantised projection, rows in checkpoint order.

        Args:
            expert: a logical expert, or `SHARED`.
            part: ``gate``, ``up``, ``down``, or ``gate_up`` (gate rows first); in a packed layout
                ``down`` or ``gate_up``.
            matrix: the rows of that part.

        Returns:
            Weights that are other numbers than before; 0 but in a packed layout.
        """
        if expert != SHARED and self._layout in PACKED_LAYOUTS:
            return self._write_packed(expert, part, matrix)
        name = "w2_weight" if part == "down" else "w13_weight"
        order = self._order(expert, part)
        weight = np.asarray(matrix.weight)
        for target in self._targets(name, expert):
            target[order.rows] = weight
        if matrix.scale is not None:
            scale = np.asarray(matrix.scale)
            for target in self._targets(f"{name}_scale", expert):
                if target.dtype == np.float32:
                    target[order.blocks(target.shape[0])] = scale
                else:
                    words = np.ascontiguousarray(scale).view(np.int32)
                    target[:, order.scale_columns] = words.T
        if matrix.global_scale is not None:
            self.write_scalar(f"{name}_scale_2", expert, matrix.global_scale)
        return 0

    def _write_packed(self, expert: int, part: str, matrix: QuantizedMatrix) -> int:
        name = "w2_weight" if part == "down" else "w13_weight"
        outer = matrix.global_scale
        stored, factor, rounded = PACKED_LAYOUTS[self._layout].packed(
            np.asarray(matrix.weight),
            np.asarray(matrix.scale),
            w13=part != "down",
            global_scale=None if outer is None else np.asarray(outer),
        )
        for target in self._targets(name, expert):
            target[...] = stored
        self.write_scalar(f"{name}_scale_2", expert, factor)
        return int(rounded)

    def write_scalar(self, field: str, expert: int, value: np.ndarray | jax.Array | None) -> None:
        """Writes one number of an expert into a field of shape [E]."""
        for target in self._targets(field, expert):
            target[...] = value

    def write_bias(self, expert: int, part: str, values: np.ndarray) -> None:
        """Writes a projection's bias, float32, in checkpoint order."""
        name = "w2_bias" if part == "down" else "w13_bias"
        rows = self._order(expert, part).rows
        for target in self._targets(name, expert):
            target[rows] = values

    def fill(self, name: str, value: float) -> None:
        """Sets a field of all routed experts, unless something was written to it or it has initial
        values.
        """
        field = ("routed", name)
        if field not in self._buffers and self._initial is None:
            for buffer in self._field_buffers(field).values():
                buffer[...] = value

    def finish(self) -> ExpertWeights:
        """The parameters on their devices; the buffers are given up one field after another."""
        arrays: dict[str, dict[str, Any]] = {"routed": {}, "shared": {}}
        for part, name in list(self._buffers):
            arrays[part][name] = self._placed((part, name))
        if self._initial is not None:
            parts = self._initial.parts
            changed = {part: replace(parts[part], **arrays[part]) for part in parts}
            return replace(self._initial, **changed)
        shared = ExpertMatrices(**arrays["shared"]) if arrays["shared"] else None
        form = self._config.weight_format.name
        return ExpertWeights(ExpertMatrices(**arrays["routed"]), shared, form, self._layout)

    def _placed(self, field: "_Field") -> jax.Array:
        buffers = self._buffers.pop(field)
        shape = _array(self._shapes, field).shape

        def read(entries: Range) -> np.ndarray:
            return buffers[entries].reshape(-1, *shape[1:])

        return self._placement.to_devices(field[0], shape, read)

    def _targets(self, name: str, expert: int) -> Iterable[np.ndarray]:
        if expert == SHARED:
            return list(self._field_buffers(("shared", name)).values())
        buffers = self._field_buffers(("routed", name))
        return [buffers[range_][slot, ...] for range_, slot in self._placement.slots[expert]]

    def _field_buffers(self, field: "_Field") -> dict[Range, np.ndarray]:
        with self._lock:
            if field not in self._buffers:
                self._buffers[field] = self._made(field)
            return self._buffers[field]

    def _made(self, field: "_Field") -> dict[Range, np.ndarray]:
        struct = _array(self._shapes, field)
        before = None
        if self._initial is not None:
            before = _array(self._initial, field)
            if before is None:
                expected = "parameters that have it already"
                hint = "load all experts anew"
                name = f"initial.{'.'.join(field)}"
                raise ValueError(_checks.message(name, expected, None, hint))
        shape = _array(self._row_shapes, field).shape
        buffers = {
            (start, stop): _empty((stop - start, *shape[1:]), struct.dtype)
            for start, stop in self._placement.ranges(field[0], struct.shape[0])
        }
        for shard in () if before is None else before.addressable_shards:
            start, stop, _ = shard.index[0].indices(struct.shape[0])
            buffer = buffers[start, stop]
            np.copyto(buffer, np.asarray(shard.data).reshape(buffer.shape))
        return buffers

    def _order(self, expert: int, part: str) -> "_Order":
        config = self._config
        if part == "down":
            return _order(None, config.hidden_size, part)
        if expert == SHARED:
            return _order(layouts.INTERLEAVE8.name, 2 * config.shared_size, part)
        return _order(self._layout, 2 * config.intermediate_size, part)


@dataclass(frozen=True)
class _Order:
    """Where the checkpoint rows of a part go.

    Attributes:
        part: of the expert.
        rows: index of each row in the weight.
        scale_columns: index of each row among the columns of the scale words.
    """

    part: str
    rows: np.ndarray | slice
    scale_columns: np.ndarray

    def blocks(self, size: int) -> slice:
        """Rows of the part among `size` rows of float32 scales, gate's before up's."""
        return _half(self.part, size)


@lru_cache
def _order(layout: str | None, rows: int, part: str) -> _Order:
    """The order of w13's rows in `layout`, or of w2's (None): the layout functions applied to the
    numbers of the rows.
    """
    numbers = np.arange(rows, dtype=np.int32)[:, None]
    octets = numbers.view(np.uint8)
    if layout is None:
        words = np.asarray(layouts.w2_scale_to_kernel(octets))
        return _Order(part, slice(None), np.argsort(words[0]))
    weight = layouts.w13_to_kernel(numbers, layout)
    words = np.asarray(layouts.w13_scale_to_kernel(octets, layout))
    half = _half(part, rows)
    return _Order(part, np.argsort(weight[:, 0])[half], np.argsort(words[0])[half])


def _half(part: str, size: int) -> slice:
    halves = {"gate": slice(0, size // 2), "up": slice(size // 2, None)}
    return halves.get(part, slice(None))


_Field = tuple[str, str]
"""Part and name of a field, such as ``("routed", "w13_weight")``."""


def _array(weights: ExpertWeights, field: _Field) -> Any:
    """What the field holds; None without its part."""
    part, name = field
    return getattr(getattr(weights, part), name, None)


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return aligned(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
