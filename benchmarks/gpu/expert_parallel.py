"""A layer over the GPUs of a host: time of a call against tokens per rank.

    PYTHONPATH=.:benchmarks/gpu python benchmarks/gpu/expert_parallel.py [--quick] [--ranks N]

One process, a rank on each GPU. The layer is timed inside a scan over layers that differ in their
routing, by the host's clock, median of several scans. Beside it the unfused ways in the same run:
`grouped` (grouped products between all-to-alls, on parameters of their own layout), `xla` on the
same parameters (XLA's all-to-all and matmuls) and, in bfloat16, all_to_all with ragged_dot. The
layer is fp8_block, or --recipe mxfp4_block. Results go to $OUT after every row; what does not fit
--seconds is left out.

To try the script itself: JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=2 and --small.
"""

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.8")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import driver
import jax
import jax.numpy as jnp
import numpy as np
import workload
from jax.sharding import Mesh
from jaxtyping import Array
from parallel_layer import AXIS, Json, Layer, link_rates, seconds, work

import jax_megamoe as mm
from jax_megamoe.cli import doctor
from jax_megamoe.plan import plan_mega_moe
from jax_megamoe.runtime.devices import device_spec

SHAPES: dict[str, dict[str, int]] = {
    "flash": workload.SHAPES["v4_flash"],
    "pro": dict(num_experts=384, top_k=6, hidden_size=7168, intermediate_size=3072),
}
SMALL = dict(num_experts=16, top_k=4, hidden_size=512, intermediate_size=256)
TOKENS = (8, 1024, 128, 8192, 1, 4096)
"""On each rank; the most telling first."""
FEW_TOKENS = 128
"""Up to here a call is short, and a scan long."""
RAGGED_TOKENS = 1024
"""XLA may multiply every row with every expert in ragged_dot: more would not fit."""

PUBLISHED = {
    "flash": {8: 225, 128: 265, 1024: 637, 4096: 1739, 8192: 3269},
    "pro": {8: 637, 128: 872, 1024: 1393, 4096: 4217, 8192: 7939},
}
"""Microseconds on H200s, published for the same kernel family."""

NOTES = (
    "`us`: one call of `mega_moe(implementation='deep_gemm')` inside a scan (64 calls up to 128 "
    "tokens, else 16), staging included; `grouped` likewise; `xla` and `bf16` the unfused ways "
    "(scan of 2). In brackets: over `us`. `error` is against `xla`. Weights: bytes of the experts "
    "that have tokens on the busiest rank. Link: bytes that enter the busiest rank from others, "
    "tokens and results.",
    "`published`: public H200 figures for the same kernel family; 8 GPUs are implied and the "
    "number of expert-parallel ranks is not stated, so they compare with 8 ranks at best: of fewer "
    "ranks each reads and multiplies with more experts.",
)


class Report:
    """The result, printed and written piece by piece to $OUT/expert_parallel.json and .md."""

    def __init__(self, mesh: Mesh, recipe: str) -> None:
        self.result: Json = {
            "command": " ".join(sys.argv),
            "jax": jax.__version__,
            "device": mesh.devices[0].device_kind,
            "ranks": mesh.size,
            "recipe": recipe,
        }
        self._folder = Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="expert_parallel_"))

    def add(self, section: str, values: Json) -> None:
        """Adds to a section of the result: a shape and tokens, or something else."""
        self.result.setdefault(section, {}).update(values)
        print(section, json.dumps(values), flush=True)
        (self._folder / "expert_parallel.json").write_text(json.dumps(self.result, indent=1))
        (self._folder / "expert_parallel.md").write_text(markdown(self.result))


COLUMNS: dict[str, Callable[[Json, Json], Any]] = {
    "tokens a rank": lambda row, _: row["tokens"],
    "us": lambda row, _: f"{row['us']:.1f}",
    "grouped": lambda row, _: f"{row['grouped_us']:.1f} ({row['grouped_us'] / row['us']:.2f} x)",
    "xla": lambda row, _: f"{row['xla_us']:.0f} ({row['xla_us'] / row['us']:.1f} x)",
    "bf16": lambda row, _: f"{row['bf16_us']:.0f} ({row['bf16_us'] / row['us']:.1f} x)",
    "error": lambda row, _: f"{row['error']:.4f}",
    "weights, TB/s": lambda row, _: f"{row['weight_bytes'] / row['us'] / 1e6:.2f}",
    "of copy": lambda row, result: (
        f"{row['weight_bytes'] / row['us'] * 1e6 / result['ceilings']['copy_bytes_per_second']:.2f}"
    ),
    "TFLOP/s": lambda row, _: f"{row['flops'] / row['us'] / 1e6:.0f}",
    "of fp8": lambda row, result: (
        f"{row['flops'] / row['us'] * 1e6 / result['ceilings']['fp8_flops']:.2f}"
    ),
    "link, MB": lambda row, _: f"{row['link_bytes'] / 1e6:.2f}",
    "link, GB/s": lambda row, _: f"{row['link_bytes'] / row['us'] / 1e3:.1f}",
    "published, us": lambda row, _: PUBLISHED[row["shape"]][row["tokens"]],
    "notes": lambda row, _: "; ".join(row.get("notes", [])),
}
"""What is said of a row, by the head of its column; a row without it stays empty there."""


