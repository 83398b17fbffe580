"""From a checkpoint's tensors to this process's experts in kernel layout, streamed.

Tensors are sorted by expert and projection (`gather`), each projection is brought to the layer's
format on its own (`requantize`) and written where its replicas are (`buffers`). Peak host memory is
the parameters plus the projections in flight, at most one expert's three. Files are read by slices,
other ranks' experts not at all.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, cast

import numpy as np
from jax.sharding import Mesh

from jax_megamoe import _checks
from jax_megamoe.config import ExpertSpec
from jax_megamoe.formats import GROUPED_LAYOUTS, INTERLEAVE_8, WEIGHT_FORMATS, WeightFormat
from jax_megamoe.weights.checkpoint.buffers import ParameterBuffers, place, placement_of
from jax_megamoe.weights.checkpoint.dialects import SHARED, Dialect, Role
from jax_megamoe.weights.checkpoint.families import GateUpOrder
from jax_megamoe.weights.checkpoint.gather import Gathering, Key
from jax_megamoe.weights.checkpoint.header import StoredTensor
from jax_megamoe.weights.checkpoint.progress import progress_bar
from jax_megamoe.weights.checkpoint.projection import (
    Cache,
    Projection,
    bias,
    gate_and_up,
    scalar,
)
from jax_megamoe.weights.checkpoint.select import (
    read_gate_up_order,
    read_quantization_config,
    stored_scheme,
)
from jax_megamoe.weights.checkpoint.tensors import Checkpoint, HeldTensor
from jax_megamoe.weights.folded_biases import folded_as, unfold_biases
from jax_megamoe.weights.packed import PACKED_LAYOUTS, log_rounded
from jax_megamoe.weights.params import (
    ExpertWeights,
    check_weights,
    default_layout,
    known_layouts,
)
from jax_megamoe.weights.regroup import as_grouped, in_rows
from jax_megamoe.weights.relayout import to_layout
from jax_megamoe.weights.requantize import QuantizedMatrix, concatenated, requantize

Pairs = Iterable[tuple[str, Any]] | Mapping[str, Any]

_IN_FLIGHT = 3
_LISTED = 8


def load_experts(
    config: ExpertSpec,
    checkpoint: str | Path | Checkpoint | Pairs,
    *,
    prefix: str,
    mesh: Mesh | None = None,
    axis: str | tuple[str, ...] | None = None,
    quantization_config: Mapping[str, Any] | None = None,
    progress: bool = True,
    gate_up_order: GateUpOrder | None = None,
    stored_sizes: tuple[int, int] | None = None,
    layout: str | None = None,
) -> ExpertWeights:
    """One layer's experts from a checkpoint, in the config's format and kernel layout.

    Args:
        config: the layer. With fewer logical than physical experts, slot p gets logical expert
            p % num_logical_experts. With num_shared_experts, the shared expert is loaded too and
            fused, if the format fuses one.
        checkpoint: a folder of safetensors files, such a file, one opened, or (name, array) pairs.
        prefix: of the experts' names, such as ``model.layers.3.mlp.experts``.
        mesh: shards the experts over `axis`; None: all experts on the default device.
        axis: the mesh axis, or axes.
        quantization_config: the checkpoint's; None: read from its folder, if it is one.
        progress: whether to show a bar (on process 0).
        gate_up_order: how gate and up rows follow each other in tensors with both: ``"halves"`` or
            ``"alternating"``; None: as in the model that a config.json beside the checkpoint names,
            else as GPT-OSS's biases or blocks show, else gate rows first in stacks [E, 2I, H];
            stacks [E, H, 2I] without any of that are refused.
        stored_sizes: hidden and intermediate size of the checkpoint, where the config's are those
            rounded up: the rest is filled with zeros.
        layout: of the parameters, see `to_layout`; None: what the config's kernels read. Layouts
            of the grouped products are made on the devices, from `interleave8`.

    Raises:
        ValueError: a tensor missing, unknown, there twice or of a wrong shape; a value or scale
            that is not finite; global scales of gate and up that differ; experts that do not divide
            by the axis; gate and up in an order that is not known; a config.json that is malformed.
        TypeError: a tensor of a wrong dtype.
        NotImplementedError: a scheme that does not run, such as packed int4.
        FileNotFoundError: no such folder or file, or a shard that the index names is absent.
    """
    loader = ExpertLoader(
        config,
        prefix=prefix,
        mesh=mesh,
        axis=axis,
        gate_up_order=gate_up_order,
        stored_sizes=stored_sizes,
        layout=layout,
    )
    if not isinstance(checkpoint, str | Path | Checkpoint):
        stored_scheme(quantization_config, prefix)
        loader.add(checkpoint, progress=progress)
        return loader.finish()
    source = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
    if quantization_config is None:
        quantization_config = read_quantization_config(source.path)
    modules = Dialect(prefix, config.logical_experts, shared=False).modules(source.files)
    stored_scheme(quantization_config, prefix, modules)
    loader.read(source, progress=progress)
    return loader.finish()


def reload_experts(
    config: ExpertSpec,
    weights: ExpertWeights,
    checkpoint: str | Path | Checkpoint | Pairs,
    *,
    prefix: str,
    physical_to_logical: np.ndarray | None = None,
    gate_up_order: GateUpOrder | None = None,
    stored_sizes: tuple[int, int] | None = None,
    progress: bool = False,
) -> ExpertWeights:
    """Parameters with what the checkpoint holds in place of theirs, on the same devices.

    For weight updates: all tensors of the layer or a few, but a weight with its scales, and NVFP4's
    gate with its up. `weights` are not changed, nor are fields that nothing came for copied.

    Args:
        config: the layer.
        weights: its parameters.
        checkpoint: see `load_experts`, as for the other arguments.
        prefix: of the experts' names.
        physical_to_logical: int [num_experts], the logical expert that each slot holds after a
            rebalance; None: p % num_logical_experts.
        gate_up_order: see `load_experts`.
        stored_sizes: see `load_experts`.
        progress: whether to show a bar.

    Raises:
        ValueError, TypeError, NotImplementedError, FileNotFoundError: as `load_experts`.
    """
    loader = ExpertLoader(
        config,
        prefix=prefix,
        gate_up_order=gate_up_order,
        stored_sizes=stored_sizes,
        initial=unfold_biases(weights),
        physical_to_logical=physical_to_logical,
    )
    if isinstance(checkpoint, str | Path | Checkpoint):
        loader.read(checkpoint, progress=progress)
    else:
        loader.add(checkpoint, progress=progress)
    return folded_as(weights, config, loader.finish())


class ExpertLoader:
    """Takes one layer's tensors in any order and over any number of calls.

    A weight and its scale may come in different calls; every tensor comes once. `finish` says what
    is missing, or returns the parameters. After an error the loader is of no use; parameters it
    started from are never changed.

    Args:
        config: the layer.
        prefix: see `load_experts`, as for the other arguments.
        initial: parameters to update: what comes replaces theirs, the rest stays.
        physical_to_logical: int [num_experts], the logical expert in each slot, after a rebalance.
    """

    def __init__(
        self,
        config: ExpertSpec,
        *,
        prefix: str,
        mesh: Mesh | None = None,
        axis: str | tuple[str, ...] | None = None,
        gate_up_order: GateUpOrder | None = None,
        stored_sizes: tuple[int, int] | None = None,
        initial: ExpertWeights | None = None,
        physical_to_logical: np.ndarray | None = None,
        layout: str | None = None,
    ) -> None:
        self._config = config
        self._prefix = prefix
        placement = place(config, mesh, axis, physical_to_logical)
        if initial is not None:
            check_weights(config, initial)
            placement, layout = placement_of(initial, placement), initial.layout
        elif layout is not None:
            _checks.one_of("layout", layout, known_layouts(config))
        self._has_shared = bool(config.num_shared_experts and config.shared_format)
        self._local = set(placement.slots)
        self._gathering = Gathering(
            config,
            Dialect(prefix, config.logical_experts, shared=self._has_shared),
            self._local | ({SHARED} if self._has_shared else set()),
            stored_sizes=stored_sizes or (config.hidden_size, config.intermediate_size),
            gate_up_order=gate_up_order,
        )
        # Experts for the grouped products are written in rows, and converted by the devices.
        self._grouped = layout if layout in GROUPED_LAYOUTS else None
        self._layout = INTERLEAVE_8 if self._grouped else layout or default_layout(config)
        self._initial, before = initial, initial and in_rows(initial)
        self._buffers = ParameterBuffers(config, placement, self._layout, before)
        self._rounded: list[int] = []

    def add(self, pairs: Pairs, *, progress: bool = False) -> None:
        """Takes (name, array) pairs; names outside the prefix are passed over.

        Raises:
            as `load_experts`.
        """
        items = pairs.items() if isinstance(pairs, Mapping) else pairs
        with progress_bar(progress, self._prefix, None) as advance:
            for name, array in cast(Iterable[tuple[str, Any]], items):
                role = self._gathering.role(name)
                if role is None:
                    continue
                tensor = HeldTensor(name, _checked_array(name, array))
                for key in self._gathering.take(tensor, role):
                    self._convert_ready(key)
                advance(array.size * array.dtype.itemsize)
            self._write_small()

    def read(
        self, checkpoint: str | Path | Checkpoint, *, partial: bool = False, progress: bool = False
    ) -> None:
        """Reads this process's experts from a folder or file, several projections at a time.

        Args:
            checkpoint: the folder or file, or one that was opened.
            partial: whether more is to come; else what is missing is an error before any tensor is
                read.
            progress: whether to show a bar.

        Raises:
            as `load_experts`.
        """
        source = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
        self._gathering.use_order(read_gate_up_order(source.path))
        for tensor, role in self._stored(source):
            self._gathering.take(tensor, role)
        if not partial:
            self._check_complete(range(self._config.logical_experts))
        groups = self._groups()
        total = sum(self._num_bytes(keys) for keys in groups)
        with progress_bar(progress, self._prefix, total) as advance:
            with ThreadPoolExecutor(min(_IN_FLIGHT, os.cpu_count() or 1)) as pool:
                futures = [pool.submit(self._convert, keys) for keys in groups]
                try:
                    for future in as_completed(futures):
                        advance(future.result())
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
            self._write_small()

    def finish(self) -> ExpertWeights:
        """The parameters.

        Raises:
            ValueError: what is missing: weights, scales, or the other of two global scales.
        """
        self._check_complete(sorted(self._local))
        if self._config.recipe.activations.has_global_scale:
            self._buffers.fill("w2_input_scale", 0.0)
        log_rounded(self._prefix, sum(self._rounded))
        weights = self._buffers.finish()
        if self._grouped is not None and self._initial is not None:
            weights = as_grouped(self._initial, weights)
        elif self._grouped is not None:
            weights = to_layout(weights, self._grouped)
        check_weights(self._config, weights)
        return weights

    def _stored(self, source: Checkpoint) -> Iterator[tuple[StoredTensor, Role]]:
        if not any(self._gathering.concerns(name) for name in source.files):
            expected = f"the beginning of names in {source.path}"
            raise ValueError(_checks.message("prefix", expected, repr(self._prefix)))
        for name in source.files:
            role = self._gathering.role(name)
            if role is not None:
                yield source.tensor(name), role
        for stray in source.strays():
            if self._gathering.role(stray.name) is not None:
                expected = "the index to name that file for it"
                where = f"{stray.name} in {stray.origin}"
                raise ValueError(_checks.message(where, expected, source.files.get(stray.name)))

    def _groups(self) -> list[list[Key]]:
        """What is converted together: gate and up, which may share a tensor or a scale; down."""
        groups: dict[tuple[int, bool], list[Key]] = {}
        for key in sorted(self._gathering.projections):
            if self._gathering.projections[key].missing is None:
                groups.setdefault((key[0], key[1] == "down"), []).append(key)
        return [keys for keys in groups.values() if self._suffices(keys)]

    def _suffices(self, keys: list[Key]) -> bool:
        """Whether the keys can be converted without waiting for others."""
        return len(keys) == 2 or keys[0][1] == "down" or not self._joint(keys[0][0])

    def _joint(self, expert: int) -> bool:
        """Whether gate and up need each other: they have one factor."""
        return self._form(expert).weight.has_global_scale or self._packed(expert)

    def _packed(self, expert: int) -> bool:
        return expert != SHARED and self._layout in PACKED_LAYOUTS

    def _form(self, expert: int) -> WeightFormat:
        if expert == SHARED and self._config.shared_format is not None:
            return WEIGHT_FORMATS[self._config.shared_format]
        return self._config.weight_format

    def _convert_ready(self, key: Key) -> None:
        """Converts the projection, and the one it needs, if both are complete."""
        expert, part = key
        keys: list[Key] = [key]
        if part != "down" and self._joint(expert):
            keys = [(expert, "gate"), (expert, "up")]
        projections = [self._gathering.projections.get(each) for each in keys]
        if all(each is not None and each.missing is None for each in projections):
            self._convert(keys)

    def _num_bytes(self, keys: list[Key]) -> int:
        projections = [self._gathering.projections[key] for key in keys]
        return sum(piece.num_bytes for each in projections for piece in each.pieces.values())

    def _convert(self, keys: list[Key]) -> int:
        """Brings complete projections to the layer's format and into the buffers.

        Returns:
            Bytes read.
        """
        num_bytes = self._num_bytes(keys)
        projections = {key: self._gathering.projections.pop(key) for key in keys}
        cache: Cache = {}
        expert = keys[0][0]
        if len(keys) == 2 and self._joint(expert):
            gate, up = projections.values()
            self._convert_joint(expert, gate, up, cache)
        else:
            for (_, part), projection in projections.items():
                matrix = requantize(projection.source(cache), self._form(expert))
                self._write(expert, part, matrix)
        return num_bytes

    def _write(self, expert: int, part: str, matrix: QuantizedMatrix) -> None:
        self._rounded.append(self._buffers.write_matrix(expert, part, matrix))

    def _convert_joint(self, expert: int, gate: Projection, up: Projection, cache: Cache) -> None:
        matrices = gate_and_up(expert, (gate, up), self._form(expert), cache)
        if len(matrices) == 2 and self._packed(expert):
            matrices = [concatenated(*matrices)]
        parts = ("gate", "up") if len(matrices) == 2 else ("gate_up",)
        for part, matrix in zip(parts, matrices, strict=True):
            self._write(expert, part, matrix)

    def _write_small(self) -> None:
        """Writes the biases and input scales that have come."""
        inter, hidden = self._config.intermediate_size, self._config.hidden_size
        cache: Cache = {}
        while self._gathering.biases:
            (expert, part), piece = self._gathering.biases.popitem()
            if expert == SHARED:
                expected = "no bias on a fused shared expert"
                raise NotImplementedError(_checks.message(piece.where, expected, "one"))
            values = bias(piece, hidden if part == "down" else inter, cache)
            self._buffers.write_bias(expert, part, values)
        while self._gathering.input_scales:
            expert, piece = self._gathering.input_scales.popitem()
            if expert != SHARED and self._config.recipe.activations.has_global_scale:
                self._buffers.write_scalar("w2_input_scale", expert, scalar(piece, cache))

    def _check_complete(self, experts: Iterable[int]) -> None:
        """Raises ValueError for everything that is missing of `experts`, listed."""
        self._gathering.check_order()
        lacking = self._gathering.incomplete(self._joint)
        if self._initial is None:
            lacking += self._gathering.absent([*experts, *([SHARED] if self._has_shared else [])])
        if lacking:
            more = f" and {len(lacking) - _LISTED} more" if len(lacking) > _LISTED else ""
            got = f"no {', no '.join(lacking[:_LISTED])}{more}"
            raise ValueError(_checks.message(self._prefix, "every tensor of every expert", got))


def _checked_array(name: str, array: Any) -> Any:
    if not hasattr(array, "dtype") or not hasattr(array, "shape"):
        raise TypeError(_checks.message(name, "an array", type(array).__name__))
    return array
