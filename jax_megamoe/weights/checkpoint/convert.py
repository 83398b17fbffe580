"""A checkpoint's layers, each read once and written to a file in kernel layout."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jax_megamoe import _checks
from jax_megamoe._files import is_same_file
from jax_megamoe.config import ExpertSpec, padded_size
from jax_megamoe.plan import families
from jax_megamoe.weights.checkpoint.converted import save_experts
from jax_megamoe.weights.checkpoint.dialects import MAX_EXPERTS, Dialect, Role
from jax_megamoe.weights.checkpoint.families import GateUpOrder
from jax_megamoe.weights.checkpoint.header import StoredTensor
from jax_megamoe.weights.checkpoint.load import load_experts
from jax_megamoe.weights.checkpoint.projection import PACKED, Piece
from jax_megamoe.weights.checkpoint.select import format_of, layer_scheme, read_quantization_config
from jax_megamoe.weights.checkpoint.tensors import Checkpoint
from jax_megamoe.weights.params import default_layout


class ConvertedLayer(NamedTuple):
    """One layer on disk: its prefix in the checkpoint, its file, and what is in it."""

    prefix: str
    path: Path
    spec: ExpertSpec


class StoredSizes(NamedTuple):
    """Sizes of a layer's experts as stored."""

    num_experts: int
    hidden_size: int
    intermediate_size: int


