"""fp8_block on one H200: the jitted layer against the bare launch, and against what it replaces.

    PYTHONPATH=.:tests:tests/gpu:benchmarks/gpu python benchmarks/gpu/sm90.py [--quick]

All in one run: the kernel's floor (recorded launches through the driver, in a CUDA graph of 64
calls, by device events), `mega_moe` under jit, in a scan of 64 layers and alone, `xla` on the same
parameters, `lax.ragged_dot` in bfloat16 as a user writes it, and the GPU's own ceilings. Layers of
a scan and calls of a graph differ in their routing, so that weights come from memory. Results go to
$OUT after every row, as JSON and Markdown; a ratio over its limit fails the run.
"""

import argparse
import dataclasses
import faulthandler
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import bare_launch
import driver
import jax
import jax.numpy as jnp
import numpy as np
import workload
from checks import OUT, Checks
from jax import lax
from jaxtyping import Array

import jax_megamoe as mm
from jax_megamoe.cli.gpu.contenders import ragged_layer, random_matrices
from jax_megamoe.cli.gpu.measure import timed
from jax_megamoe.plan import plan_mega_moe

LAYERS = 64
TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096)
QUICK_TOKENS = (1, 64, 512)
COMPARED_TOKENS = (64, 1024)
"""Numbers of tokens that `xla` and ragged_dot are timed with."""
RESIDUAL_TOKENS = (1, 64, 1024)
MAX_TEMPORARY_BYTES = 50 << 30
SECONDS = 400


def limit(num_tokens: int) -> float:
    """Most that the jitted layer may take over the bare launch (issue 3)."""
    return 1.05 if num_tokens >= 256 else 1.15


@dataclass
class Row:
    """One layer and number of tokens; times in microseconds, None where not measured.

    Attributes:
        bare: staging and kernel, launched bare.
        scan: a layer in a scan of layers that do not read each other's output.
        residual: a layer in a scan of x + y / 1024.
        single: one blocking call from the host.
        xla: a call of `xla`.
        ragged: a call of the bfloat16 layer on `lax.ragged_dot`, or why there is none.
        weight_bytes: of the experts that a call uses.
        flops: of a call's matmuls.
    """

    shape: str
    num_tokens: int
    bare: float
    scan: float
    single: float
    weight_bytes: int
    flops: int
    residual: float | None = None
    xla: float | None = None
    ragged: float | str | None = None


microseconds = partial(timed, enough=0.25)


def scanned(layer: Callable[..., Array], num_experts: int, residual: bool) -> Callable[..., Array]:
    """f(x, ids, factors, params): LAYERS layers, the nth with every id n further."""

    def step(carry: Array, n: Array, x: Array, ids: Array, *rest: Any) -> tuple[Array, None]:
        y = layer(carry if residual else x, (ids + n) % num_experts, *rest)
        return (carry + y / jnp.bfloat16(1024) if residual else y), None

    def run(x: Array, *rest: Any) -> Array:
        layers = jnp.arange(LAYERS, dtype=jnp.int32)
        return lax.scan(lambda carry, n: step(carry, n, x, *rest), x, layers)[0]

    return jax.jit(run)


