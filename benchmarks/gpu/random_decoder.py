"""Decoders of examples/generate.py with random parameters of published sizes, made on the device.

Nothing is read from a checkpoint or sent from the host. A few layers are drawn as a user's layer
draws them (normal weights of variance 1 / fan-in, quantised, in the layout of the kernel that will
run), and take turns: every layer of the model has arrays of its own.
"""

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import generate
import jax
import jax.numpy as jnp
import workload
from flax import nnx

import jax_megamoe as mm
from jax_megamoe.formats import GROUPED_LAYOUTS
from jax_megamoe.launch import deep_gemm, grouped
from jax_megamoe.plan.launch import LaunchPlan
from jax_megamoe.plan.refusal import Refusal
from jax_megamoe.plan.staging import Routing

DRAWN = 4
"""Layers that are drawn."""

QWEN3_30B: dict[str, Any] = dict(
    model_type="qwen3_moe", hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
    num_key_value_heads=4, head_dim=128, vocab_size=151936, rms_norm_eps=1e-6, rope_theta=1e6,
    num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
    decoder_sparse_step=1, mlp_only_layers=[], intermediate_size=6144, hidden_act="silu",
    tie_word_embeddings=False,
)  # fmt: skip
GPT_OSS_120B: dict[str, Any] = dict(
    model_type="gpt_oss", hidden_size=2880, num_hidden_layers=36, num_attention_heads=64,
    num_key_value_heads=8, head_dim=64, vocab_size=201088, rms_norm_eps=1e-5, rope_theta=150000.0,
    rope_scaling=dict(
        rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
        original_max_position_embeddings=4096,
    ),
    max_position_embeddings=131072, num_local_experts=128, num_experts_per_tok=4,
    intermediate_size=2880, sliding_window=128, swiglu_limit=7.0, attention_bias=True,
    layer_types=["sliding_attention", "full_attention"] * 18, hidden_act="silu",
    tie_word_embeddings=False,
)  # fmt: skip
"""What config.json says of the published models, as far as a decoder needs it."""

