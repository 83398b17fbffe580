"""How a model stores its experts, by its config; a checkpoint's names have the last word."""

import json
from dataclasses import dataclass
from typing import Any

import jax

from jax_megamoe.formats import WeightFormat
from jax_megamoe.weights.checkpoint.families import GateUpOrder, gate_up_order
from jax_megamoe.weights.checkpoint.fields import Fields
from jax_megamoe.weights.checkpoint.select import quantization_of, select_format, stored_scheme


@dataclass(frozen=True)
class Storage:
    """What a block keeps of its model's config for `MegaMoEBlock.load`.

    Attributes:
        quantization: the quantisation as JSON text, which unlike a dict can be hashed; None: none.
        gate_up_order: of gate and up in one tensor; None: not known.
        decides_format: the format is that of the checkpoint, for none was given.
    """

    quantization: str | None
    gate_up_order: GateUpOrder | None
    decides_format: bool

    @property
    def quantization_config(self) -> dict[str, Any] | None:
        """The quantisation as a dict."""
        return None if self.quantization is None else json.loads(self.quantization)


def storage_of(hf_config: Fields, decides_format: bool) -> Storage:
    """What a config says.

    Raises:
        ValueError: a field of another kind than it should be.
    """
    found = quantization_of(hf_config)
    text = None if found is None else json.dumps(found, default=str)
    return Storage(text, gate_up_order(hf_config.text("model_type")), decides_format)


def shared_scheme(hf_config: Fields, prefix: str, layer_index: int | None) -> str | None:
    """How a config says that the shared expert is stored, in the words of
    `BlockTensors.shared_scheme`; None where it does not say."""
    found = quantization_of(hf_config)
    if found is None:
        return "bf16"
    # DeepSeek-V4's expert_dtype is that of the routed experts.
    config = {name: value for name, value in found.items() if name != "expert_dtype"}
    name = "" if layer_index is None else f"{prefix.format(layer_index)}.shared_experts"
    try:
        scheme = stored_scheme(config, name)
    except NotImplementedError:
        return None
    is_fp8 = scheme in ("fp8", "fp8_block")
    if is_fp8:
        return "mxfp8" if config.get("scale_fmt") == "ue8m0" else "fp8"
    return scheme


def format_of_layer(
    hf_config: Fields,
    prefix: str,
    layer_index: int | None,
    device: jax.Device | None,
    forced: str | WeightFormat | None,
) -> WeightFormat:
    """`select_format` before a checkpoint is seen, its names taken to be the family's own.

    Of layers that are stored alike, its warning says the same for each.
    """
    experts = "" if layer_index is None else f"{prefix.format(layer_index)}.experts"
    if forced is None and stored_scheme(hf_config, experts) == stored_scheme(hf_config):
        experts = ""
    return select_format(hf_config, device, forced, prefix=experts)