class Layer:
    """A shape, its parameters and its jitted functions."""

    def __init__(self, shape: str) -> None:
        self.shape, self.cfg = shape, workload.config(shape)
        self.params = workload.weights(self.cfg)
        self.matrices = random_matrices(self.cfg, self.cfg.num_experts, jax.random.key(0))
        self.records = bare_launch.read_records()
        call = partial(mm.mega_moe, config=self.cfg, implementation="deep_gemm")
        self.single = jax.jit(call)
        self.scan = scanned(call, self.cfg.num_experts, residual=False)
        self.residual = scanned(call, self.cfg.num_experts, residual=True)
        self.xla = jax.jit(partial(mm.mega_moe, config=self.cfg, implementation="xla"))

    def bare(
        self, tokens: workload.Tokens, compiler: bare_launch.Compiler, stream: driver.Stream
    ) -> float:
        """Microseconds of a recorded call, over the routings of the scan."""
        x, ids, factors = tokens
        shifted = jax.jit(lambda ids: [(ids + n) % self.cfg.num_experts for n in range(LAYERS)])(
            ids
        )
        jax.block_until_ready(shifted)
        recorded = self.records[f"{self.shape}-{x.shape[0]}"]
        operands = workload.record_operands(x, ids, factors, self.params)
        routings = [{"topk_idx": each.unsafe_buffer_pointer()} for each in shifted]
        alone = bare_launch.BareLayer(recorded, compiler, operands, routings)
        taken = alone.microseconds(stream, LAYERS)
        alone.free()
        return taken

    def row(self, num_tokens: int, compiler: bare_launch.Compiler, stream: driver.Stream) -> Row:
        """Everything about one number of tokens."""
        tokens = workload.tokens(self.cfg, num_tokens)
        matrix = 3 * self.cfg.hidden_size * self.cfg.intermediate_size
        arguments = (*tokens, self.params)
        row = Row(
            self.shape,
            num_tokens,
            bare=self.bare(tokens, compiler, stream),
            scan=microseconds(lambda: self.scan(*arguments)) / LAYERS,
            single=microseconds(lambda: self.single(*arguments).block_until_ready()),
            weight_bytes=len(np.unique(np.asarray(tokens[1]))) * matrix,
            flops=2 * num_tokens * self.cfg.top_k * matrix,
        )
        if num_tokens in RESIDUAL_TOKENS:
            row.residual = microseconds(lambda: self.residual(*arguments)) / LAYERS
        if num_tokens in COMPARED_TOKENS:
            row.xla = microseconds(lambda: self.xla(*arguments), repeats=3)
            row.ragged = self.ragged(tokens)
        return row

    def ragged(self, tokens: workload.Tokens) -> float | str:
        """Microseconds of the bfloat16 layer; why not, where it cannot run."""
        arguments = (*tokens, self.matrices)
        try:
            compiled = jax.jit(ragged_layer).lower(*arguments).compile()
            needed = compiled.memory_analysis().temp_size_in_bytes
            if needed > MAX_TEMPORARY_BYTES:
                return f"needs {needed / 2**30:.0f} GiB"
            return microseconds(lambda: compiled(*arguments), repeats=3)
        except jax.errors.JaxRuntimeError as error:
            return str(error).split("\n", maxsplit=1)[0][:60]


COLUMNS: dict[str, Callable[[Row, dict[str, float]], str]] = {
    "layer": lambda row, _: row.shape,
    "tokens": lambda row, _: f"{row.num_tokens}",
    "bare, us": lambda row, _: f"{row.bare:.1f}",
    "jitted, us": lambda row, _: f"{row.scan:.1f}",
    "over bare": lambda row, _: f"{row.scan / row.bare:.3f}",
    "with residual, us": lambda row, _: _number(row.residual),
    "one call, us": lambda row, _: f"{row.single:.0f}",
    "weights, TB/s": lambda row, _: f"{row.weight_bytes / row.scan / 1e6:.2f}",
    "of copy": lambda row, top: _share(row.weight_bytes / row.scan, top["copy_bytes_per_second"]),
    "TFLOP/s": lambda row, _: f"{row.flops / row.scan / 1e6:.0f}",
    "of fp8": lambda row, top: _share(row.flops / row.scan, top["fp8_flops"]),
    "xla, us": lambda row, _: _number(row.xla),
    "ragged_dot bf16, us": lambda row, _: _number(row.ragged),
    "faster than it": lambda row, _: (
        f"{row.ragged / row.scan:.1f} x" if isinstance(row.ragged, float) else ""
    ),
}
"""What is said of a row, by the head of its column."""


