"""A layer of a checkpoint into a block: `MegaMoEBlock.load` and `.reload`."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from flax import nnx

from jax_megamoe import _checks
from jax_megamoe.mesh import device_of
from jax_megamoe.nn import storage
from jax_megamoe.nn.block_checks import check_biases, check_kind, concrete_mesh
from jax_megamoe.nn.layer import MegaMoE
from jax_megamoe.nn.variables import put, replicated
from jax_megamoe.weights.checkpoint.block_tensors import BlockTensors
from jax_megamoe.weights.checkpoint.families import GateUpOrder
from jax_megamoe.weights.checkpoint.load import Pairs, load_experts, reload_experts
from jax_megamoe.weights.checkpoint.select import format_of


def load_block(
    block: Any,
    make: Callable[..., Any],
    checkpoint: str | Path | Pairs,
    layer_index: int,
    *,
    prefix: str | None,
    quantization_config: Mapping[str, Any] | None,
    gate_up_order: GateUpOrder | None,
    progress: bool,
) -> None:
    """`MegaMoEBlock.load`; `make` is the class."""
    if block.layers is not None:
        check_kind(block.router.settings, block.layers.moe_kind(layer_index), layer_index)
    tensors = BlockTensors(checkpoint, layer_index, prefix=prefix)
    made = _as_stored(block, make, tensors, quantization_config)
    router = block.router.read(tensors)
    shared = {} if made.shared_expert is None else made.shared_expert.read(tensors)
    tensors.check_all_taken(fused_shared=made.config.num_shared_experts > 0)
    gate_up_order = gate_up_order or (block.storage and block.storage.gate_up_order)
    mesh = concrete_mesh(block.experts.used_mesh)
    experts = load_experts(
        made.config,
        tensors.checkpoint,
        prefix=f"{tensors.prefix}.experts",
        mesh=mesh,
        axis=None if mesh is None else block.experts.axis,
        quantization_config=quantization_config,
        stored_sizes=block.stored_sizes,
        gate_up_order=gate_up_order,
        layout=made.experts.layout,
        progress=progress,
    )
    check_biases(block.experts.has_biases, experts, tensors.prefix)
    block.config, block.shared_expert = made.config, nnx.data(made.shared_expert)
    block.shared_stored = made.shared_stored
    for module, arrays in ((block.router, router), (block.shared_expert, shared)):
        for name, array in arrays.items():
            setattr(module, name, replicated(array, mesh, type(getattr(module, name))))
    block.experts = MegaMoE(
        block.config,
        experts,
        mesh=mesh,
        axis=block.experts.axis,
        token_axes=block.experts.token_axes,
        implementation=block.experts.implementation,
        folds_biases=made.experts.folds_biases,
    )


def reload_block(
    block: Any,
    checkpoint: str | Path | Pairs,
    layer_index: int,
    *,
    prefix: str | None = None,
    gate_up_order: GateUpOrder | None = None,
    progress: bool = False,
) -> None:
    """`MegaMoEBlock.reload`."""
    if block.layers is not None:
        check_kind(block.router.settings, block.layers.moe_kind(layer_index), layer_index)
    tensors = BlockTensors(checkpoint, layer_index, prefix=prefix)
    unfused = block.shared_expert
    arrays = [(block.router, block.router.read(tensors))]
    arrays += [] if unfused is None else [(unfused, unfused.read(tensors))]
    tensors.check_all_taken(fused_shared=block.config.num_shared_experts > 0)
    for module, read in arrays:
        for name, array in read.items():
            own = getattr(module, name).get_value().dtype
            _checks.dtype(f"{tensors.prefix}: {name}", array, [str(own)], "load() takes it")
    weights = reload_experts(
        block.config,
        block.experts.weights,
        tensors.checkpoint,
        prefix=f"{tensors.prefix}.experts",
        physical_to_logical=block.experts.placement,
        gate_up_order=gate_up_order or (block.storage and block.storage.gate_up_order),
        stored_sizes=block.stored_sizes,
        progress=progress,
    )
    block.experts.replace(weights, block.experts.eplb)
    for module, read in arrays:
        for name, array in read.items():
            put(getattr(module, name), array)


def _as_stored(
    block: Any,
    make: Callable[..., Any],
    tensors: BlockTensors,
    quantization_config: Mapping[str, Any] | None,
) -> Any:
    """The block in the formats that the experts and the shared one are stored in, of shapes
    alone; itself where those are its own, or were given.
    """
    mesh, shared = concrete_mesh(block.experts.used_mesh), block.shared_expert
    form, own = block.config.weight_format, block.config.weight_format.name
    if block.storage is not None and block.storage.decides_format:
        scheme = tensors.stored_scheme(quantization_config, block.storage.quantization_config)
        if scheme != own and not (scheme == "fp8_block" and own == "mxfp8"):
            form = format_of(scheme, device_of(mesh), f"{tensors.prefix}.experts")
    has_shared = shared is not None or block.config.num_shared_experts > 0
    stored = tensors.shared_scheme() if has_shared else None
    if form.name == own and stored == block.shared_stored:
        return block
    biased = block.experts.has_biases
    made = partial(
        make,
        storage.config_in_format(block.config, form, mesh, block.experts.axis, biased),
        block.router.settings,
        stored_sizes=block.stored_sizes,
        shared_size=block.config.shared_size if shared is None else shared.gate_proj.shape[0],
        has_shared_gate=shared is not None and shared.output_gate is not None,
        has_expert_biases=biased,
        shared_format=block.shared_format,
        shared_stored=stored,
        mesh=mesh,
        axis=block.experts.axis,
        token_axes=block.experts.token_axes,
        implementation=block.experts.implementation,
    )
    return nnx.eval_shape(lambda: made(rngs=nnx.Rngs(0)))
