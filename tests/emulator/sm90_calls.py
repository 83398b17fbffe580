"""Calls of the SM90 mega kernel that an H200's outputs are recorded for.

`tests/gpu/record_sm90.py` records them, `test_sm90_outputs.py` runs them on the emulator. Inputs
come from seeds, through NumPy, and parameters are quantised on the CPU: both sides have their bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jax_megamoe as mm


@dataclass(frozen=True)
class Call:
    """One call on one rank."""

    tokens: int
    clamp: float | None = None
    hidden: int = 512
    intermediate: int = 256
    experts: int = 8
    top_k: int = 2

    @property
    def name(self) -> str:
        """Its key in the record."""
        clamp = "" if self.clamp is None else f"_clamp{self.clamp:g}"
        return f"h{self.hidden}_i{self.intermediate}_t{self.tokens}{clamp}"

    def config(self) -> mm.MoEConfig:
        """The layer."""
        return mm.MoEConfig(
            num_experts=self.experts,
            top_k=self.top_k,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            max_num_tokens=192,
            weight_format="fp8_block",
            activation=mm.Activation("swiglu", clamp=self.clamp),
        )

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, mm.ExpertWeights]:
        """Tokens, ids, factors and parameters, on the CPU."""
        rng = np.random.default_rng([self.tokens, self.hidden, self.intermediate])

        def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
            return (rng.standard_normal(shape) * scale).astype(ml_dtypes.bfloat16)

        experts, hidden, inter = self.experts, self.hidden, self.intermediate
        gate, up = (normal(experts, inter, hidden, scale=hidden**-0.5) for _ in range(2))
        down = normal(experts, hidden, inter, scale=inter**-0.5)
        x = normal(self.tokens, hidden)
        ids = np.argsort(rng.random((self.tokens, experts)), axis=1)[:, : self.top_k]
        factors = rng.random((self.tokens, self.top_k)).astype(np.float32) + np.float32(0.1)
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            weights = mm.quantize_experts(self.config(), *map(jnp.asarray, (gate, up, down)))
        return x, ids.astype(np.int32), factors, jax.tree.map(np.asarray, weights)


def calls() -> Iterator[Call]:
    """All of them: token counts about a tile of 64 rows, both activations, a deeper K."""
    for tokens in (1, 7, 33, 130):
        yield Call(tokens)
    yield Call(33, clamp=0.5)
    yield Call(33, hidden=2048, intermediate=512)