def _number(value: float | str | None) -> str:
    return f"{value:.1f}" if isinstance(value, float) else value or ""


def _share(per_microsecond: float, ceiling: float) -> str:
    return f"{1e6 * per_microsecond / ceiling:.2f}"


def markdown(found: list[Row], environment: dict[str, Any]) -> str:
    """The results as a page."""
    top = environment["ceilings"]
    lines = [
        "# fp8_block on one H200",
        "",
        f"    {environment['command']}",
        "",
        f"{environment['device']}, driver {environment['driver']}, jax {environment['jax']}; "
        f"XLA_FLAGS={environment['XLA_FLAGS']!r}. In this run a device-to-device copy moved "
        f"{top['copy_bytes_per_second'] / 1e12:.2f} TB/s (read plus written), a matmul of 8192 x "
        f"8192 x 8192 did {top['bf16_flops'] / 1e12:.0f} TFLOP/s in bf16 and "
        f"{top['fp8_flops'] / 1e12:.0f} in fp8 (cuBLASLt).",
        "",
        f"`bare`: staging and kernel launched by the driver, {LAYERS} calls in a CUDA graph, by "
        f"device events. `jitted`: mega_moe, staging included, in a scan of {LAYERS} layers, by "
        "the host's clock over several scans in a row. `with residual`: each layer reads x + y / "
        "1024 of the one before. `one call`: a jitted call that the host waits for. `ragged_dot`: "
        "a jitted bf16 layer on lax.ragged_dot. Medians.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|---|{'---:|' * (len(COLUMNS) - 1)}",
        *(f"| {' | '.join(text(row, top) for text in COLUMNS.values())} |" for row in found),
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Measures, writes after every row, and checks the ratios."""
    parser = argparse.ArgumentParser(description="fp8_block on one H200.")
    parser.add_argument("--quick", action="store_true", help="one shape, three numbers of tokens")
    parser.add_argument("--shapes", nargs="+", default=list(workload.SHAPES))
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    shapes = ["qwen3_30b"] if arguments.quick else arguments.shapes
    counts = QUICK_TOKENS if arguments.quick else TOKENS
    checks = Checks("sm90")
    ceilings = subprocess.run(
        [sys.executable, Path(__file__).with_name("ceilings.py")], capture_output=True, check=True
    )
    plans = [
        plan_mega_moe(workload.config(shape), workload.H200, count, 1, "sgl")
        for shape in shapes
        for count in counts
    ]
    checks.check(True, "kernels", workload.compile_kernels(plans))
    jax.block_until_ready(jnp.zeros(1))
    driver.use_device()
    environment = {
        "command": " ".join(["PYTHONPATH=.:tests:tests/gpu:benchmarks/gpu python", *sys.argv]),
        "device": driver.device_name(),
        "driver": driver.driver_release(),
        "jax": jax.__version__,
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "ceilings": json.loads(ceilings.stdout),
    }
    compiler = bare_launch.Compiler()
    records = bare_launch.read_records()
    used = [records[f"{shape}-{count}"] for shape in shapes for count in counts]
    compiler.compile_all(part for each in used for part in (each.staging, each.mega))
    stream = driver.Stream()
    found: list[Row] = []
    for layer in map(Layer, shapes):
        for count in counts:
            row = layer.row(count, compiler, stream)
            found.append(row)
            name = f"{row.shape}, {row.num_tokens} tokens, over the bare launch"
            detail = f"{row.scan:.1f} us / {row.bare:.1f} us = {row.scan / row.bare:.3f}"
            checks.check(row.scan <= limit(count) * row.bare, name, detail)
            result = environment | {"rows": [dataclasses.asdict(each) for each in found]}
            (OUT / "sm90_h200.json").write_text(json.dumps(result, indent=1))
            (OUT / "sm90_h200.md").write_text(markdown(found, environment))
    print(markdown(found, environment))
    checks.finish()


if __name__ == "__main__":
    main()
