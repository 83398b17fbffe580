"""mxfp4_block on one H200: the jitted layer against the bare launch, and against fp8_block.

    PYTHONPATH=.:tests:tests/gpu:benchmarks/gpu python benchmarks/gpu/flashinfer.py [--quick]

All in one run: the floor (staging, and the launch that FlashInfer's own host code plans, through
the driver in a CUDA graph of 64 calls, by device events), `mega_moe` under jit in a scan of 64
layers and alone, and fp8_block in the same scan. Layers of a scan and calls of a graph differ in
their routing, so that weights come from memory. Results go to $OUT after every row; a ratio over
its limit fails the run.
"""

import argparse
import faulthandler
import json
import sys
from functools import partial
from typing import Any

import bare_launch
import driver
import jax
import jax.numpy as jnp
import numpy as np
import workload
from checks import OUT, Checks
from parallel_layer import expert_bytes
from sm90 import LAYERS, microseconds, scanned

import jax_megamoe as mm
from jax_megamoe.plan import plan_mega_moe

RECIPE, BESIDE = "mxfp4_block", "fp8_block"
TOKENS = (1, 8, 64, 256, 1024, 4096, 32, 128, 512, 2048)
"""The most telling first."""
QUICK_TOKENS = (1, 64, 512)
SECONDS = 400

Json = dict[str, Any]


def limit(num_tokens: int) -> float:
    """Most that the jitted layer may take over the bare launch."""
    return 1.05 if num_tokens >= 256 else 1.12


def layer_functions(cfg: mm.MoEConfig) -> dict[str, Any]:
    """The jitted layer, alone and in a scan."""
    call = partial(mm.mega_moe, config=cfg, implementation="deep_gemm")
    return {"single": jax.jit(call), "scan": scanned(call, cfg.num_experts, residual=False)}


def scan_time(cfg: mm.MoEConfig, counts: tuple[int, ...]) -> dict[int, float]:
    """Microseconds of a layer in the scan, by number of tokens; its parameters are given up."""
    run, params = layer_functions(cfg)["scan"], workload.weights(cfg)
    return {
        count: microseconds(partial(run, *workload.tokens(cfg, count), params)) / LAYERS
        for count in counts
    }


def bare_time(
    cfg: mm.MoEConfig,
    recorded: bare_launch.Recorded,
    tokens: workload.Tokens,
    params: mm.ExpertWeights,
    tools: tuple[bare_launch.Compiler, driver.Stream],
) -> float:
    """Microseconds of a recorded call, over the routings of the scan."""
    compiler, stream = tools
    x, ids, factors = tokens
    shifted = jax.jit(lambda ids: [(ids + n) % cfg.num_experts for n in range(LAYERS)])(ids)
    jax.block_until_ready(shifted)
    operands = workload.record_operands(x, ids, factors, params)
    routings = [{"topk_idx": each.unsafe_buffer_pointer()} for each in shifted]
    alone = bare_launch.BareLayer(recorded, compiler, operands, routings)
    taken = alone.microseconds(stream, LAYERS)
    alone.free()
    return taken


COLUMNS = {
    "layer": lambda row, _: row["shape"],
    "tokens": lambda row, _: f"{row['tokens']}",
    "bare, us": lambda row, _: f"{row['bare']:.1f}",
    "jitted, us": lambda row, _: f"{row['scan']:.1f}",
    "over bare": lambda row, _: f"{row['scan'] / row['bare']:.3f}",
    "one call, us": lambda row, _: f"{row['single']:.0f}",
    "weights, TB/s": lambda row, _: f"{row['weight_bytes'] / row['scan'] / 1e6:.2f}",
    "of copy": lambda row, copy: f"{1e6 * row['weight_bytes'] / row['scan'] / copy:.2f}",
    "TFLOP/s": lambda row, _: f"{row['flops'] / row['scan'] / 1e6:.0f}",
    "fp8_block, us": lambda row, _: f"{row['beside']:.1f}",
    "faster than it": lambda row, _: f"{row['beside'] / row['scan']:.2f} x",
}
"""What is said of a row, by the head of its column."""