def markdown(result: Json) -> str:
    """The result as a page."""
    lines = [
        "# Expert parallelism over the GPUs of a host",
        "",
        f"`{result['command']}`: {result['ranks']} x {result['device']}, jax {result['jax']}, "
        f"{result['recipe']}, one process.",
        *(f"\n{note}" for note in NOTES),
        "",
        *(f"- {name}: {value:.4g}" for name, value in result.get("ceilings", {}).items()),
    ]
    for shape in SHAPES:
        rows = [each for each in result.values() if isinstance(each, dict)]
        rows = [each for each in rows if each.get("shape") == shape]
        if not rows:
            continue
        rows.sort(key=lambda row: row["tokens"])
        lines += ["", f"## {shape}", ""]
        lines += [f"{name}: {value}  " for name, value in result.get(f"{shape} layer", {}).items()]
        lines += ["", f"| {' | '.join(COLUMNS)} |", "|---:" * len(COLUMNS) + "|"]
        lines += [f"| {' | '.join(cells(row, result))} |" for row in rows]
    return "\n".join([*lines, ""])


def cells(row: Json, result: Json) -> Iterator[str]:
    """A row of the table."""
    for text in COLUMNS.values():
        try:
            yield str(text(row, result))
        except KeyError:
            yield ""


class Run:
    """One run: what is measured is added to the report, failures and lack of time as notes."""

    def __init__(self, report: Report, budget: float) -> None:
        self.report = report
        self._end = time.monotonic() + budget
        self._y: dict[str, Array] = {}

    def attempt(
        self, layer: Layer, num_tokens: int, what: str, measure: Callable[[], Json]
    ) -> None:
        """Adds what `measure` returns to the row of a shape and a number of tokens."""
        section = f"{layer.name} {num_tokens}"
        row = self.report.result.get(section, {})
        values: Json = {"shape": layer.name, "tokens": num_tokens}
        try:
            if time.monotonic() > self._end:
                raise TimeoutError("out of time")
            values |= measure()
        except Exception as error:
            notes = [*row.get("notes", []), f"{what}: {str(error).splitlines()[0][:200]}"]
            values["notes"] = notes
        self.report.add(section, values)

    def kernel(self, layer: Layer, weights: Any, num_tokens: int) -> Json:
        """deep_gemm, and what a call of it moves and computes."""
        num_layers = 64 if num_tokens <= FEW_TOKENS else 16
        x, ids, factors = layer.tokens(num_tokens, num_layers)
        run = partial(layer.repeated(layer.fused("deep_gemm")), x, ids, factors, weights)
        us = seconds(run, 9) / num_layers * 1e6
        self._y[f"{layer.name} {num_tokens}"] = run()
        return {"us": us, **work(layer, ids)}

    def grouped(
        self, layer: Layer, call: Callable[..., Array], parameters: Any, num_tokens: int
    ) -> Json:
        """`grouped` on the routings of `kernel`."""
        num_layers = 64 if num_tokens <= FEW_TOKENS else 16
        run = partial(layer.repeated(call), *layer.tokens(num_tokens, num_layers), parameters)
        return {"grouped_us": seconds(run, 9) / num_layers * 1e6}

    def unfused(
        self, layer: Layer, call: Callable[..., Array], parameters: Any, num_tokens: int, name: str
    ) -> Json:
        """Another way, on the last two routings of `kernel`."""
        num_layers = 64 if num_tokens <= FEW_TOKENS else 16
        x, ids, factors = layer.tokens(num_tokens, num_layers)
        run = partial(layer.repeated(call), x, ids[-2:], factors[-2:], parameters)
        values = {f"{name}_us": seconds(run, 3) / 2 * 1e6}
        ours = self._y.get(f"{layer.name} {num_tokens}")
        if name == "xla" and ours is not None:
            values["error"] = float(relative_error(ours, run()))
        return values


@jax.jit
def relative_error(got: Array, want: Array) -> Array:
    """Euclidean norm of the difference over that of `want`."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.linalg.norm(got - want) / jnp.linalg.norm(want)


def buffer_bytes(layer: Layer) -> Json:
    """The symmetric buffer: planned, as `doctor` says, and what a GPU's free memory lost by it."""
    device = layer.mesh.devices[0]
    plan = plan_mega_moe(layer.config, device_spec(device), 0, layer.num_ranks)
    said = doctor.kernel_status(layer.config, device, layer.num_ranks)
    driver.use_device(device.local_hardware_id)
    before, _ = driver.call("cuMemGetInfo")
    mm.allocate_buffers(layer.config, mesh=layer.mesh, axis=AXIS)
    after, _ = driver.call("cuMemGetInfo")
    return {"buffer planned": plan.buffer.num_bytes, "taken": before - after, "doctor": said}


