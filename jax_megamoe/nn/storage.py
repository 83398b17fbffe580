"""How a model stores its experts, by its config; a checkpoint's names have the last word."""

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from jax_megamoe.config import MoEConfig
from jax_megamoe.formats import GROUPED_LAYOUTS, WeightFormat
from jax_megamoe.launch import grouped
from jax_megamoe.launch.runnable import (
    config_that_folds,
    in_recipe_with_kernel,
    runnable_layout,
    supported,
)
from jax_megamoe.mesh import Axis, axis_names, device_of
from jax_megamoe.nn.hf_config import BlockSpec
from jax_megamoe.op.mega_moe import PORTABLE
from jax_megamoe.op.transforms import place_of
from jax_megamoe.plan import folding
from jax_megamoe.plan.refusal import Refusal
from jax_megamoe.weights.checkpoint.families import GateUpOrder, gate_up_order
from jax_megamoe.weights.checkpoint.fields import Fields
from jax_megamoe.weights.checkpoint.select import quantization_of, select_format, stored_scheme


@dataclass(frozen=True)
class Storage:
    """What a block keeps of its model's config for `MegaMoEBlock.load`.

    Attributes:
        quantization: the quantisation as JSON text, which unlike a dict can be hashed; None: none.
        gate_up_order: of gate and up in one tensor; None: not known.
        decides_format: no format was given: the checkpoint decides.
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
    # DeepSeek-V4's expert_dtype is the routed experts'.
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
    hf_config: Fields, prefix: str, layer_index: int | None, device: jax.Device
) -> WeightFormat:
    """`select_format` before a checkpoint is seen, its names taken to be the family's own.

    Of layers that are stored alike, its warning says the same for each.
    """
    experts = "" if layer_index is None else f"{prefix.format(layer_index)}.experts"
    if stored_scheme(hf_config, experts) == stored_scheme(hf_config):
        experts = ""
    return select_format(hf_config, device, prefix=experts)


def config_of_spec(
    spec: BlockSpec, form: str | WeightFormat, max_num_tokens: int, **fields: Any
) -> MoEConfig:
    """The experts of a model's block, without regard to where they run.

    Args:
        spec: of the block.
        form: of the weights.
        max_num_tokens: see `MoEConfig`.
        **fields: others of it, which go before those of `spec`.
    """
    hidden_size, intermediate_size = spec.padded_sizes
    logical = spec.router.num_experts
    sizes: dict[str, Any] = dict(
        num_experts=logical,
        num_logical_experts=logical if fields.get("num_experts", logical) != logical else None,
        top_k=spec.router.top_k,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        max_num_tokens=max_num_tokens,
        weight_format=form,
        activation=spec.activation,
    )
    return MoEConfig(**(sizes | fields))


def config_in_place(
    config: MoEConfig, mesh: Mesh | None, axis: Axis | None, keep: bool
) -> MoEConfig:
    """The config in a recipe that has a kernel where the layer runs, see `in_recipe_with_kernel`.

    Args:
        config: the layer.
        mesh: where it runs; None: on the default device.
        axis: the expert-parallel axis, or axes.
        keep: the config stays: its format was given, or it has biases, which no kernel adds.
    """
    if keep:
        return config
    return in_recipe_with_kernel(config, *_where(mesh, axis))


def _where(mesh: Mesh | None, axis: Axis | None) -> tuple[jax.Device, int]:
    """A device of a layer, and its ranks."""
    sizes = () if mesh is None else (mesh.shape[name] for name in axis_names(axis))
    return device_of(mesh), math.prod(sizes)


def config_of_model(
    config: MoEConfig, mesh: Mesh | None, axis: Axis | None, keep: bool, biased_size: int
) -> MoEConfig:
    """`config_in_place` of a model; with biases filled up further instead, where a fused kernel
    runs it so with folded ones.

    Args:
        config: the layer.
        mesh: where it runs; None: on the default device.
        axis: the expert-parallel axis, or axes.
        keep: the format was given.
        biased_size: hidden size of a model with biases in its experts; 0: they have none.
    """
    if not biased_size:
        return config_in_place(config, mesh, axis, keep)
    device, ranks = _where(mesh, axis)
    return config_that_folds(config, device, ranks, biased_size)


def folds(config: MoEConfig, mesh: Mesh | None, axis: Axis | None, hidden_size: int) -> bool:
    """Whether a layer's biases are to be folded: a fused kernel runs it then, where it is.

    Args:
        config: the layer.
        mesh: where it runs; None: on the default device.
        axis: the expert-parallel axis, or axes.
        hidden_size: of the model.
    """
    device, ranks = _where(mesh, axis)
    is_able = not isinstance(supported(config, device, ranks), Refusal)
    return is_able and not config.num_shared_experts and folding.fits(config, hidden_size)


def config_in_format(
    config: MoEConfig, form: WeightFormat, mesh: Mesh | None, axis: Axis | None, keep: bool
) -> MoEConfig:
    """`config_in_place` with other weights, and without a fused shared expert."""
    stored = replace(
        config,
        weight_format=form,
        activation_format=None,
        num_shared_experts=0,
        shared_format=None,
    )
    return config_in_place(stored, mesh, axis, keep)


def layout_here(
    config: MoEConfig,
    layout: str,
    mesh: Mesh | AbstractMesh | None,
    axis: Axis | None,
    implementation: str | None,
    *,
    adds_biases: bool,
) -> str:
    """The layout that parameters of `layout` get in a layer on this machine."""
    if implementation in PORTABLE or (implementation is None and layout in GROUPED_LAYOUTS):
        return layout
    device = device_of(mesh)
    # An axis without a mesh is one of the caller's shard_map, which will say how many ranks it has.
    is_known = mesh is not None or axis is None
    num_ranks = place_of(config, mesh, axis).num_ranks if is_known else None
    for_products = grouped.layer_layout(
        config, device, num_ranks, implementation, adds_biases=adds_biases
    )
    return for_products or runnable_layout(config, layout, device)