def convert_checkpoint(
    checkpoint: str | Path,
    output: str | Path,
    *,
    prefix: str,
    gate_up_order: GateUpOrder | None = None,
    kernel_source: str | None = None,
    progress: bool = True,
    **fields: Any,
) -> list[ConvertedLayer]:
    """Writes one layer, or every layer that `prefix` matches, as `load_converted` reads it.

    A layer at a time is in memory. Each file appears whole, at its end.

    Args:
        checkpoint: a folder with safetensors files, or one such file.
        output: the file; where the prefix has a ``*``, a folder of files ``{prefix}.safetensors``.
        prefix: of the experts' names; a ``*`` in it stands for any number, as in
            ``model.layers.*.mlp.experts``.
        gate_up_order: see `load_experts`.
        kernel_source: the source whose kernels will run them: it decides the order of NVFP4 rows;
            None: the preferred one.
        progress: whether to show a bar for each layer.
        fields: of the layers' `ExpertSpec`, such as num_shared_experts. What is not given comes
            from the checkpoint: the experts; hidden and intermediate size rounded up to a multiple
            of 128; the format, as `select_format` says.

    Raises:
        ValueError: an output that is a file of the checkpoint or in its folder; a prefix that no
            tensor has, sizes that do not go together, and as `load_experts`.
        TypeError, NotImplementedError, FileNotFoundError: as `load_experts`.
    """
    source = Checkpoint(checkpoint)
    paths = {
        layer: Path(output, f"{layer}.safetensors") if "*" in prefix else Path(output)
        for layer in layer_prefixes(source.files, prefix)
    }
    _check_outputs(source, paths.values())
    done: list[ConvertedLayer] = []
    for layer, path in paths.items():
        spec, sizes = stored_layer(source, layer, **fields)
        weights = load_experts(
            spec,
            checkpoint,
            prefix=layer,
            gate_up_order=gate_up_order,
            stored_sizes=(sizes.hidden_size, sizes.intermediate_size),
            progress=progress,
            layout=_layout_of(spec, kernel_source),
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        save_experts(path, spec, weights)
        done.append(ConvertedLayer(layer, path, spec))
    return done


def _layout_of(spec: ExpertSpec, kernel_source: str | None) -> str:
    """The row order of w13 that a source's kernels read.

    Raises:
        ValueError: an unknown source, or one without kernels for the format.
    """
    if kernel_source is None:
        return default_layout(spec)
    able = {family.source: family for family in families.of_recipe(spec.recipe)}
    _checks.one_of(f"kernel_source of {spec.weight_format.name}", kernel_source, able)
    return able[kernel_source].w13_layout


def _check_outputs(source: Checkpoint, outputs: Iterable[Path]) -> None:
    """Raises ValueError for an output that would replace a file of the checkpoint, by whatever path
    or link, or that would be taken for one."""
    is_folder = source.path.is_dir()
    folder = source.path if is_folder else source.path.parent
    inputs = {*source.files.values(), *folder.glob("*.json")}
    hint = "write somewhere else"
    for output in outputs:
        for path in inputs:
            if is_same_file(path, output):
                expected = "a file that is not read"
                got = f"{output}, which is {path.name} of the checkpoint"
                raise ValueError(_checks.message("output", expected, got, hint))
        if is_folder and is_same_file(output.parent, folder):
            expected = f"a place outside the checkpoint {folder}"
            raise ValueError(_checks.message("output", expected, output, hint))


def layer_prefixes(names: Iterable[str], pattern: str) -> list[str]:
    """Prefixes of `names` that `pattern` matches, ``*`` standing for a number, by rising number.

    Raises:
        ValueError: there are none.
    """
    number = re.escape(pattern.rstrip(".")).replace(r"\*", r"([0-9]{1,9})")
    matches = (re.match(rf"{number}(?=\.)", name) for name in names)
    found = {match[0]: [int(each) for each in match.groups()] for match in matches if match}
    if not found:
        expected = "the beginning of a tensor's name, * standing for a number"
        raise ValueError(_checks.message("prefix", expected, repr(pattern)))
    return sorted(found, key=found.__getitem__)


def stored_layer(source: Checkpoint, prefix: str, **fields: Any) -> tuple[ExpertSpec, StoredSizes]:
    """What a stored layer's parameters are, and its sizes as stored. Only headers are read.

    Args:
        source: the checkpoint.
        prefix: of the experts' names.
        fields: of the spec, in place of what the checkpoint says.

    Raises:
        ValueError: sizes that do not go together.
        NotImplementedError: a scheme that does not run.
    """
    sizes = stored_sizes(source, prefix)
    form = fields.get("weight_format")
    if form is None:
        quantization = read_quantization_config(source.path)
        scheme = layer_scheme(quantization, prefix, source.files, source.tensor)
        form = format_of(scheme, prefix=prefix)
    made: dict[str, Any] = dict(
        num_experts=sizes.num_experts,
        num_logical_experts=sizes.num_experts,
        hidden_size=padded_size(sizes.hidden_size),
        intermediate_size=padded_size(sizes.intermediate_size),
    )
    made |= {**fields, "weight_format": form}
    spec = ExpertSpec(**made)
    for field in ("hidden_size", "intermediate_size"):
        stored, size = getattr(sizes, field), getattr(spec, field)
        if size < stored:
            raise ValueError(_checks.message(field, f"at least the stored {stored}", size))
    return spec, sizes


def stored_sizes(source: Checkpoint, prefix: str) -> StoredSizes:
    """How many experts a layer stores, and of which sizes, by the shapes of its weights.

    Raises:
        ValueError: no gate or no down projection, or shapes that do not go together.
    """
    dialect = Dialect(prefix, MAX_EXPERTS, shared=False)
    experts = 0
    numbers: set[int] = set()
    shapes: dict[str, tuple[int, ...]] = {}
    for name in source.files:
        role = dialect.role(name)
        if role is None or role.kind != "weight":
            continue
        if role.expert is None or role.part not in shapes:
            tensor = source.tensor(name)
            shapes[role.part] = _matrix_shape(tensor, role)
            experts = max(experts, tensor.shape[0] if role.expert is None else 0)
        if role.expert is not None:
            numbers.add(role.expert)
            experts = max(experts, role.expert + 1)
    if numbers and len(numbers) != experts:
        expected = f"experts 0 to {experts - 1}"
        raise ValueError(_checks.message(f"weights of {prefix}", expected, f"{len(numbers)}"))
    down, halves = shapes.get("down"), 2 if "gate_up" in shapes else 1
    gate = shapes.get("gate_up", shapes.get("gate"))
    if down is not None and len(down) == 2:
        rows, columns = down
        if gate == (halves * columns, rows):
            return StoredSizes(experts, hidden_size=rows, intermediate_size=columns)
        if gate == (columns, halves * rows):
            return StoredSizes(experts, hidden_size=columns, intermediate_size=rows)
    expected = f"gate [{'2 ' if halves == 2 else ''}I, H] and down [H, I], or both transposed"
    raise ValueError(_checks.message(f"weights of {prefix}", expected, f"{gate} and {down}"))


def _matrix_shape(tensor: StoredTensor, role: Role) -> tuple[int, ...]:
    """Of one expert's weight in values: [N, K], or [K, N] where stored so."""
    shape = Piece(tensor, role, index=0 if role.expert is None else None).shape
    values = 2 if str(tensor.dtype) in PACKED else 1
    return (*shape[:-1], shape[-1] * values) if shape else ()
