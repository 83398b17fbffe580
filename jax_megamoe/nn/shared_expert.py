"""`SharedExpert`, the expert that every token goes to, where it is not fused into the kernel."""

import logging
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, BFloat16, Float32

from jax_megamoe.config import Activation, MoEConfig
from jax_megamoe.nn.variables import held, replicated
from jax_megamoe.numerics.expert import activate, matmul
from jax_megamoe.plan import families
from jax_megamoe.weights.checkpoint.block_tensors import BlockTensors

_log = logging.getLogger("jax_megamoe")


class SharedExpert(nnx.Module):
    """A gated MLP in bfloat16, its output weighed by a sigmoid gate if it has one.

    Sums are float32; the value between the two matmuls is rounded to bfloat16.

    Attributes:
        gate_proj, up_proj: bfloat16 [S, H].
        down_proj: bfloat16 [H, S].
        output_gate: bfloat16 [1, H], of the sigmoid; None for none.
        activation: between the matmuls.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation,
        has_gate: bool = False,
        mesh: Mesh | AbstractMesh | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Draws parameters of variance 1 / fan-in, replicated over the mesh if there is one."""

        def drawn(*shape: int) -> nnx.Variable[Array]:
            values = jax.random.normal(rngs.params(), shape, jnp.float32) * shape[1] ** -0.5
            return replicated(values.astype(jnp.bfloat16), mesh)

        self.gate_proj = drawn(intermediate_size, hidden_size)
        self.up_proj = drawn(intermediate_size, hidden_size)
        self.down_proj = drawn(hidden_size, intermediate_size)
        self.output_gate: Any = drawn(1, hidden_size) if has_gate else None
        self.activation = activation

    def __call__(self, x: BFloat16[Array, "tokens hidden"]) -> Float32[Array, "tokens hidden"]:
        """The expert's output for every token, not yet rounded."""
        gate, up = (matmul(x, self._held(name)) for name in ("gate_proj", "up_proj"))
        hidden = activate(gate, up, self.activation).astype(jnp.bfloat16)
        y = matmul(hidden, self._held("down_proj"))
        if self.output_gate is None:
            return y
        return y * jax.nn.sigmoid(matmul(x, self._held("output_gate")))

    def _held(self, name: str) -> Array:
        return held(getattr(self, name), "the shared expert's parameters")

    def read(self, tensors: BlockTensors) -> dict[str, np.ndarray]:
        """The parameters of a checkpoint, by attribute.

        Raises:
            ValueError, TypeError: see `BlockTensors`.
        """
        inter, hidden_size = self.gate_proj.shape
        arrays = tensors.take_shared(hidden_size, inter)
        if self.output_gate is not None:
            gate = tensors.take("shared_expert_gate.weight", shape=(1, hidden_size))
            arrays["output_gate"] = gate.astype(ml_dtypes.bfloat16)
        return arrays


def unfused_reason(
    config: MoEConfig,
    shared_size: int,
    is_whole: bool,
    has_gate: bool,
    weighs_input: bool,
    stored: str | None,
) -> str | None:
    """Why the shared expert is not fused; None where it is, or there is none.

    Args:
        config: the experts.
        shared_size: its intermediate size; 0: there is none.
        is_whole: the config's sizes are the model's.
        has_gate: a sigmoid gate weighs its output.
        weighs_input: the routed experts' tokens are weighed, and its own are not.
        stored: precision that it must keep; None: any.
    """
    form, inter = config.weight_format.name, config.intermediate_size
    fused = config.shared_format
    reasons = {
        "a gate weighs its output": has_gate,
        "it gets other tokens than the routed experts": weighs_input,
        "the model's sizes are rounded up": not is_whole,
        f"its size {shared_size} is no multiple of intermediate_size {inter}": shared_size % inter,
        f"{form} kernels fuse none": config.shared_format is None,
        f"it is stored as {stored}, and {form} kernels would fuse it as {fused}": (
            stored is not None and stored != fused
        ),
        f"{config.kernel_source}'s {form} kernel fuses none": _source_fuses_none(config),
    }
    return next((text for text, holds in reasons.items() if holds and shared_size), None)


def _source_fuses_none(config: MoEConfig) -> bool:
    """Whether no kernel of the source that the config insists on fuses a shared expert."""
    found = families.candidates(config) if config.kernel_source else ()
    fusing = replace(config, num_shared_experts=max(1, config.num_shared_experts))
    return bool(found) and all(family.unsupported(fusing) is not None for family in found)


@lru_cache
def log_unfused(config: MoEConfig, reason: str) -> None:
    """Says once for each config and reason why its shared expert is not fused."""
    _log.info("%s adds its shared expert unfused: %s", config, reason)
