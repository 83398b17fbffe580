"""A checkpoint's layers, each read once and written to a file in kernel layout."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jax_megamoe import _checks
from jax_megamoe.config import MoEConfig, padded_size
from jax_megamoe.weights.checkpoint.converted import save_experts
from jax_megamoe.weights.checkpoint.dialects import Dialect, Role
from jax_megamoe.weights.checkpoint.gather import GateUpOrder
from jax_megamoe.weights.checkpoint.load import load_experts
from jax_megamoe.weights.checkpoint.projection import PACKED, Piece
from jax_megamoe.weights.checkpoint.select import read_quantization_config, select_format
from jax_megamoe.weights.checkpoint.tensors import Checkpoint, StoredTensor

_ANY_EXPERT = 1 << 20


class ConvertedLayer(NamedTuple):
    """One layer on disk: its prefix in the checkpoint, its file, and the config it is for."""

    prefix: str
    path: Path
    config: MoEConfig


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
        progress: whether to show a bar for each layer.
        fields: of the layers' `MoEConfig`, such as num_shared_experts or kernel_source. What is not
            given comes from the checkpoint: the experts; hidden and intermediate size rounded up to
            a multiple of 128; the format, as `select_format` says.

    Raises:
        ValueError: a prefix that no tensor has, sizes that do not go together, and as
            `load_experts`.
        TypeError, NotImplementedError, FileNotFoundError: as `load_experts`.
    """
    source = Checkpoint(checkpoint)
    several = "*" in prefix
    done: list[ConvertedLayer] = []
    for layer in layer_prefixes(source.files, prefix):
        config, sizes = stored_layer(source, layer, **fields)
        weights = load_experts(
            config,
            checkpoint,
            prefix=layer,
            gate_up_order=gate_up_order,
            stored_sizes=(sizes.hidden_size, sizes.intermediate_size),
            progress=progress,
        )
        path = Path(output, f"{layer}.safetensors") if several else Path(output)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_experts(path, config, weights)
        done.append(ConvertedLayer(layer, path, config))
    return done


def layer_prefixes(names: Iterable[str], pattern: str) -> list[str]:
    """Prefixes of `names` that `pattern` matches, ``*`` standing for a number, by rising number.

    Raises:
        ValueError: there are none.
    """
    number = re.escape(pattern.rstrip(".")).replace(r"\*", r"(\d+)")
    matches = (re.match(rf"{number}(?=\.)", name) for name in names)
    found = {match[0]: [int(each) for each in match.groups()] for match in matches if match}
    if not found:
        expected = "the beginning of a tensor's name, * standing for a number"
        raise ValueError(_checks.message("prefix", expected, repr(pattern)))
    return sorted(found, key=found.__getitem__)


def stored_layer(source: Checkpoint, prefix: str, **fields: Any) -> tuple[MoEConfig, StoredSizes]:
    """The config that a stored layer's parameters have, and its sizes as stored.

    Only headers are read. top_k and max_num_tokens, which parameters do not depend on, are 1.

    Args:
        source: the checkpoint.
        prefix: of the experts' names.
        fields: of the config, in place of what the checkpoint says.

    Raises:
        ValueError: sizes that do not go together.
        NotImplementedError: a scheme that does not run.
    """
    quantization = read_quantization_config(source.path)
    form = select_format(quantization, forced=fields.get("weight_format"), prefix=prefix)
    sizes = stored_sizes(source, prefix)
    made: dict[str, Any] = dict(
        num_experts=sizes.num_experts,
        num_logical_experts=sizes.num_experts,
        hidden_size=padded_size(sizes.hidden_size),
        intermediate_size=padded_size(sizes.intermediate_size),
        top_k=1,
        max_num_tokens=1,
    )
    made |= {**fields, "weight_format": form}
    config = MoEConfig(**made)
    for field in ("hidden_size", "intermediate_size"):
        stored, size = getattr(sizes, field), getattr(config, field)
        if size < stored:
            raise ValueError(_checks.message(field, f"at least the stored {stored}", size))
    return config, sizes


def stored_sizes(source: Checkpoint, prefix: str) -> StoredSizes:
    """How many experts a layer stores, and of which sizes, by the shapes of its weights.

    Raises:
        ValueError: no gate or no down projection, or shapes that do not go together.
    """
    dialect = Dialect(prefix, _ANY_EXPERT, shared=False)
    experts = 0
    shapes: dict[str, tuple[int, ...]] = {}
    for name in source.files:
        role = dialect.role(name)
        if role is None or role.kind != "weight":
            continue
        if role.expert is None or role.part not in shapes:
            tensor = source.tensor(name)
            shapes[role.part] = _matrix_shape(tensor, role)
            experts = max(experts, tensor.shape[0] if role.expert is None else 0)
        experts = max(experts, 0 if role.expert is None else role.expert + 1)
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
