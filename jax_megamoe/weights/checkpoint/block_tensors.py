"""One layer's MoE block in a checkpoint: the router's tensors, the shared expert's, the experts'.

Names, after the block's own (``model.layers.3.mlp``, DeepSeek-V4: ``layers.3.ffn``):
``gate.weight``, ``router.weight`` or ``gate.wg.weight`` (Hunyuan), ``router.bias``,
``gate.e_score_correction_bias`` (DeepSeek-V4: ``gate.bias``, MiniMax-M2: without ``gate.``, ERNIE:
``moe_statics.`` before it), ``gate.tid2eid``, ``shared_expert(s).{projection}.{suffix}`` (Hunyuan:
``shared_mlp.``), ``shared_expert_gate.weight``, ``experts.``.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np

from jax_megamoe import _checks
from jax_megamoe.config import ExpertSpec, padded_size
from jax_megamoe.formats import BF16
from jax_megamoe.weights.checkpoint.dialects import SHARED_NAMES
from jax_megamoe.weights.checkpoint.load import Pairs, load_experts
from jax_megamoe.weights.checkpoint.projection import FLOATS
from jax_megamoe.weights.checkpoint.select import Scheme, layer_scheme, read_quantization_config
from jax_megamoe.weights.checkpoint.tensors import Checkpoint, HeldTensor, Tensor
from jax_megamoe.weights.experts import dequantize_experts

_FLOATING = ("bfloat16", "float16", "float32")
_POWERS = ("float8_e8m0fnu", "uint8")


class BlockTensors:
    """The tensors of one layer's MoE block, by their names within it.

    Args:
        checkpoint: a folder with safetensors files, one such file, or (name, array) pairs. Of
            pairs, those of this layer are held.
        layer_index: the layer.
        prefix: of the block's names, such as ``model.layers.3.mlp``; None: the one block that the
            checkpoint has for this layer, modules of multi-token prediction apart.

    Attributes:
        checkpoint: the opened checkpoint, or this layer's pairs.
        prefix: of the block's names.

    Raises:
        ValueError: no such layer in the checkpoint, a layer that is not MoE, or several that could
            be meant.
        FileNotFoundError: no such file.
    """

    def __init__(
        self, checkpoint: str | Path | Pairs, layer_index: int, *, prefix: str | None = None
    ) -> None:
        self.checkpoint: Checkpoint | dict[str, Any]
        if isinstance(checkpoint, str | Path):
            self.checkpoint = Checkpoint(checkpoint)
            names: Iterable[str] = self.checkpoint.files
        else:
            self.checkpoint = _of_layer(checkpoint, layer_index, prefix)
            names = self.checkpoint
        self.prefix = _block_of(names, layer_index) if prefix is None else prefix.rstrip(".")
        start = f"{self.prefix}."
        self._names = {n.removeprefix(start) for n in names if n.startswith(start)}
        self._taken: set[str] = set()

    def take(
        self,
        *names: str,
        shape: tuple[int, ...],
        dtypes: Iterable[str] = FLOATS,
        or_row: bool = False,
    ) -> np.ndarray:
        """The tensor of the first of these names that is there.

        Args:
            names: within the block.
            shape: that it has.
            dtypes: one of which it has.
            or_row: it may have an axis of one more in front, which is dropped.

        Raises:
            ValueError: none is, another shape, or a value that is not finite.
            TypeError: another dtype.
        """
        for name in names:
            if name in self._names:
                self._taken.add(name)
                tensor = self._tensor(name)
                where = f"{tensor.name} in {tensor.origin}"
                if not (or_row and tensor.shape == (1, *shape)):
                    _checks.shape(where, tensor, shape)
                _checks.dtype(where, tensor, list(dtypes))
                array = tensor.read()
                if not np.isfinite(array.astype(np.float32)).all():
                    raise ValueError(_checks.message(where, "finite values", "NaN or infinity"))
                return array.reshape(shape)
        expected = f"a tensor {' or '.join(names)}"
        raise ValueError(_checks.message(self.prefix, expected, f"none of {self._listed()}"))

    def take_shared(self, hidden_size: int, intermediate_size: int) -> dict[str, np.ndarray]:
        """gate_proj [S, H], up_proj [S, H] and down_proj [H, S] of the shared expert in bfloat16,
        decoded from whatever they are stored as.

        Raises:
            ValueError: a tensor missing, unknown or of a wrong shape.
            TypeError: a tensor of a wrong dtype.
        """
        names = [name for name in self._names if name.startswith(SHARED_NAMES)]
        if not names:
            expected = f"a shared expert, {', '.join(SHARED_NAMES)}"
            raise ValueError(_checks.message(self.prefix, expected, f"none of {self._listed()}"))
        self._taken.update(names)
        # Read as the one expert of a layer of its own, whose names have its number.
        prefix = f"{self.prefix}.{names[0].partition('.')[0]}"
        pairs = {
            f"{prefix}.0.{name.partition('.')[2]}": self._tensor(name).read() for name in names
        }
        config = ExpertSpec(
            num_experts=1,
            hidden_size=padded_size(hidden_size),
            intermediate_size=padded_size(intermediate_size),
            weight_format=BF16,
        )
        sizes = (hidden_size, intermediate_size)
        weights = load_experts(config, pairs, prefix=prefix, stored_sizes=sizes, progress=False)
        parts = dequantize_experts(config, weights)
        gate, up, down = (np.asarray(part[0]).astype(ml_dtypes.bfloat16) for part in parts)
        return dict(
            gate_proj=gate[:intermediate_size, :hidden_size],
            up_proj=up[:intermediate_size, :hidden_size],
            down_proj=down[:hidden_size, :intermediate_size],
        )

    def check_all_taken(self, *, fused_shared: bool) -> None:
        """Raises ValueError for tensors that this block has no use for.

        Args:
            fused_shared: whether the shared expert is loaded with the routed ones.
        """
        loaded = ("experts.", *(SHARED_NAMES if fused_shared else ()))
        left = sorted(name for name in self._names - self._taken if not name.startswith(loaded))
        if left:
            expected = "only tensors that this block has parameters for"
            got = ", ".join(left[:8])
            hint = "is it the model that the block was made for?"
            raise ValueError(_checks.message(self.prefix, expected, got, hint))

    def stored_scheme(
        self,
        quantization_config: Mapping[str, Any] | None,
        otherwise: Mapping[str, Any] | None = None,
    ) -> Scheme:
        """How the routed experts are stored, see `layer_scheme`.

        Args:
            quantization_config: the model's; None: the one in the checkpoint's folder.
            otherwise: what is taken where that says nothing.

        Raises:
            ValueError, NotImplementedError: as `layer_scheme`.
        """
        if quantization_config is None and isinstance(self.checkpoint, Checkpoint):
            quantization_config = read_quantization_config(self.checkpoint.path)
        if quantization_config is None:
            quantization_config = otherwise
        names = [f"{self.prefix}.{name}" for name in self._names if name.startswith("experts.")]
        return layer_scheme(quantization_config, f"{self.prefix}.experts", names, self._named)

    def shared_scheme(self) -> str | None:
        """How the shared expert is stored; None where there is none.

        ``"bf16"`` for floating point, ``"mxfp8"`` for FP8 under powers of two, which blocks of 32
        hold whatever the grid, ``"fp8"`` under other scales, else what its bytes are.
        """
        names = sorted(name for name in self._names if name.startswith(SHARED_NAMES))
        found: dict[str, None] = {}
        for name in names:
            stem, _, suffix = name.rpartition(".")
            if suffix not in ("weight", "weight_packed"):
                continue
            scales = [n for n in names if n.startswith(f"{stem}.") and "scale" in n.split(".")[-1]]
            scales = [str(self._tensor(n).dtype) for n in scales if "input" not in n]
            dtype = str(self._tensor(name).dtype)
            if dtype in _FLOATING and not scales:
                found["bf16"] = None
            elif dtype == "float8_e4m3fn":
                powers = bool(scales) and all(each in _POWERS for each in scales)
                found["mxfp8" if powers else "fp8"] = None
            else:
                found[dtype] = None
        return " and ".join(found) or None

    def _tensor(self, name: str) -> Tensor:
        return self._named(f"{self.prefix}.{name}")

    def _named(self, full: str) -> Tensor:
        if isinstance(self.checkpoint, Checkpoint):
            return self.checkpoint.tensor(full)
        array = self.checkpoint[full]
        if not hasattr(array, "dtype") or not hasattr(array, "shape"):
            raise TypeError(_checks.message(full, "an array", type(array).__name__))
        return HeldTensor(full, array)

    def _listed(self) -> str:
        return str(sorted(name for name in self._names if not name.startswith("experts.")))


def _of_layer(pairs: Pairs, layer_index: int, prefix: str | None) -> dict[str, Any]:
    """The pairs with names under the prefix, or in the layer of that index."""
    items = pairs.items() if isinstance(pairs, Mapping) else pairs
    layer = re.compile(rf"(.*\.)?layers\.{layer_index}\.")
    held: dict[str, Any] = {}
    for name, array in cast(Iterable[tuple[str, Any]], items):
        if name.startswith(prefix) if prefix else layer.match(name):
            if name in held:
                raise ValueError(_checks.message(name, "each tensor once", "it twice"))
            held[name] = array
    return held


def _block_of(names: Iterable[str], layer_index: int) -> str:
    """What the names of the layer's block begin with."""
    pattern = re.compile(rf"((?:.*\.)?layers\.{layer_index}\.[^.]+)\.experts\.")
    layer = re.compile(rf"(?:.*\.)?layers\.{layer_index}\.")
    found: set[str] = set()
    any_of_layer = False
    for name in names:
        if "mtp" in name.split("."):
            continue
        any_of_layer = any_of_layer or bool(layer.match(name))
        match = pattern.match(name)
        if match:
            found.add(match[1])
    if len(found) == 1:
        return found.pop()
    if found:
        hint = "pass prefix="
        raise ValueError(
            _checks.message(f"layer {layer_index}", "one MoE block", sorted(found), hint)
        )
    if any_of_layer:
        got = "a dense layer: its names have no experts"
        raise ValueError(_checks.message(f"layer {layer_index}", "an MoE layer", got))
    expected = f"names with layers.{layer_index}."
    raise ValueError(_checks.message("checkpoint", expected, "none"))
