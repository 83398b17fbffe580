"""`python -m jax_megamoe bench`: measurements that need no GPU, side by side in one run."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float32, Int32
from rich.console import Console
from rich.table import Table

from jax_megamoe.config import MoEConfig
from jax_megamoe.formats import WEIGHT_FORMATS
from jax_megamoe.op import mega_moe
from jax_megamoe.weights.experts import quantize_experts


@dataclass(frozen=True)
class Shape:
    """Sizes of a measured layer."""

    num_experts: int = 64
    top_k: int = 4
    hidden_size: int = 512
    intermediate_size: int = 256
    num_tokens: int = 512


def einsum_layer(
    x: BFloat16[Array, "tokens hidden"],
    topk_ids: Int32[Array, "tokens top_k"],
    topk_weights: Float32[Array, "tokens top_k"],
    gate: BFloat16[Array, "experts inter hidden"],
    up: BFloat16[Array, "experts inter hidden"],
    down: BFloat16[Array, "experts hidden inter"],
) -> BFloat16[Array, "tokens hidden"]:
    """The layer as a user writes it with einsum: every expert on every token, then a sum."""
    token = jnp.arange(x.shape[0])[:, None]
    factors = jnp.zeros((x.shape[0], gate.shape[0]), x.dtype)
    factors = factors.at[token, topk_ids].add(topk_weights.astype(x.dtype))
    hidden = jax.nn.silu(jnp.einsum("th,eih->tei", x, gate)) * jnp.einsum("th,eih->tei", x, up)
    return jnp.einsum("tei,ehi,te->th", hidden, down, factors)


@dataclass(frozen=True)
class _Inputs:
    x: Array
    ids: Array
    factors: Array
    matrices: tuple[Array, Array, Array]


def _inputs(shape: Shape, seed: int) -> _Inputs:
    keys = jax.random.split(jax.random.key(seed), 5)
    e, h, i = shape.num_experts, shape.hidden_size, shape.intermediate_size
    sizes = ((e, i, h), (e, i, h), (e, h, i))
    matrices = tuple(
        jax.random.normal(key, size, jnp.bfloat16) * jnp.bfloat16(size[-1] ** -0.5)
        for key, size in zip(keys, sizes, strict=False)
    )
    logits = jax.random.normal(keys[3], (shape.num_tokens, e))
    factors, ids = jax.lax.top_k(jax.nn.softmax(logits), shape.top_k)
    x = jax.random.normal(keys[4], (shape.num_tokens, h), jnp.bfloat16)
    return _Inputs(x, ids, factors / factors.sum(-1, keepdims=True), matrices)


@dataclass(frozen=True)
class _Measured:
    """Median seconds of a call, and the bytes XLA plans for its temporaries and its output."""

    seconds: float
    temporary_bytes: int


def _measure(function: Callable[..., Array], arguments: tuple[Any, ...], repeats: int) -> _Measured:
    compiled = jax.jit(function).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    jax.block_until_ready(compiled(*arguments))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        times.append(time.perf_counter() - start)
    planned = memory.temp_size_in_bytes + memory.output_size_in_bytes
    return _Measured(statistics.median(times), planned)


def _ceiling(dtype: Any, rows: int = 512, size: int = 2048) -> float:
    """FLOP/s of one large matmul in the same run."""
    a, b = jnp.ones((rows, size), dtype), jnp.ones((size, size), dtype)
    product = partial(jnp.matmul, preferred_element_type=jnp.float32)
    return 2 * rows * size * size / _measure(product, (a, b), 7).seconds


def bench_cpu(shape: Shape, formats: list[str], *, seed: int = 0, repeats: int = 9) -> None:
    """`xla` in each format against the einsum layer in bf16: times, ratios, memory, FLOP/s.

    Prints a table. Times are medians of `repeats` calls after one warm-up, on the default device.

    Args:
        shape: sizes of the layer.
        formats: names of the weight formats.
        seed: of the random inputs.
        repeats: measured calls of each.
    """
    inputs = _inputs(shape, seed)
    flops = 6 * shape.num_tokens * shape.hidden_size * shape.intermediate_size
    dense = _measure(
        einsum_layer, (inputs.x, inputs.ids, inputs.factors, *inputs.matrices), repeats
    )
    ceiling = _ceiling(jnp.bfloat16)
    title = f"{shape}, bf16 matmul {ceiling / 1e9:.0f} GFLOP/s"
    columns = ("layer", "ms", "einsum / this", "GFLOP", "GFLOP/s", "of matmul", "parameters MB")
    table = Table(*columns, "temporary MB", title=title)

    def add(name: str, measured: _Measured, experts: int, parameter_bytes: int) -> None:
        rate = flops * experts / measured.seconds
        table.add_row(
            name,
            f"{measured.seconds * 1e3:.1f}",
            f"{dense.seconds / measured.seconds:.2f}",
            f"{flops * experts / 1e9:.2f}",
            f"{rate / 1e9:.0f}",
            f"{rate / ceiling:.2f}",
            f"{parameter_bytes / 1e6:.1f}",
            f"{measured.temporary_bytes / 1e6:.1f}",
        )

    add("einsum bf16", dense, shape.num_experts, sum(m.nbytes for m in inputs.matrices))
    for name in formats:
        config = MoEConfig(
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            max_num_tokens=shape.num_tokens,
            weight_format=WEIGHT_FORMATS[name],
        )
        weights = quantize_experts(config, *inputs.matrices)
        call = partial(mega_moe, config=config, implementation="xla")
        arguments = (inputs.x, inputs.ids, inputs.factors, weights)
        add(f"xla {name}", _measure(call, arguments, repeats), shape.top_k, weights.num_bytes)
    Console().print(table)