def markdown(rows: list[Json], environment: Json) -> str:
    """The results as a page."""
    copy = environment["copy_bytes_per_second"]
    lines = [
        "# mxfp4_block on one H200",
        "",
        f"    {environment['command']}",
        "",
        f"{environment['device']}, driver {environment['driver']}, jax {environment['jax']}. In "
        f"this run a device-to-device copy moved {copy / 1e12:.2f} TB/s (read plus written).",
        "",
        f"`bare`: staging and the launch that FlashInfer's own host code plans, {LAYERS} calls in "
        f"a CUDA graph, by device events. `jitted`: mega_moe, staging included, in a scan of "
        f"{LAYERS} layers, by the host's clock over several scans in a row; `fp8_block` likewise. "
        "`one call`: a jitted call that the host waits for. Medians.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|---|{'---:|' * (len(COLUMNS) - 1)}",
        *(f"| {' | '.join(text(row, copy) for text in COLUMNS.values())} |" for row in rows),
    ]
    return "\n".join([*lines, ""])


def measure(
    shape: str,
    counts: tuple[int, ...],
    tools: tuple[bare_launch.Compiler, driver.Stream],
    report: Any,
) -> None:
    """Every row of a shape."""
    beside = scan_time(workload.config(shape, BESIDE), counts)
    cfg = workload.config(shape, RECIPE)
    functions, params = layer_functions(cfg), workload.weights(cfg)
    records = bare_launch.read_records(bare_launch.FLASHINFER_RECORDS)
    matrix = 3 * cfg.hidden_size * cfg.intermediate_size
    for count in counts:
        tokens = workload.tokens(cfg, count)
        arguments = (*tokens, params)
        single = functions["single"]
        report(
            {
                "shape": shape,
                "tokens": count,
                "bare": bare_time(cfg, records[f"{shape}-{count}"], tokens, params, tools),
                "scan": microseconds(partial(functions["scan"], *arguments)) / LAYERS,
                "single": microseconds(lambda: single(*arguments).block_until_ready()),
                "beside": beside[count],
                "weight_bytes": len(np.unique(np.asarray(tokens[1]))) * expert_bytes(cfg),
                "flops": 2 * count * cfg.top_k * matrix,
            }
        )


def main() -> None:
    """Measures, writes after every row, and checks the ratios."""
    parser = argparse.ArgumentParser(description="mxfp4_block on one H200.")
    parser.add_argument("--quick", action="store_true", help="one shape, three numbers of tokens")
    parser.add_argument("--shapes", nargs="+", default=list(workload.SHAPES))
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    shapes = ["qwen3_30b"] if arguments.quick else arguments.shapes
    counts = QUICK_TOKENS if arguments.quick else TOKENS
    checks = Checks("flashinfer")
    plans = [
        plan_mega_moe(workload.config(shape, recipe), workload.H200, count, 1)
        for shape in shapes
        for recipe in (RECIPE, BESIDE)
        for count in counts
    ]
    checks.check(True, "kernels", workload.compile_kernels(plans))
    compiler = bare_launch.Compiler()
    records = bare_launch.read_records(bare_launch.FLASHINFER_RECORDS)
    used = [records[f"{shape}-{count}"] for shape in shapes for count in counts]
    compiler.compile_all(part for each in used for part in (each.staging, each.mega))
    jax.block_until_ready(jnp.zeros(1))
    driver.use_device()
    environment = {
        "command": f"python benchmarks/gpu/flashinfer.py {' '.join(sys.argv[1:])}".strip(),
        "device": driver.device_name(),
        "driver": driver.driver_release(),
        "jax": jax.__version__,
        "copy_bytes_per_second": driver.copy_rate(),
    }
    rows: list[Json] = []

    def report(row: Json) -> None:
        rows.append(row)
        ratio = row["scan"] / row["bare"]
        name = f"{row['shape']}, {row['tokens']} tokens, over the bare launch"
        detail = f"{row['scan']:.1f} us / {row['bare']:.1f} us = {ratio:.3f}"
        detail += f"; fp8_block {row['beside']:.1f} us"
        checks.check(ratio <= limit(row["tokens"]), name, detail)
        result = environment | {"rows": rows}
        (OUT / "flashinfer_h200.json").write_text(json.dumps(result, indent=1))
        (OUT / "flashinfer_h200.md").write_text(markdown(rows, environment))

    for shape in shapes:
        measure(shape, counts, (compiler, driver.Stream()), report)
    print(markdown(rows, environment))
    checks.finish()


if __name__ == "__main__":
    main()