def ceilings() -> Json:
    """What one GPU does at most; before JAX takes its memory."""
    command = [sys.executable, str(Path(__file__).with_name("ceilings.py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        print(f"no ceilings: {done.stderr[-500:]}", flush=True)
        return {}
    return json.loads(done.stdout.splitlines()[-1])


def compile_kernels(layers: list[Layer], tokens: tuple[int, ...]) -> str:
    """Compiles every kernel that will run; those that a shape refuses are left out."""
    plans = []
    for layer in layers:
        device = device_spec(layer.mesh.devices[0])
        for num_tokens in tokens:
            try:
                plan = plan_mega_moe(layer.config, device, num_tokens, layer.num_ranks)
            except (NotImplementedError, ValueError) as error:
                print(f"{layer.name} {num_tokens} refused: {error}", flush=True)
            else:
                plans.append(plan)
    return workload.compile_kernels(plans)


def main() -> None:
    """Measures, the kernel first."""
    parser = argparse.ArgumentParser(description="Expert parallelism over the GPUs of a host.")
    parser.add_argument("--ranks", type=int, default=0, help="GPUs to use; all by default")
    parser.add_argument("--seconds", type=float, default=200, help="begin nothing after this")
    parser.add_argument("--quick", action="store_true", help="two token counts, no bf16")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--recipe", default="fp8_block")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.seconds + 60, exit=True)
    found = {} if options.small else ceilings()
    devices = jax.devices()[: options.ranks or None]
    mesh = Mesh(np.array(devices), (AXIS,))
    report = Report(mesh, options.recipe)
    tokens = TOKENS[:2] if options.quick else TOKENS
    if options.small:
        tokens = tuple(count for count in tokens if count <= FEW_TOKENS)
    config = partial(
        mm.MoEConfig,
        weight_format=options.recipe,
        activation=mm.Activation("swiglu", clamp=10.0),
        max_num_tokens=max(tokens),
    )
    layers = [
        Layer(name, config(**(SMALL if options.small else sizes)), mesh)
        for name, sizes in SHAPES.items()
        if name in options.shapes
    ]
    run = Run(report, options.seconds)
    if jax.default_backend() == "gpu":
        print(compile_kernels(layers, tokens), flush=True)
    report.add("ceilings", found)
    report.add("ceilings", link_rates(mesh, 1 << 20 if options.small else 1 << 30))
    measure_all(run, layers, tokens, options.quick)


def measure_all(run: Run, layers: list[Layer], tokens: tuple[int, ...], quick: bool) -> None:
    """Every cell: the kernel, then `grouped`, `xla` and bfloat16."""
    weights = {}
    for layer in layers:
        try:
            run.report.add(f"{layer.name} layer", buffer_bytes(layer))
        except (ImportError, NotImplementedError, RuntimeError, ValueError) as error:
            run.report.add(f"{layer.name} layer", {"refused": str(error)})
        start = time.perf_counter()
        weights[layer.name] = layer.parameters()
        took = f"{time.perf_counter() - start:.1f} s"
        made = {"parameter bytes": weights[layer.name].num_bytes, "made in": took}
        run.report.add(f"{layer.name} layer", made)
        for count in tokens:
            run.attempt(
                layer, count, "deep_gemm", partial(run.kernel, layer, weights[layer.name], count)
            )
    for layer in layers:
        beside_grouped(run, layer, tokens)
    for layer in layers:
        for count in tokens:
            call, parameters = layer.fused("xla"), weights[layer.name]
            run.attempt(
                layer, count, "xla", partial(run.unfused, layer, call, parameters, count, "xla")
            )
    for layer in [] if quick else layers:
        matrices = layer.matrices()
        for count in (each for each in tokens if each <= RAGGED_TOKENS):
            call = layer.ragged()
            run.attempt(
                layer, count, "bf16", partial(run.unfused, layer, call, matrices, count, "bf16")
            )


def beside_grouped(run: Run, layer: Layer, tokens: tuple[int, ...]) -> None:
    """`grouped` at every number of tokens, where this machine has it."""
    try:
        parameters = layer.grouped_parameters()
    except (ImportError, NotImplementedError, RuntimeError) as error:
        run.report.add(f"{layer.name} layer", {"grouped refused": str(error)})
        return
    call = layer.fused("grouped")
    for count in tokens:
        run.attempt(layer, count, "grouped", partial(run.grouped, layer, call, parameters, count))


if __name__ == "__main__":
    main()
