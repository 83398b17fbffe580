"""`MegaMoE`, a Flax (nnx) layer: holds the parameters, forwards to `mega_moe`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, BFloat16, Bool, Float32, Int32

from jax_megamoe import _checks
from jax_megamoe.config import MoEConfig, check_config
from jax_megamoe.formats import GROUPED_LAYOUTS, INTERLEAVE_8
from jax_megamoe.mesh import Axis, current_mesh
from jax_megamoe.nn.storage import layout_here
from jax_megamoe.nn.variables import ExpertVariable, MatrixVariables, held, put, replicated
from jax_megamoe.op.mega_moe import Counted, call, narrowed
from jax_megamoe.op.transforms import Parameters, Place, Result, Tokens, place_of
from jax_megamoe.routing.rebalance import rebalance, solve_placement
from jax_megamoe.routing.replicas import ReplicaMap, check_map, initial_map, placement_of
from jax_megamoe.weights.checkpoint.load import Pairs, reload_experts
from jax_megamoe.weights.drawn import random_experts
from jax_megamoe.weights.folded_biases import fold_biases, with_free_columns
from jax_megamoe.weights.params import (
    ExpertWeights,
    check_kind,
    check_weights,
    default_layout,
    layout_of,
)
from jax_megamoe.weights.relayout import to_layout


class MegaMoE(nnx.Module):
    """The routed experts of one MoE layer, and a fused shared expert if the weights hold one.

    Parameters are `ExpertVariable`s in kernel layout, at the paths of `ExpertWeights`
    (``routed.w13_weight``, ``shared.w2_weight``): `nnx.grad` and `nnx.Optimizer` leave them alone.
    A layer with num_logical_experts also holds its replica map, ``logical_to_physical`` and
    ``num_replicas``, or one without after a rebalance.
    With a mesh, experts are sharded over the axis (a fused shared expert and the map are
    replicated) and carry that as their `out_sharding`.

    `nnx.split`, `nnx.jit`, `nnx.eval_shape` and checkpointing of the state work as for any module;
    a state from elsewhere is put in with `nnx.update`. All that decides what the arrays mean is in
    the state, NVFP4's row order (in the shapes of w13's fields) and its input scales too.

    Attributes:
        config: the layer's sizes, format and activation.
        mesh: mesh that has the axis; None on one device or inside the caller's `shard_map`.
        axis: the expert-parallel mesh axis, or several.
        token_axes: see `mega_moe`.
        implementation: see `mega_moe`.
    """

    def __init__(
        self,
        config: MoEConfig,
        weights: ExpertWeights | None = None,
        *,
        mesh: Mesh | None = None,
        axis: Axis | None = None,
        token_axes: Axis | None = None,
        implementation: str | None = None,
        eplb: ReplicaMap | None = None,
        has_biases: bool = False,
        folds_biases: bool = False,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        """Makes the layer.

        Args:
            config: the layer.
            weights: its parameters; None: random ones, drawn with `rngs`, by each device its own.
                They are moved to the layout of the kernel that will run: NVFP4 to the row order of
                the source that is installed, where only one is (config.kernel_source names one for
                all machines); to the grouped products' where `implementation` names them, or names
                none and they alone run on this device.
            mesh: where to shard them; None: over the current mesh (`jax.set_mesh`), if it has
                `axis`.
            axis: the expert-parallel mesh axis, or several.
            token_axes: see `mega_moe`.
            implementation: as `mega_moe` names it.
            eplb: where the replicas in `weights` are; None: slot p holds logical expert
                p % num_logical_experts.
            has_biases: whether random parameters have biases, 0.
            folds_biases: whether the biases are folded, see `fold_biases`; not for an
                implementation or a layout that has biases of its own.
            rngs: source of the random parameters (its ``params`` stream).

        Raises:
            ValueError: neither weights nor rngs, weights or a map that are not the config's, a mesh
                without the axis, or experts that do not divide by its ranks.
        """
        check_config(config, MoEConfig)
        if weights is not None:
            check_kind(weights)
        spread = current_mesh(axis) if mesh is None else mesh
        if spread is not None:
            place_of(config, spread, axis, token_axes)
        is_drawn = weights is None
        adds_biases = has_biases if weights is None else weights.routed.w2_bias is not None
        layout = layout_here(
            config,
            default_layout(config) if weights is None else weights.layout,
            spread,
            axis,
            implementation,
            adds_biases=adds_biases and not folds_biases,
        )
        if weights is None:
            key = _drawn_key(rngs)
            drawn = INTERLEAVE_8 if layout in GROUPED_LAYOUTS else layout
            weights = random_experts(
                config, key, layout=drawn, has_biases=has_biases, mesh=spread, axis=axis
            )
        else:
            check_weights(config, weights)
        weights = to_layout(weights, layout)
        if folds_biases and implementation in (None, "deep_gemm") and layout not in GROUPED_LAYOUTS:
            weights = with_free_columns(weights) if is_drawn else weights
            weights = fold_biases(config, weights)
        self.config = config
        self.mesh = spread if isinstance(spread, Mesh) else None
        self.axis = axis
        self.token_axes = token_axes
        self.implementation = implementation
        specs = weights.partition_specs(axis) if spread is not None and axis is not None else None
        self.routed = MatrixVariables(weights.routed, specs and specs.routed, spread)
        shared = weights.shared and MatrixVariables(weights.shared, specs and specs.shared, spread)
        self.shared = shared
        if eplb is None and config.num_logical_experts is not None:
            eplb = initial_map(config)
        self.logical_to_physical: Any = None
        self.num_replicas: Any = None
        if eplb is not None:
            check_map(config, eplb)
            self._set_map(eplb)

    @property
    def used_mesh(self) -> Mesh | AbstractMesh | None:
        """The layer's mesh; where it was made without one, the current one if it has the axis."""
        return current_mesh(self.axis) if self.mesh is None else self.mesh

    @property
    def layout(self) -> str:
        """Row order of the parameters that the layer holds now, see `ExpertWeights.layout`."""
        return self._weights(lambda variable: variable.get_value()).layout

    @property
    def has_biases(self) -> bool:
        """Whether the experts have biases, folded ones too."""
        return self.routed.w2_bias is not None

    @property
    def folds_biases(self) -> bool:
        """Whether the last columns of w13_weight hold the first biases."""
        return self.has_biases and self.routed.w13_bias is None

    @property
    def weights(self) -> ExpertWeights:
        """The parameters as `mega_moe` takes them.

        Raises:
            ValueError: they are shapes alone, or were deleted.
        """
        return self._weights(lambda variable: held(variable, "the layer's parameters"))

    @property
    def eplb(self) -> ReplicaMap | None:
        """Where the replicas are; None: slot p holds logical expert p."""
        if self.num_replicas is None:
            return None
        arrays = (self.logical_to_physical, self.num_replicas)
        return ReplicaMap(*(held(array, "the layer's replica map") for array in arrays))

    @property
    def placement(self) -> np.ndarray:
        """int32 [num_experts], the logical expert in each slot; outside jit."""
        eplb = self.eplb
        if eplb is None:
            return np.arange(self.config.num_experts, dtype=np.int32)
        return placement_of(self.config, eplb)

    @overload
    def __call__(
        self,
        x: BFloat16[Array, "tokens hidden"],
        topk_ids: Int32[Array, "tokens top_k"],
        topk_weights: Float32[Array, "tokens top_k"],
        *,
        padding_mask: Bool[Array, " tokens"] | None = None,
        eplb: ReplicaMap | None = None,
        shared_experts: Callable[[Array], Array] | None = None,
        return_stats: Literal[False] = False,
        name: str = "mega_moe",
    ) -> BFloat16[Array, "tokens hidden"]: ...

    @overload
    def __call__(
        self,
        x: BFloat16[Array, "tokens hidden"],
        topk_ids: Int32[Array, "tokens top_k"],
        topk_weights: Float32[Array, "tokens top_k"],
        *,
        padding_mask: Bool[Array, " tokens"] | None = None,
        eplb: ReplicaMap | None = None,
        shared_experts: Callable[[Array], Array] | None = None,
        return_stats: Literal[True],
        name: str = "mega_moe",
    ) -> Counted: ...

    def __call__(
        self,
        x: BFloat16[Array, "tokens hidden"],
        topk_ids: Int32[Array, "tokens top_k"],
        topk_weights: Float32[Array, "tokens top_k"],
        *,
        padding_mask: Bool[Array, " tokens"] | None = None,
        eplb: ReplicaMap | None = None,
        shared_experts: Callable[[Array], Array] | None = None,
        return_stats: bool = False,
        name: str = "mega_moe",
    ) -> BFloat16[Array, "tokens hidden"] | Counted:
        """`mega_moe` with this layer's parameters and replica map, for any number of tokens.

        Outside `shard_map`, tokens that do not divide by the ranks are padded, and the padding is
        cut off again. An `eplb` that is given is used in place of the layer's.
        """
        tokens = Tokens(x, topk_ids, topk_weights, padding_mask)
        options = dict(shared_experts=shared_experts, with_stats=return_stats, name=name)
        return narrowed(self.counted(tokens=tokens, eplb=eplb, **options))

    def counted(self, *, tokens: Tokens, eplb: ReplicaMap | None, **options: Any) -> Result:
        """The layer's call, as a pair whether or not it counts; options of `op.mega_moe.call`.

        Keywords alone: `nnx.tabulate` prints no NamedTuple among positional arguments.
        """
        return call(
            tokens,
            Parameters(self.weights, self.eplb if eplb is None else eplb),
            config=self.config,
            place=self.place,
            implementation=self.implementation,
            pads=True,
            **options,
        )

    @property
    def place(self) -> Place:
        """Where a call of the layer runs. (A property: `nnx.tabulate` traces methods, whose results
        must be arrays.)"""
        return place_of(self.config, self.mesh, self.axis, self.token_axes)

    def replace(self, weights: ExpertWeights, eplb: ReplicaMap | None = None) -> None:
        """Puts other parameters in, and where their replicas are. Nothing is compiled anew.

        Both change together: a call before has the old ones, a call after the new ones. Nothing is
        changed where anything is wrong.

        Args:
            weights: of the same config, row order and fields.
            eplb: their map; None: the initial one.

        Raises:
            ValueError, TypeError: parameters or a map that are not this layer's.
        """
        check_weights(self.config, weights)
        if weights.layout != self.layout:
            raise ValueError(
                _checks.message(
                    "weights.layout",
                    f"{self.layout!r}, the layer's",
                    repr(weights.layout),
                    f"jax_megamoe.to_layout(weights, {self.layout!r}) moves them",
                )
            )
        given, own = weights.arrays(), self._weights(lambda variable: variable.get_value()).arrays()
        for name in sorted(given.keys() ^ own.keys()):
            words = {True: "an array, as the layer has", False: "None: the layer has none"}
            got = "an array" if name in given else None
            raise ValueError(_checks.message(f"weights.{name}", words[name in own], got))
        for name, array in own.items():
            _checks.shape(f"weights.{name}", given[name], array.shape, "as the layer has")
        if eplb is None and self.num_replicas is not None:
            eplb = initial_map(self.config)
        if eplb is not None:
            check_map(self.config, eplb)
        self._put(weights)
        if eplb is not None:
            self._set_map(eplb)

    def reload(self, checkpoint: str | Path | Pairs, *, prefix: str, **options: Any) -> None:
        """Puts in what a checkpoint holds, into the slots where the experts are now.

        All tensors of the layer or a few, see `reload_experts`, whose other arguments are taken
        too. Nothing is changed where anything is wrong, and nothing is compiled anew.

        Args:
            checkpoint: see `load_experts`.
            prefix: of the experts' names.
            **options: gate_up_order, stored_sizes, progress.

        Raises:
            ValueError, TypeError, NotImplementedError, FileNotFoundError: as `load_experts`.
        """
        weights = reload_experts(
            self.config,
            self.weights,
            checkpoint,
            prefix=prefix,
            physical_to_logical=self.placement,
            **options,
        )
        self.replace(weights, self.eplb)

    def rebalance(
        self, placement: np.ndarray | None = None, *, loads: np.ndarray | None = None
    ) -> np.ndarray:
        """Moves experts to other slots, and the replica map with them. Nothing is compiled anew,
        but for a layer without num_logical_experts the first time, which then gets a map.

        The layer's arrays are given up (donated): no other layer may share them.

        Args:
            placement: int [num_experts], the logical expert that each slot is to hold.
            loads: [num_logical_experts], tokens of each: `solve_placement` chooses by them.

        Returns:
            The placement.

        Raises:
            ValueError: both arguments or neither, and as `rebalance` and `solve_placement`.
        """
        if (placement is None) == (loads is None):
            got = "both" if loads is not None else "neither"
            raise ValueError(_checks.message("placement and loads", "one of the two", got))
        if loads is not None:
            _checks.shape("loads", np.asarray(loads), (self.config.logical_experts,))
            placement = solve_placement(loads, self.config.num_experts, self.place.num_ranks)
        assert placement is not None
        mesh = self.used_mesh
        if isinstance(mesh, AbstractMesh):
            expected = "a call outside jit: experts move between devices"
            raise ValueError(_checks.message("rebalance", expected, "one in a trace"))
        weights, eplb = rebalance(
            self.config,
            self.weights,
            self.placement,
            placement,
            mesh=mesh,
            axis=None if mesh is None else self.axis,
        )
        self._put(weights)
        self._set_map(eplb)
        return np.asarray(placement)

    def _weights(self, read: Callable[[ExpertVariable], Any]) -> ExpertWeights:
        routed = self.routed.matrices(read)
        shared = None if self.shared is None else self.shared.matrices(read)
        layout = layout_of(self.config, routed)
        return ExpertWeights(routed, shared, self.config.weight_format.name, layout)

    def _put(self, weights: ExpertWeights) -> None:
        for name, part in weights.parts.items():
            variables = getattr(self, name)
            for field, array in part.arrays().items():
                put(getattr(variables, field), array)

    def _set_map(self, eplb: ReplicaMap) -> None:
        for name in ("logical_to_physical", "num_replicas"):
            array, variable = getattr(eplb, name), getattr(self, name)
            # Each process places its own copy.
            array = array if isinstance(array, Tracer) else np.asarray(array)
            if variable is None:
                variable = replicated(array, self.used_mesh, ExpertVariable)
                setattr(self, name, nnx.data(variable))
            else:
                put(variable, array)


def _drawn_key(rngs: object) -> Array:
    """A key of the ``params`` stream."""
    if rngs is None:
        expected = "an ExpertWeights, or rngs to draw them"
        raise ValueError(_checks.message("weights", expected, None))
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(_checks.message("rngs", "an nnx.Rngs(seed)", type(rngs).__name__))
    return rngs.params()
