"""`MegaMoEBlock`, a Flax (nnx) module: a router, its experts, and a shared expert."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, BFloat16, Bool, Int32

from jax_megamoe import _checks
from jax_megamoe.config import MoEConfig
from jax_megamoe.formats import WeightFormat
from jax_megamoe.nn import storage
from jax_megamoe.nn.hf_config import HASHED, Layers, block_spec, layers_of, read_hf_config
from jax_megamoe.nn.layer import MegaMoE
from jax_megamoe.nn.replicated import replicated
from jax_megamoe.nn.router_layer import RouterLayer
from jax_megamoe.nn.shared_expert import SharedExpert, log_unfused, unfused_reason
from jax_megamoe.nn.weighed_input import plus_shared, weighed
from jax_megamoe.op.mega_moe import place_of
from jax_megamoe.routing.replicas import ReplicaMap
from jax_megamoe.routing.router import Router
from jax_megamoe.weights.checkpoint.block_tensors import BlockTensors
from jax_megamoe.weights.checkpoint.families import GateUpOrder
from jax_megamoe.weights.checkpoint.load import Pairs, load_experts
from jax_megamoe.weights.checkpoint.select import format_of
from jax_megamoe.weights.experts import random_experts
from jax_megamoe.weights.params import ExpertWeights, with_zero_biases


class MegaMoEBlock(nnx.Module):
    """The MoE block of a decoder layer: ``experts(x) + shared_expert(x)``.

    Neither the shared expert nor the router waits for the other, so that XLA may run them side by
    side. A shared expert is fused into the experts' kernel where the format can and no gate weighs
    its output; else it runs in bfloat16 and is added.

    Attributes:
        config: of the experts.
        router: a `RouterLayer`: the router's settings and arrays.
        stored_sizes: hidden and intermediate size of the model. The config's may be larger, a
            model's size rounded up to a multiple of 128: the rest is zeros. x has the model's.
        experts: a `MegaMoE`, with the shared expert in it where that is fused.
        shared_expert: a `SharedExpert`; None where there is none or it is fused.
        layers: what the layers of the model are, for `load`; None for a block made from its parts.
        storage: how the model stores experts, for `load`; None likewise.
    """

    def __init__(
        self,
        config: MoEConfig,
        router: Router,
        *,
        stored_sizes: tuple[int, int] | None = None,
        shared_size: int = 0,
        has_shared_gate: bool = False,
        has_expert_biases: bool = False,
        mesh: Mesh | None = None,
        axis: str | tuple[str, ...] | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Makes a block with random parameters; correction bias and biases are 0.

        Args:
            config: the experts. `num_shared_experts` may be left 0: it is set where the shared
                expert is fused.
            router: the router; its experts are the config's logical ones.
            stored_sizes: hidden and intermediate size of the model; None: the config's.
            shared_size: intermediate size of the shared expert; 0: none, but for what the config
                has.
            has_shared_gate: whether a sigmoid gate weighs the shared expert's output.
            has_expert_biases: whether the routed experts' matmuls add biases.
            mesh: where to shard the experts; needs `axis`. The rest is replicated.
            axis: the expert-parallel mesh axis, or several.
            implementation: of the experts, see `mega_moe`.
            rngs: source of the parameters (its ``params`` stream).

        Raises:
            ValueError: sizes that do not fit, and as `MegaMoE`.
        """
        _checks.integer("shared_size", shared_size)
        own = (config.hidden_size, config.intermediate_size)
        self.stored_sizes = own if stored_sizes is None else stored_sizes
        _check_sizes(config, router, self.stored_sizes, shared_size)
        shared_size = shared_size or config.shared_size
        if has_shared_gate and not shared_size:
            expected = "False where there is no shared expert"
            raise ValueError(_checks.message("has_shared_gate", expected, True))
        is_whole, weighs = own == self.stored_sizes, router.weighs_input
        reason = unfused_reason(config, shared_size, is_whole, has_shared_gate, weighs)
        if reason:
            log_unfused(config, reason)
        fused = shared_size // config.intermediate_size if reason is None else 0
        self.config = config = replace(config, num_shared_experts=fused)
        self.layers: Layers | None = None
        self.storage: storage.Storage | None = None
        self.router = RouterLayer(router, self.hidden_size, mesh=mesh, rngs=rngs)
        weights = random_experts(config, rngs.params())
        self.experts = MegaMoE(
            config,
            with_zero_biases(config, weights) if has_expert_biases else weights,
            mesh=mesh,
            axis=axis,
            implementation=implementation,
        )
        self.shared_expert = (
            None
            if fused or not shared_size
            else SharedExpert(
                self.hidden_size,
                shared_size,
                activation=config.activation,
                has_gate=has_shared_gate,
                mesh=mesh,
                rngs=rngs,
            )
        )

    @classmethod
    def from_config(
        cls,
        hf_config: Any,
        *,
        layer_index: int | None = None,
        mesh: Mesh | None = None,
        axis: str | tuple[str, ...] | None = None,
        max_num_tokens: int,
        weight_format: str | WeightFormat | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs | None = None,
        **config: Any,
    ) -> "MegaMoEBlock":
        """The block of a Hugging Face model, of a family in the manual's list.

        Args:
            hf_config: the model's transformers config, the same as a dict, or the path of its
                config.json.
            layer_index: the layer; needed where layers differ (DeepSeek-V4's first ones look their
                experts up by token id). None: one that chooses experts by score.
            mesh: see `MegaMoEBlock`, as for axis and implementation.
            axis: see there.
            max_num_tokens: most tokens a rank passes in one call.
            weight_format: see `MoEConfig`; None: as the checkpoint stores the experts. Which layers
                its config excludes from quantisation is certain after `load` only.
            implementation: see there.
            rngs: source of random parameters; None: the block has shapes alone, for `load`.
            **config: further fields of `MoEConfig`, such as num_experts for more physical than
                logical ones, or kernel_source.

        Raises:
            ValueError: a model_type that is not known, a key missing or of another kind than it
                should be, a dense layer, and as `MegaMoEBlock`.
            NotImplementedError: a stored format or an activation that does not run.
            FileNotFoundError: no such file.
        """
        raw = read_hf_config(hf_config)
        spec = block_spec(raw, layer_index)
        device = None if mesh is None else mesh.devices.flat[0]
        form = weight_format or storage.format_of_layer(raw, spec.prefix, layer_index, device)
        hidden_size, intermediate_size = spec.padded_sizes
        logical = spec.router.num_experts
        sizes: dict[str, Any] = dict(
            num_experts=logical,
            num_logical_experts=logical if config.get("num_experts", logical) != logical else None,
            top_k=spec.router.top_k,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            max_num_tokens=max_num_tokens,
            weight_format=form,
            activation=spec.activation,
        )
        keep = weight_format is not None or spec.has_expert_biases
        make = partial(
            cls,
            storage.config_in_place(MoEConfig(**(sizes | config)), mesh, axis, keep),
            spec.router,
            stored_sizes=(spec.hidden_size, spec.intermediate_size),
            shared_size=spec.shared_size,
            has_shared_gate=spec.has_shared_gate,
            has_expert_biases=spec.has_expert_biases,
            mesh=mesh,
            axis=axis,
            implementation=implementation,
        )
        block = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))) if rngs is None else make(rngs=rngs)
        block.layers = layers_of(raw)
        block.storage = storage.storage_of(raw, weight_format is None)
        return block

    @property
    def hidden_size(self) -> int:
        """Hidden size of x and y."""
        return self.stored_sizes[0]

    def __call__(
        self,
        x: BFloat16[Array, "*batch hidden"],
        *,
        token_ids: Int32[Array, "*batch"] | None = None,
        padding_mask: Bool[Array, "*batch"] | None = None,
        eplb: ReplicaMap | None = None,
        return_stats: bool = False,
        return_routing: bool = False,
        name: str = "mega_moe_block",
    ) -> Any:
        """The block's output for every token.

        Args:
            x: bfloat16 [..., H], H the model's hidden size. All but the last dimension are tokens,
                which the mesh axis splits along the first.
            token_ids: int32 [...], for a router with a table; -1 routes nowhere.
            padding_mask: bool [...], True for rows that are no tokens, whose output is 0.
            eplb: where replicas are.
            return_stats: also return what `mega_moe` returns for it.
            return_routing: also return the `Routing`, logical ids before they are mapped to
                replicas, [T, K] of the flattened tokens.
            name: what a `capture_routing` callback is told.

        Returns:
            y, bfloat16 [..., H]; then, where asked for, the stats and the routing.

        Raises:
            ValueError, TypeError: x, ids or mask that do not fit, and as `mega_moe`.
        """
        batch = getattr(x, "ndim", 1) - 1
        _checks.shape("x", x, (*("batch",) * batch, self.hidden_size))
        lead = x.shape[:-1]
        per_token = dict(token_ids=token_ids, padding_mask=padding_mask)
        for argument, array in per_token.items():
            if array is not None:
                _checks.shape(argument, array, lead)
                per_token[argument] = array.reshape(-1)
        rows = x.reshape(-1, self.hidden_size)
        with jax.named_scope("mega_moe_block/router"):
            place = place_of(self.config, self.experts.mesh, self.experts.axis)
            routing = self.router(rows, **per_token, place=place)
        mask, weighs = per_token["padding_mask"], self.router.settings.weighs_input
        inputs, given = weighed(rows, routing) if weighs else (rows, routing)
        result = self.experts(
            _widened(inputs, self.config),
            *given,
            padding_mask=mask,
            eplb=eplb,
            shared_experts=None if self.shared_expert is None or weighs else self._shared,
            return_stats=return_stats,
            name=name,
        )
        y, *stats = result if return_stats else (result,)
        y = y[:, : self.hidden_size]
        if weighs and self.shared_expert is not None:
            y = plus_shared(y, rows, self.shared_expert, mask, place)
        y = y.reshape(x.shape)
        extra = (*stats, *((routing,) if return_routing else ()))
        return (y, *extra) if extra else y

    def load(
        self,
        checkpoint: str | Path | Pairs,
        layer_index: int,
        *,
        prefix: str | None = None,
        quantization_config: Mapping[str, Any] | None = None,
        gate_up_order: GateUpOrder | None = None,
        progress: bool = False,
    ) -> None:
        """Replaces all parameters with those of a layer of a checkpoint.

        Nothing is replaced where anything is wrong. The router's weight keeps the precision it is
        stored in, bfloat16 or float32.

        A block from `from_config` without a weight_format takes the format of this layer, by the
        names found in the checkpoint: `config` changes where the model excludes the layer from
        quantisation or stores it in floating point. A shared expert is fused or not accordingly.

        Args:
            checkpoint: a folder with safetensors files, one such file, or (name, array) pairs.
            layer_index: the layer.
            prefix: of the block's names, such as ``model.layers.3.mlp``; None: found by itself.
            quantization_config: see `load_experts`; None also: that of `from_config`.
            gate_up_order: see `load_experts`; None also: that of the family.
            progress: see there.

        Raises:
            ValueError: a layer that is dense, not there or of another kind; tensors missing or of
                no use; and as `load_experts`.
            TypeError, NotImplementedError, FileNotFoundError: as `load_experts`.
        """
        if self.layers is not None:
            self._check_kind(self.layers.moe_kind(layer_index), layer_index)
        tensors = BlockTensors(checkpoint, layer_index, prefix=prefix)
        made = self._as_stored(tensors, quantization_config)
        router = self.router.read(tensors)
        shared = {} if made.shared_expert is None else made.shared_expert.read(tensors)
        tensors.check_all_taken(fused_shared=made.config.num_shared_experts > 0)
        gate_up_order = gate_up_order or (self.storage and self.storage.gate_up_order)
        experts = load_experts(
            made.config,
            tensors.checkpoint,
            prefix=f"{tensors.prefix}.experts",
            mesh=self.experts.mesh,
            axis=self.experts.axis,
            quantization_config=quantization_config,
            stored_sizes=self.stored_sizes,
            gate_up_order=gate_up_order,
            progress=progress,
        )
        self._check_biases(experts, tensors.prefix)
        mesh = self.experts.mesh
        self.config, self.shared_expert = made.config, made.shared_expert
        for module, arrays in ((self.router, router), (self.shared_expert, shared)):
            for name, array in arrays.items():
                kind = type(getattr(module, name))
                setattr(module, name, replicated(array, mesh, kind))
        self.experts = MegaMoE(
            self.config,
            experts,
            mesh=mesh,
            axis=self.experts.axis,
            implementation=self.experts.implementation,
        )

    def _as_stored(
        self, tensors: BlockTensors, quantization_config: Mapping[str, Any] | None
    ) -> "MegaMoEBlock":
        """The block in the format that the experts are stored in, of shapes alone; itself where
        that is its own, or where its format was given.
        """
        if self.storage is None or not self.storage.decides_format:
            return self
        scheme = tensors.stored_scheme(quantization_config, self.storage.quantization_config)
        own = self.config.weight_format.name
        if scheme == own or (scheme == "fp8_block" and own == "mxfp8"):
            return self
        mesh, shared = self.experts.mesh, self.shared_expert
        device = None if mesh is None else mesh.devices.flat[0]
        form = format_of(scheme, device, f"{tensors.prefix}.experts")
        biased = getattr(self.experts, "w13_bias") is not None
        make = partial(
            MegaMoEBlock,
            storage.config_in_format(self.config, form, mesh, self.experts.axis, biased),
            self.router.settings,
            stored_sizes=self.stored_sizes,
            shared_size=self.config.shared_size if shared is None else shared.gate_proj.shape[0],
            has_shared_gate=shared is not None and shared.output_gate is not None,
            has_expert_biases=biased,
            mesh=mesh,
            axis=self.experts.axis,
            implementation=self.experts.implementation,
        )
        return nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))

    def _shared(self, x: Array) -> Array:
        assert self.shared_expert is not None
        with jax.named_scope("mega_moe_block/shared"):
            return _widened(self.shared_expert(x[:, : self.hidden_size]), self.config)

    def _check_kind(self, kind: str, layer_index: int) -> None:
        hashed = bool(self.router.settings.table_size)
        if hashed != (kind == HASHED):
            by = {True: "one that looks experts up by token id", False: "one that scores experts"}
            hint = f"make the block with from_config(..., layer_index={layer_index})"
            raise ValueError(
                _checks.message(f"layer {layer_index}", by[hashed], by[not hashed], hint)
            )

    def _check_biases(self, experts: ExpertWeights, prefix: str) -> None:
        has, wanted = experts.w13_bias is not None, getattr(self.experts, "w13_bias") is not None
        if has != wanted:
            words = {True: "biases of the experts", False: "no biases of the experts"}
            raise ValueError(_checks.message(prefix, words[wanted], words[has]))


def _widened(rows: Array, config: MoEConfig) -> Array:
    """Rows with zeros up to the config's hidden size."""
    missing = config.hidden_size - rows.shape[1]
    return jnp.pad(rows, ((0, 0), (0, missing))) if missing else rows


def _check_sizes(
    config: MoEConfig, router: Router, stored_sizes: tuple[int, int], shared_size: int
) -> None:
    for name, got, wanted in (
        ("num_experts", router.num_experts, config.logical_experts),
        ("top_k", router.top_k, config.top_k),
    ):
        if got != wanted:
            raise ValueError(_checks.message(f"router {name}", f"{wanted}, the config's", got))
    own = dict(hidden_size=config.hidden_size, intermediate_size=config.intermediate_size)
    for (name, limit), size in zip(own.items(), stored_sizes, strict=True):
        number = _checks.integer(f"stored_sizes {name}", size, minimum=1)
        _checks.at_most(f"stored_sizes {name}", number, limit, f"config.{name}")
    if config.num_shared_experts and shared_size not in (0, config.shared_size):
        expected = f"{config.shared_size}, the config's {config.num_shared_experts} experts"
        raise ValueError(_checks.message("shared_size", expected, shared_size))
