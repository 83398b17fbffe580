"""`MegaMoEBlock`, a Flax (nnx) module: a router, its experts, and a shared expert."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, BFloat16, Bool, Int32

from jax_megamoe import _checks
from jax_megamoe.config import MoEConfig
from jax_megamoe.formats import WeightFormat
from jax_megamoe.mesh import Axis, current_mesh, device_of, reshape_rows
from jax_megamoe.nn import storage
from jax_megamoe.nn.block_checks import (
    check_block_sizes,
)
from jax_megamoe.nn.block_load import load_block, reload_block
from jax_megamoe.nn.hf_config import Layers, block_spec, layers_of, read_hf_config
from jax_megamoe.nn.layer import MegaMoE
from jax_megamoe.nn.router_layer import RouterLayer
from jax_megamoe.nn.shared_expert import SharedExpert, log_unfused, unfused_reason
from jax_megamoe.nn.weighed_input import plus_shared, weighed
from jax_megamoe.op.transforms import Tokens, widened
from jax_megamoe.routing.replicas import ReplicaMap
from jax_megamoe.routing.router import Router
from jax_megamoe.weights.checkpoint.families import GateUpOrder
from jax_megamoe.weights.checkpoint.load import Pairs


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
        layers: the kinds of the model's layers, for `load`; None for a block made from its parts.
        storage: how the model stores experts, for `load`; None likewise.
    """

    def __init__(  # noqa: PLR0913 (one keyword for each part of a block)
        self,
        config: MoEConfig,
        router: Router,
        *,
        stored_sizes: tuple[int, int] | None = None,
        shared_size: int = 0,
        has_shared_gate: bool = False,
        has_expert_biases: bool = False,
        shared_format: str | None = None,
        shared_stored: str | None = None,
        mesh: Mesh | None = None,
        axis: Axis | None = None,
        token_axes: Axis | None = None,
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
            shared_format: precision to fuse the shared expert in, whatever it is stored in; None:
                it is fused only where that is the precision it is stored in, and else runs in
                bfloat16.
            shared_stored: how the shared expert is stored, such as ``"bf16"`` or ``"mxfp8"``; None:
                not known yet, `load` will see.
            mesh: where to shard the experts; None: over the current mesh (`jax.set_mesh`), if it
                has `axis`. The rest is replicated.
            axis: the expert-parallel mesh axis, or several.
            token_axes: see `mega_moe`.
            implementation: of the experts, see `mega_moe`.
            rngs: source of the parameters (its ``params`` stream).

        Raises:
            ValueError: sizes that do not fit, and as `MegaMoE`.
        """
        _checks.integer("shared_size", shared_size)
        own = (config.hidden_size, config.intermediate_size)
        self.stored_sizes = own if stored_sizes is None else stored_sizes
        check_block_sizes(config, router, self.stored_sizes, shared_size)
        shared_size = shared_size or config.shared_size
        if has_shared_gate and not shared_size:
            expected = "False where there is no shared expert"
            raise ValueError(_checks.message("has_shared_gate", expected, True))
        self.shared_format, self.shared_stored = shared_format, shared_stored
        wanted = shared_format
        if wanted is None and shared_stored in config.recipe.shared_formats:
            wanted = shared_stored
        if wanted is not None:
            config = replace(config, shared_format=wanted)
        kept = shared_stored if shared_format is None else None
        is_whole, weighs = own == self.stored_sizes, router.weighs_input
        reason = unfused_reason(config, shared_size, is_whole, has_shared_gate, weighs, kept)
        if reason:
            log_unfused(config, reason)
        fused = shared_size // config.intermediate_size if reason is None else 0
        self.config = config = replace(config, num_shared_experts=fused)
        self.layers: Layers | None = None
        self.storage: storage.Storage | None = None
        spread = current_mesh(axis) if mesh is None else mesh
        self.router = RouterLayer(router, self.hidden_size, mesh=spread, rngs=rngs)
        self.experts = MegaMoE(
            config,
            mesh=mesh,
            axis=axis,
            token_axes=token_axes,
            implementation=implementation,
            has_biases=has_expert_biases,
            folds_biases=has_expert_biases and storage.folds(config, mesh, axis, self.hidden_size),
            rngs=rngs,
        )
        self.shared_expert = (
            None
            if fused or not shared_size
            else SharedExpert(
                self.hidden_size,
                shared_size,
                activation=config.activation,
                has_gate=has_shared_gate,
                mesh=spread,
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
        axis: Axis | None = None,
        token_axes: Axis | None = None,
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
            axis: see there, as for token_axes.
            token_axes: see there.
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
        form = weight_format or storage.format_of_layer(
            raw, spec.prefix, layer_index, device_of(mesh)
        )
        experts = storage.config_of_spec(spec, form, max_num_tokens, **config)
        keep, hidden = weight_format is not None, spec.hidden_size * spec.has_expert_biases
        make = partial(
            cls,
            storage.config_of_model(experts, mesh, axis, keep, hidden),
            spec.router,
            stored_sizes=(spec.hidden_size, spec.intermediate_size),
            shared_size=spec.shared_size,
            has_shared_gate=spec.has_shared_gate,
            has_expert_biases=spec.has_expert_biases,
            shared_format=config.get("shared_format"),
            shared_stored=storage.shared_scheme(raw, spec.prefix, layer_index),
            mesh=mesh,
            axis=axis,
            token_axes=token_axes,
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

    @overload
    def __call__(
        self,
        x: BFloat16[Array, "*batch hidden"],
        *,
        token_ids: Int32[Array, "*batch"] | None = None,
        padding_mask: Bool[Array, "*batch"] | None = None,
        eplb: ReplicaMap | None = None,
        return_stats: Literal[False] = False,
        return_routing: Literal[False] = False,
        name: str = "mega_moe_block",
    ) -> Array: ...

    @overload
    def __call__(
        self,
        x: BFloat16[Array, "*batch hidden"],
        *,
        token_ids: Int32[Array, "*batch"] | None = None,
        padding_mask: Bool[Array, "*batch"] | None = None,
        eplb: ReplicaMap | None = None,
        return_stats: Literal[True],
        return_routing: bool = False,
        name: str = "mega_moe_block",
    ) -> tuple[Any, ...]: ...

    @overload
    def __call__(
        self,
        x: BFloat16[Array, "*batch hidden"],
        *,
        token_ids: Int32[Array, "*batch"] | None = None,
        padding_mask: Bool[Array, "*batch"] | None = None,
        eplb: ReplicaMap | None = None,
        return_stats: bool = False,
        return_routing: Literal[True],
        name: str = "mega_moe_block",
    ) -> tuple[Any, ...]: ...

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
    ) -> Array | tuple[Any, ...]:
        """The block's output for every token.

        Args:
            x: bfloat16 [..., H], H the model's hidden size. All but the last dimension are tokens,
                which the mesh axis splits along the first; any number of them, see `MegaMoE`.
            token_ids: int32 [...], for a router with a table; -1 routes nowhere.
            padding_mask: bool [...], True for rows that are no tokens: their output is 0.
            eplb: where replicas are, in place of the experts' own map.
            return_stats: also return the tokens of each local expert, as `mega_moe` does.
            return_routing: also return the `Routing`, logical ids before they are mapped to
                replicas, [T, K] of the flattened tokens.
            name: what a `capture_routing` callback is told.

        Returns:
            y, bfloat16 [..., H]; then, where asked for, the counts and the routing.

        Raises:
            ValueError, TypeError: x, ids or mask that do not fit, and as `mega_moe`.
        """
        batch = getattr(x, "ndim", 1) - 1
        _checks.shape("x", x, (*("batch",) * batch, self.hidden_size))
        lead = x.shape[:-1]
        num_tokens = math.prod(lead)
        per_token = dict(token_ids=token_ids, padding_mask=padding_mask)
        for argument, array in per_token.items():
            if array is not None:
                _checks.shape(argument, array, lead)
                per_token[argument] = reshape_rows(array, (num_tokens,))
        rows = reshape_rows(x, (num_tokens, self.hidden_size))
        with jax.named_scope("mega_moe_block/router"):
            place = self.experts.place
            routing = self.router(rows, **per_token, place=place)
        mask, weighs = per_token["padding_mask"], self.router.settings.weighs_input
        inputs, given = weighed(rows, routing) if weighs else (rows, routing)
        y, counts = self.experts.counted(
            tokens=Tokens(widened(inputs, self.config), *given, mask),
            eplb=eplb,
            shared_experts=None if self.shared_expert is None or weighs else self._shared,
            with_stats=return_stats,
            name=name,
        )
        y = y[:, : self.hidden_size]
        if weighs and self.shared_expert is not None:
            y = plus_shared(y, rows, self.shared_expert, mask, place)
        y = reshape_rows(y, x.shape)
        if counts is None:
            return (y, routing) if return_routing else y
        return (y, counts, routing) if return_routing else (y, counts)

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
        """Loads all parameters from a layer of a checkpoint.

        If anything is wrong, nothing is replaced. The router's weight keeps its stored dtype.

        A block from `from_config` without a weight_format takes the format of this layer, by the
        names found in the checkpoint: `config` changes where the model excludes the layer from
        quantisation or stores it in floating point. A shared expert is fused where the kernels can
        run it in the precision that the checkpoint has, unless shared_format says otherwise.

        Args:
            checkpoint: a folder with safetensors files, one such file, or (name, array) pairs.
            layer_index: the layer.
            prefix: of the block's names, such as ``model.layers.3.mlp``; None: it is searched for.
            quantization_config: see `load_experts`; None also: `from_config`'s.
            gate_up_order: see `load_experts`; None also: the family's.
            progress: see there.

        Raises:
            ValueError: a layer that is dense, not there or of another kind; tensors missing or of
                no use; and as `load_experts`.
            TypeError, NotImplementedError, FileNotFoundError: as `load_experts`.
        """
        load_block(
            self,
            MegaMoEBlock,
            checkpoint,
            layer_index,
            prefix=prefix,
            quantization_config=quantization_config,
            gate_up_order=gate_up_order,
            progress=progress,
        )

    def reload(self, checkpoint: str | Path | Pairs, layer_index: int, **options: Any) -> None:
        """Puts in a layer of a checkpoint, experts into the slots where they are.

        All of the router and of an unfused shared expert, all or a few tensors of the experts. The
        block keeps its formats. Nothing is compiled anew, unlike after `load`.

        Nothing is changed where anything is wrong.

        Args:
            checkpoint: see `load`, as for layer_index.
            layer_index: the layer.
            **options: prefix, gate_up_order and progress, see `load`.

        Raises:
            ValueError, TypeError, NotImplementedError, FileNotFoundError: as `load`; a router in
                another precision than the block's.
        """
        reload_block(self, checkpoint, layer_index, **options)

    def rebalance(
        self, placement: np.ndarray | None = None, *, loads: np.ndarray | None = None
    ) -> np.ndarray:
        """`MegaMoE.rebalance` of the experts; the router goes on with logical ids."""
        return self.experts.rebalance(placement, loads=loads)

    def _shared(self, x: Array) -> Array:
        assert self.shared_expert is not None
        with jax.named_scope("mega_moe_block/shared"):
            return widened(self.shared_expert(x[:, : self.hidden_size]), self.config)