_SMALL = dict(
    hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    vocab_size=256, intermediate_size=128,
)  # fmt: skip
_SMALL_BY_FAMILY: dict[str, dict[str, Any]] = dict(
    qwen3_moe=dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128),
    gpt_oss=dict(
        num_local_experts=8, num_experts_per_tok=2, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model and how its experts run.

    Attributes:
        raw: its config.json.
        weight_format: of the experts, see `MoEConfig`.
        implementation: see `mega_moe`; None: what a layer chooses.
    """

    raw: dict[str, Any]
    weight_format: str
    implementation: str | None

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return self.raw.get("num_experts") or self.raw["num_local_experts"]

    def small(self) -> "Case":
        """The same at sizes for a CPU."""
        raw = self.raw | _SMALL | _SMALL_BY_FAMILY[self.raw["model_type"]]
        return replace(self, raw=raw, implementation="xla")


CASES = {
    "qwen3_30b_fp8_block": Case(QWEN3_30B, "fp8_block", "deep_gemm"),
    "qwen3_30b_mxfp4_block": Case(QWEN3_30B, "mxfp4_block", None),
    "gpt_oss_120b_mxfp4_block": Case(GPT_OSS_120B, "mxfp4_block", "grouped"),
    "gpt_oss_120b_mxfp4": Case(GPT_OSS_120B, "mxfp4", "grouped"),
}
"""By name. The last multiplies MXFP8 tokens, which is what a layer loaded from the checkpoint runs
where no fused kernel does; the one before it, FP8 tokens with a scale for 128 values."""


def blocks(case: Case, max_num_tokens: int, count: int) -> list[mm.MegaMoEBlock]:
    """So many random blocks."""
    return [
        mm.MegaMoEBlock.from_config(
            case.raw,
            layer_index=index,
            max_num_tokens=max_num_tokens,
            weight_format=case.weight_format,
            implementation=case.implementation,
            rngs=nnx.Rngs(index),
        )
        for index in range(count)
    ]


def decoder(case: Case, drawn: list[mm.MegaMoEBlock]) -> generate.Decoder:
    """The model, its layers' blocks copies of the drawn ones in turn."""
    config, read = generate.DecoderConfig.of(case.raw), reader(case.raw)
    count = len(config.windows)
    parts = [
        generate.Layer(config, read, index, block) for index, block in enumerate(drawn[:count])
    ]

    def layers() -> Iterator[generate.Layer]:
        for index in range(count):
            yield parts[index % len(parts)]

    return generate.Decoder(config, read, generate.stacked(layers(), count))


def reader(raw: dict[str, Any]) -> Callable[[str], jax.Array]:
    """Random arrays by the names that checkpoints have: matrices of variance 1 / fan-in, small
    biases, norms of 1."""
    hidden, vocab, head = (raw[f"{name}"] for name in ("hidden_size", "vocab_size", "head_dim"))
    q, kv = (raw[f"num_{kind}_heads"] * head for kind in ("attention", "key_value"))
    rows = dict(q_proj=q, k_proj=kv, v_proj=kv, o_proj=hidden)

    def read(name: str) -> jax.Array:
        key = jax.random.key(zlib.crc32(name.encode()))
        *_, part, kind = name.split(".")
        if kind == "sinks":
            return _normal(key, (raw["num_attention_heads"],), 1.0)
        if kind == "bias":
            return _normal(key, (rows[part],), 0.02)
        if part == "embed_tokens":
            return _normal(key, (vocab, hidden), 1.0)
        if part == "lm_head":
            return _normal(key, (vocab, hidden), hidden**-0.5)
        if part in rows:
            columns = q if part == "o_proj" else hidden
            return _normal(key, (rows[part], columns), columns**-0.5)
        return jnp.ones(head if part in ("q_norm", "k_norm") else hidden, jnp.bfloat16)

    return read


@partial(jax.jit, static_argnames=("shape", "deviation"))
def _normal(key: jax.Array, shape: tuple[int, ...], deviation: float) -> jax.Array:
    return (jax.random.normal(key, shape, jnp.float32) * deviation).astype(jnp.bfloat16)


@partial(jax.jit, static_argnames="shape")
def _noise(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    keys = jax.random.split(key, shape[0])
    return jax.lax.map(lambda key: jax.random.normal(key, shape[1:], jnp.bfloat16), keys)


def full_cache(model: generate.Decoder, sequences: int, length: int) -> generate.Cache:
    """A cache of noise, as if so many positions had been decoded."""
    shape = jax.eval_shape(partial(model.empty_cache, sequences, length)).keys.shape
    return generate.Cache(*(_noise(jax.random.key(each), shape) for each in range(2)))


class Loaded(NamedTuple):
    """A model on the device.

    Attributes:
        config: what is known of its attention.
        graph, state: of the module, split.
        sizes: bytes of one expert, and of one layer's router and attention; of the head.
        layout: of the experts' parameters.
    """

    config: generate.DecoderConfig
    graph: Any
    state: Any
    sizes: dict[str, float]
    layout: str


def compile_ahead(block: mm.MegaMoEBlock, counts: Sequence[int]) -> str:
    """Has the kernels of the layers' calls compiled, several at a time; says how long that took."""
    if not counts:
        return "no kernels"
    config, weights, device = block.config, block.experts.weights, jax.devices()[0]
    plans: list[LaunchPlan] = []
    if weights.layout in GROUPED_LAYOUTS:
        route = grouped.try_route(config, device, weights)
        if isinstance(route, Refusal):
            raise route.error()
        for count in counts:
            for mask in (False, True):
                plans.append(grouped.planned(config, route, weights, count, padding_mask=mask))
    else:
        found = deep_gemm.find_route(config, [[device]], None, weights=weights)
        for count in counts:
            for mask in (False, True):
                routing = Routing(num_logical=config.logical_experts, padding_mask=mask)
                plans.append(found.plan(config, count, routing))
    return workload.compile_kernels(plans)


def load(case: Case, max_num_tokens: int, counts: Sequence[int]) -> Loaded:
    """Draws a model while the kernels are compiled that calls of so many tokens launch."""
    start = time.perf_counter()
    drawn = blocks(case, max_num_tokens, DRAWN)
    has_kernels = case.implementation != "xla"
    jax.block_until_ready([nnx.state(block) for block in drawn])
    print(f"{DRAWN} layers drawn in {time.perf_counter() - start:.1f} s", flush=True)
    with ThreadPoolExecutor(1) as pool:
        compiling = pool.submit(compile_ahead, drawn[0], counts if has_kernels else ())
        model = decoder(case, drawn)
        jax.block_until_ready(nnx.state(model))
        print(f"model there after {time.perf_counter() - start:.1f} s", flush=True)
        print(compiling.result(), flush=True)
    layout = drawn[0].experts.layout
    graph, state = nnx.split(model)
    layers, count = model.layers, len(model.config.windows)
    head = model.embedding if model.head is None else model.head
    parts = dict(
        expert=_bytes(layers.block.experts) / case.num_experts,
        router=_bytes(layers.block.router),
        attention=_bytes(layers.attention),
    )
    sizes = {name: size / count for name, size in parts.items()} | {"head": head[...].nbytes}
    return Loaded(model.config, graph, state, sizes, layout)


def _bytes(module: Any) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(nnx.state(module)))
