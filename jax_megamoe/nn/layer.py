"""`MegaMoE`, a Flax (nnx) layer: holds the parameters, forwards to `mega_moe`."""

from collections.abc import Callable
from typing import Any

from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, BFloat16, Bool, Float32, Int32

from jax_megamoe.config import MoEConfig
from jax_megamoe.launch import deep_gemm
from jax_megamoe.op.mega_moe import mega_moe, place_of
from jax_megamoe.routing.replicas import ReplicaMap
from jax_megamoe.weights.experts import random_experts, to_layout
from jax_megamoe.weights.params import ARRAY_FIELDS, ExpertWeights, check_weights


class MegaMoE(nnx.Module):
    """The routed experts of one MoE layer, and a fused shared expert if the weights hold one.

    Parameters are `nnx.Param`s in kernel layout, named as the fields of `ExpertWeights`. With a
    mesh they are sharded over the axis (a fused shared expert is replicated) and carry that as
    their `out_sharding`. `nnx.split`, `nnx.jit`, `nnx.eval_shape` and checkpointing of the state
    work as for any module; a state from elsewhere is put in with `nnx.update`.

    Attributes:
        config: the layer's sizes, format and activation.
        mesh: mesh that has the axis; None on one device or inside the caller's `shard_map`.
        axis: the expert-parallel mesh axis, or several.
        implementation: see `mega_moe`.
    """

    def __init__(
        self,
        config: MoEConfig,
        weights: ExpertWeights | None = None,
        *,
        mesh: Mesh | None = None,
        axis: str | tuple[str, ...] | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        """Makes the layer.

        Args:
            config: the layer.
            weights: its parameters; None: random ones, drawn with `rngs`. NVFP4 ones are moved to
                the row order of the kernel source that is installed, where only one is.
            mesh: where to shard them; needs `axis`.
            axis: the expert-parallel mesh axis, or several.
            implementation: ``"deep_gemm"``, ``"xla"``, ``"reference"`` or None.
            rngs: source of the random parameters (its ``params`` stream).

        Raises:
            ValueError: neither weights nor rngs, weights that are not the config's, a mesh without
                the axis, or experts that do not divide by its ranks.
        """
        if mesh is not None:
            place_of(config, mesh, axis)
        if weights is None:
            if rngs is None:
                raise ValueError(
                    "weights: expected an ExpertWeights, or rngs to draw them, got None"
                )
            weights = random_experts(config, rngs.params())
        check_weights(config, weights)
        if implementation in (None, "deep_gemm"):
            device = deep_gemm.default_device() if mesh is None else mesh.devices.flat[0]
            weights = to_layout(weights, deep_gemm.runnable_layout(config, weights.layout, device))
        self.config = config
        self.mesh = mesh
        self.axis = axis
        self.implementation = implementation
        specs = weights.partition_specs(axis) if mesh is not None and axis is not None else None
        for name in ARRAY_FIELDS:
            array = getattr(weights, name)
            setattr(self, name, None if array is None else _param(array, name, specs, mesh))

    @property
    def layout(self) -> str:
        """Row order of the parameters that the layer holds now, see `ExpertWeights.layout`."""
        return self.weights.layout

    @property
    def weights(self) -> ExpertWeights:
        """The parameters as `mega_moe` takes them."""
        params = {name: getattr(self, name) for name in ARRAY_FIELDS}
        arrays = {name: None if param is None else param[...] for name, param in params.items()}
        return ExpertWeights(
            **arrays,
            format=self.config.weight_format.name,
        )

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
    ) -> Any:
        """`mega_moe` with this layer's parameters; see there."""
        return mega_moe(
            x,
            topk_ids,
            topk_weights,
            self.weights,
            config=self.config,
            mesh=self.mesh,
            axis=self.axis,
            padding_mask=padding_mask,
            eplb=eplb,
            shared_experts=shared_experts,
            implementation=self.implementation,
            return_stats=return_stats,
            name=name,
        )


def _param(
    array: Array, name: str, specs: ExpertWeights | None, mesh: Mesh | None
) -> nnx.Param[Array]:
    if specs is None:
        return nnx.Param(array)
    # nnx takes the empty spec of a replicated array for none at all.
    sharding = tuple(getattr(specs, name)) or (None,) * array.ndim
    return nnx.Param(array, out_sharding=sharding, mesh=mesh)
