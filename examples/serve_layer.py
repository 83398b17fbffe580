"""Decoding with four MoE blocks over eight devices: a batch of fixed shape, one compile.

A step has a row for each place in the batch, whatever number of sequences is being decoded; rows
without one are masked. So all steps are one executable with static shapes, as CUDA graphs want
them, and the state is updated in place (donated). Sequences come and go during the 32 steps, and
what stands in the rows of those that are not there changes no bit of the others.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_megamoe as mm

# Eight CPU devices stand for eight GPUs.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

LAYERS, BATCH, STEPS, VOCABULARY, HIDDEN = 4, 32, 32, 512, 256
MODEL = dict(  # the keys of config.json that a block needs; its path would do too
    model_type="deepseek_v3",
    hidden_size=HIDDEN,
    moe_intermediate_size=128,
    n_routed_experts=16,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    n_shared_experts=1,
    num_hidden_layers=LAYERS,
)
mesh = jax.make_mesh((8,), ("ep",), axis_types=(AxisType.Auto,))
everywhere = NamedSharding(mesh, P())


def normal(rngs: nnx.Rngs, *shape: int) -> jax.Array:
    """Random float32 of variance 1 / fan-in, on every device."""
    values = jax.random.normal(rngs.params(), shape) * shape[-1] ** -0.5
    return jax.device_put(values, everywhere)


def normalised(x: jax.Array) -> jax.Array:
    """Rows of x at root mean square 1."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


class Model(nnx.Module):
    """Embedding, blocks, head; a block is fed a running mean of its sequence for want of attention.

    Two rows follow the vocabulary's in the embedding, for the filler of empty rows: zeros and NaN.
    """

    def __init__(self, rngs: nnx.Rngs) -> None:
        filler = jnp.stack([jnp.zeros(HIDDEN), jnp.full(HIDDEN, jnp.nan)])
        words = HIDDEN**0.5 * normal(rngs, VOCABULARY, HIDDEN)
        self.embedding = nnx.Param(jnp.concatenate([words, filler]))
        self.head = nnx.Param(normal(rngs, VOCABULARY, HIDDEN))
        self.blocks = nnx.List([self.block(rngs) for _ in range(LAYERS)])

    def block(self, rngs: nnx.Rngs) -> mm.MegaMoEBlock:
        """Router, routed experts spread over the mesh, and a shared expert fused with them."""
        return mm.MegaMoEBlock.from_config(
            MODEL,
            mesh=mesh,
            axis="ep",
            max_num_tokens=BATCH // mesh.size,  # on each rank
            weight_format=mm.MXFP8,
            rngs=rngs,
        )

    def __call__(
        self, tokens: jax.Array, memory: jax.Array, padding_mask: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The next tokens [B], hidden values [B, H] and memory [L, B, H] from this step's."""
        x = self.embedding[...][tokens]
        means = []
        for block, mean in zip(self.blocks, memory, strict=True):
            means.append(0.75 * mean + 0.25 * x)
            fed = normalised(x + means[-1]).astype(jnp.bfloat16)
            x = x + block(fed, padding_mask=padding_mask).astype(jnp.float32)
        logits = normalised(x) @ self.head[...].T
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), x, jnp.stack(means)


class State(NamedTuple):
    """What a step reads and replaces. Row b has a sequence from step `first[b]` to `end[b]`.

    Attributes:
        step: int32 [].
        filler: int32 [], the token that rows without a sequence are given.
        tokens: int32 [B], each row's last token.
        hidden: float32 [B, H], what the last block left.
        memory: float32 [L, B, H].
        first, end: int32 [B].
    """

    step: Any
    filler: Any
    tokens: Any
    hidden: Any
    memory: Any
    first: Any
    end: Any


rows, rows_of_layers = NamedSharding(mesh, P("ep")), NamedSharding(mesh, P(None, "ep"))
shardings = State(everywhere, everywhere, rows, rows, rows_of_layers, rows, rows)


def initial_state(filler: int) -> State:
    """Sequences of 4 to 16 tokens that start at different steps."""
    rng = np.random.default_rng(1)
    first = rng.integers(0, STEPS // 2, BATCH, np.int32)
    end = first + rng.integers(4, 17, BATCH, np.int32)
    words = rng.integers(0, VOCABULARY, BATCH, np.int32)
    hidden = np.zeros((BATCH, HIDDEN), np.float32)
    memory = np.zeros((LAYERS, BATCH, HIDDEN), np.float32)
    state = State(np.int32(0), np.int32(filler), words, hidden, memory, first, end)
    return jax.device_put(state, shardings)


graph, parameters = nnx.split(Model(nnx.Rngs(0)))


@partial(jax.jit, donate_argnames="state", out_shardings=(shardings, everywhere))
def decode(parameters: nnx.State, state: State) -> tuple[State, jax.Array]:
    """One token more for each sequence, and how many there are."""
    real = (state.first <= state.step) & (state.step < state.end)
    tokens = jnp.where(real, state.tokens, state.filler)
    tokens, hidden, memory = nnx.merge(graph, parameters)(tokens, state.memory, ~real)
    after = state._replace(
        step=state.step + 1,
        tokens=jnp.where(real, tokens, state.tokens),
        hidden=jnp.where(real[:, None], hidden, state.hidden),
        memory=jnp.where(real[None, :, None], memory, state.memory),
    )
    return after, real.sum(dtype=jnp.int32)


def serve(filler: int) -> tuple[np.ndarray, State, list[int]]:
    """All steps: tokens [STEPS, B], the last state, the number of real tokens of each step."""
    state, streamed, counts = initial_state(filler), [], []
    for _ in range(STEPS):
        before = state.memory
        state, count = decode(parameters, state)
        check(before.is_deleted(), "the state to be donated")
        streamed.append(np.asarray(state.tokens))
        counts.append(int(count))
    return np.stack(streamed), state, counts


def check(holds: bool, expected: str) -> None:
    """Ends the program where something is not as it should be."""
    if not holds:
        raise SystemExit(f"expected {expected}")


compiles: list[str] = []


def count_compiles(event: str, duration_secs: float, **_: str | int) -> None:
    """Called by JAX after each thing that it has timed."""
    if event == "/jax/core/compile/backend_compile_duration":
        compiles.append(event)


jax.monitoring.register_event_duration_secs_listener(count_compiles)
tokens, state, counts = serve(filler=VOCABULARY)
others, other, _ = serve(filler=VOCABULARY + 1)
print(f"{2 * STEPS} steps, compiles: {len(compiles)}")
check(len(compiles) == 1, "one compile")

first, end = int(np.asarray(state.first)[0]), int(np.asarray(state.end)[0])
print("real tokens by step:", *counts)
print(f"row 0, steps {first} to {end - 1}:", *tokens[first:end, 0])

same = tokens.tobytes() == others.tobytes()
for name in ("hidden", "memory"):
    same &= np.asarray(getattr(state, name)).tobytes() == np.asarray(getattr(other, name)).tobytes()
print("NaN in rows without a sequence:", "no bit differs" if same else "bits differ")
check(same, "NaN in rows without a sequence to change nothing")

experts = [each for each in jax.tree.leaves(parameters) if not each.is_fully_replicated]
size = sum(each.nbytes for each in experts)
local = sum(each.addressable_shards[0].data.nbytes for each in experts)
print(f"routed experts: {size / 1e6:.1f} MB, {local / 1e6:.2f} MB on each of {mesh.size} devices")
check(local * mesh.size == size, "experts to be spread evenly")
