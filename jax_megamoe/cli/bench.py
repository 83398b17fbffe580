"""`python -m jax_megamoe bench`: measurements that need no GPU, side by side in one run."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float32, Int32

from jax_megamoe import _checks
from jax_megamoe.cli.measurements import Measurements
from jax_megamoe.config import MoEConfig
from jax_megamoe.formats import WEIGHT_FORMATS
from jax_megamoe.op.mega_moe import mega_moe
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
    memory: Any = compiled.memory_analysis()
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


@dataclass(frozen=True)
class Row:
    """One measured layer.

    Attributes:
        name: implementation and format.
        seconds: median of a call.
        faster: seconds of the einsum layer over its own.
        flops: floating-point operations of the matmuls of one call.
        parameter_bytes: bytes of its parameters.
        temporary_bytes: bytes that XLA plans for temporaries and the output.
    """

    name: str
    seconds: float
    faster: float
    flops: int
    parameter_bytes: int
    temporary_bytes: int


@dataclass(frozen=True)
class CpuResult:
    """What `bench_cpu` measured.

    Attributes:
        shape: sizes of the layer.
        matmul_rate: FLOP/s of one large bf16 matmul in the same run.
        rows: the einsum layer, then `xla` in each format.
    """

    shape: Shape
    matmul_rate: float
    rows: tuple[Row, ...]

    def report(self) -> Measurements:
        """The result as a table."""
        shape = self.shape
        return Measurements(
            title="The layer on a CPU",
            heading=(
                f"{shape.num_experts} experts, top {shape.top_k}, hidden {shape.hidden_size}, "
                f"intermediate {shape.intermediate_size}, {shape.num_tokens} tokens; bf16 matmul "
                f"{self.matmul_rate / 1e9:.0f} GFLOP/s"
            ),
            notes=(
                "Medians of one run, on one device. einsum bf16 applies every expert to every "
                "token; xla only those that a token chose. `faster` is its time over the row's; "
                "`of matmul` is the rate over that of one large bf16 matmul; `temp, MB` is what "
                "XLA plans for temporaries and the output."
            ),
            columns=tuple(_COLUMNS),
            rows=tuple(tuple(text(row, self) for text in _COLUMNS.values()) for row in self.rows),
        )


def bench_cpu(
    shape: Shape, formats: Sequence[str], *, seed: int = 0, repeats: int = 9
) -> CpuResult:
    """`xla` in each format and the einsum layer in bf16, on the default device in one run.

    Args:
        shape: sizes of the layer.
        formats: names of the weight formats.
        seed: of the random inputs.
        repeats: measured calls of each, after one warm-up.

    Raises:
        ValueError: fewer than one repeat, or sizes that no layer has.
    """
    repeats, seed = _checks.integer("repeats", repeats, minimum=1), _checks.seed(seed)
    configs = [_config(shape, name) for name in formats]
    inputs = _inputs(shape, seed)
    tokens = (inputs.x, inputs.ids, inputs.factors)
    flops = 6 * shape.num_tokens * shape.hidden_size * shape.intermediate_size
    dense = _measure(einsum_layer, (*tokens, *inputs.matrices), repeats)
    dense_bytes = sum(matrix.nbytes for matrix in inputs.matrices)
    rows = [_row("einsum bf16", dense, dense, flops * shape.num_experts, dense_bytes)]
    for config in configs:
        weights = quantize_experts(config, *inputs.matrices)
        call = partial(mega_moe, config=config, implementation="xla")
        measured = _measure(call, (*tokens, weights), repeats)
        name, flops_of_k = f"xla {config.weight_format.name}", flops * shape.top_k
        rows.append(_row(name, measured, dense, flops_of_k, weights.num_bytes))
    return CpuResult(shape, _ceiling(jnp.bfloat16), tuple(rows))


def _config(shape: Shape, weight_format: str) -> MoEConfig:
    return MoEConfig(
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        max_num_tokens=shape.num_tokens,
        weight_format=WEIGHT_FORMATS[weight_format],
    )


def _row(name: str, measured: _Measured, dense: _Measured, flops: int, num_bytes: int) -> Row:
    faster = dense.seconds / measured.seconds
    return Row(name, measured.seconds, faster, flops, num_bytes, measured.temporary_bytes)


_COLUMNS: dict[str, Callable[[Row, CpuResult], str]] = {
    "layer": lambda row, _: row.name,
    "ms": lambda row, _: f"{row.seconds * 1e3:.1f}",
    "faster": lambda row, _: f"{row.faster:.2f} x",
    "GFLOP": lambda row, _: f"{row.flops / 1e9:.2f}",
    "GFLOP/s": lambda row, _: f"{row.flops / row.seconds / 1e9:.0f}",
    "of matmul": lambda row, all: f"{row.flops / row.seconds / all.matmul_rate:.2f}",
    "params, MB": lambda row, _: f"{row.parameter_bytes / 1e6:.1f}",
    "temp, MB": lambda row, _: f"{row.temporary_bytes / 1e6:.1f}",
}
"""What is said of a row, by the head of its column."""
