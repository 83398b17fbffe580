"""One H200, one rank: `mega_moe` under jit against `reference` and the bare launch.

Everything runs twice, in processes with XLA's CUDA graphs on and off; outputs of both are compared
bit for bit, and with `reference` (which takes most of the time) in the first. launch_counter.cc
tells which launches were captured. The scripts that are run are check_sm90.py and
check_flashinfer.py.
"""

import argparse
import faulthandler
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import bare_launch
import driver
import graph_capture
import jax
import jax.numpy as jnp
import numpy as np
import tolerances
import workload
from checks import OUT, Checks, bits
from jax import lax
from jaxtyping import Array

import jax_megamoe as mm
from jax_megamoe.plan import plan_mega_moe
from jax_megamoe.plan.launch import LaunchPlan

TOKENS = (0, 1, 7, 64, 129, workload.MAX_TOKENS)
RECORDED_TOKENS = (1, 64, 512, 4096)
PADDED = 192
"""Rows of the calls of `reference` for at most this many tokens: one compilation for all."""
CALLS = 1000
SCANNED_LAYERS = 8
MAX_SCANNED_BYTES = 16 << 30
KERNELS_PER_CALL = 2
SECONDS = 280
"""A process that takes longer hangs, and is ended."""


@dataclass(frozen=True)
class Subject:
    """What a script checks.

    Attributes:
        script: its name, of the results too.
        recipe: of the layers.
        shapes: names in `workload.SHAPES`.
        records: recorded launches of some of them; None: the bare launch is not compared with.
        parts: checks of each layer besides those here.
    """

    script: str
    recipe: str
    shapes: tuple[str, ...]
    records: Path | None = None
    parts: tuple[Callable[["Layer"], None], ...] = ()

    def plan(self, shape: str, num_tokens: int) -> LaunchPlan:
        """The plan of a call."""
        return plan_mega_moe(workload.config(shape, self.recipe), workload.H200, num_tokens, 1)

    def recorded(self) -> dict[str, bare_launch.Recorded]:
        """The recorded launches by name."""
        return {} if self.records is None else bare_launch.read_records(self.records)


class Layer:
    """A shape with two sets of parameters, its jitted calls, and where to report."""

    def __init__(
        self, subject: Subject, shape: str, graphs: str, checks: Checks, digests: dict[str, str]
    ) -> None:
        self.subject, self.shape, self.checks, self.digests = subject, shape, checks, digests
        self.with_reference = graphs == "on"
        self.graphs = graphs
        self.cfg = workload.config(shape, subject.recipe)
        self.params = workload.weights(self.cfg, 0)
        self.others = workload.weights(self.cfg, 1)
        self.traced = partial(mm.mega_moe, config=self.cfg, implementation="deep_gemm")
        self.call = jax.jit(self.traced)
        self.counted = jax.jit(partial(self.traced, return_stats=True))
        expected = partial(mm.mega_moe, config=self.cfg, implementation="reference")
        self._reference = jax.jit(expected)

    def record(self, what: str, y: Any) -> str:
        """Keeps a hash of an output, to compare graphs on and off; returns its full name."""
        name = f"{self.shape}, {what}"
        self.digests[name] = hashlib.sha256(bits(y).tobytes()).hexdigest()
        return name

    def against_reference(
        self, y: Any, tokens: workload.Tokens, name: str, params: mm.ExpertWeights | None = None
    ) -> None:
        """Checks an output against `reference`, in the process that does so."""
        num_tokens = tokens[0].shape[0]
        if not self.with_reference or not num_tokens:
            return
        rows = PADDED if num_tokens <= PADDED else num_tokens
        x, ids, factors = (
            jnp.pad(array, [(0, rows - num_tokens), (0, 0)], constant_values=fill)
            for array, fill in zip(tokens, (0, -1, 0), strict=True)
        )
        params = self.params if params is None else params
        want = np.asarray(self._reference(x, ids, factors, params))[:num_tokens]
        block_m = self.subject.plan(self.shape, num_tokens).block_m
        limit = tolerances.kernel_agreement(self.subject.recipe, block_m)
        self.checks.agree(y, want, f"{name}, against reference, tiles of {block_m}", limit)

    def counts(self, counts: Any, ids: Any, mask: Any, name: str) -> None:
        """Checks the tokens of each expert."""
        real = np.asarray(ids)[~np.asarray(mask)]
        want = np.bincount(real[real >= 0], minlength=self.cfg.num_experts)
        self.checks.check((np.asarray(counts) == want).all(), f"{name}, counts", f"{want.sum()}")


def token_counts(layer: Layer) -> None:
    """Each number of tokens: result and counts."""
    for num_tokens in TOKENS:
        tokens = workload.tokens(layer.cfg, num_tokens)
        y, counts = layer.counted(*tokens, layer.params)
        name = layer.record(f"{num_tokens} tokens", y)
        layer.checks.check(y.shape == tokens[0].shape, f"{name}, shape", f"{y.shape}")
        layer.counts(counts, tokens[1], np.zeros(num_tokens, bool), name)
        layer.against_reference(y, tokens, name)


def routings(layer: Layer) -> None:
    """Unusual loads: all to one expert, an id twice in a token, unrouted slots, nothing."""
    x, ids, factors = workload.tokens(layer.cfg, 129)
    slot = jnp.arange(layer.cfg.top_k)[None]
    loads = {
        "one expert": jnp.where(slot == 0, 5, -1) + jnp.zeros_like(ids),
        "duplicates": jnp.repeat(ids[:, ::2], 2, axis=1),
        "unrouted slots": jnp.where((jnp.arange(129)[:, None] + slot) % 3 == 0, -1, ids),
        "nothing": jnp.full_like(ids, -1),
    }
    for load, some in loads.items():
        y, counts = layer.counted(x, some, factors, layer.params)
        name = layer.record(load, y)
        layer.counts(counts, some, np.zeros(129, bool), name)
        if load == "nothing":
            layer.checks.check(not bits(y).any(), f"{name}, zeros")
        else:
            layer.against_reference(y, (x, some, factors), name)


def padding(layer: Layer) -> None:
    """Whatever padded rows hold, they come out 0 and change no bit of the others."""
    x, ids, factors = workload.tokens(layer.cfg, 129)
    padded = np.arange(129) % 4 == 1
    column = padded[:, None]
    want = layer.call(x, ids, factors, layer.params, padding_mask=padded)
    name = layer.record("padding", want)
    layer.checks.check(not bits(want)[padded].any(), f"{name}, padded rows are 0")
    for garbage in (np.nan, 1e30):
        dirty = (
            jnp.where(column, jnp.bfloat16(garbage), x),
            jnp.where(column, 10**6, ids),
            jnp.where(column, jnp.float32(garbage), factors),
        )
        y, counts = layer.counted(*dirty, layer.params, padding_mask=padded)
        layer.checks.same_bits(y, want, f"{name} of {garbage}")
        layer.counts(counts, ids, padded, f"{name} of {garbage}")
        y = layer.call(dirty[0], jnp.where(column, -1, ids), factors, layer.params)
        layer.checks.same_bits(y, want, f"{name} of {garbage}, ids -1")
    short = layer.call(x[:64], ids[:64], factors[:64], layer.params)
    y = layer.call(x, ids, factors, layer.params, padding_mask=np.arange(129) >= 64)
    layer.checks.same_bits(y[:64], short, f"{name}, the first 64 of 129 rows as 64 alone")


def many_calls(layer: Layer) -> None:
    """1,000 calls of two layers in turn, which share a buffer: every output as the first."""
    for num_tokens in (64, 512):
        tokens = workload.tokens(layer.cfg, num_tokens)
        first = layer.call(*tokens, layer.params)
        second = layer.call(*tokens, layer.others)
        name = layer.record(f"{num_tokens} tokens, second layer", second)

        @jax.jit
        def step(different: Array, tokens: Any, params: Any, others: Any, want: Any) -> Array:
            for weights, expected in zip((params, others), want, strict=True):
                y = layer.traced(*tokens, weights)
                unequal = _bits(y) != _bits(expected)
                different = different + jnp.sum(unequal, dtype=jnp.int32)
            return different

        different = jnp.zeros((), jnp.int32)
        for index in range(CALLS):
            if index == CALLS // 10:
                jax.block_until_ready(different)
                before = graph_capture.launches()
            different = step(different, tokens, layer.params, layer.others, (first, second))
        differing = int(different)
        after = graph_capture.launches()
        layer.checks.check(not differing, f"{name}, {CALLS} calls", f"{differing} values differ")
        captured, direct = (b - a for a, b in zip(before, after, strict=True))
        calls = 2 * (CALLS - CALLS // 10)
        expected = 0 if layer.graphs == "on" else calls * KERNELS_PER_CALL
        layer.checks.check(
            direct == expected and (layer.graphs == "on" or not captured),
            f"{name}, {calls} calls replay graphs: {layer.graphs}",
            f"{captured} kernels launched into graphs, {direct} straight to a stream",
        )


def _bits(y: Array) -> Array:
    return lax.bitcast_convert_type(y, jnp.uint16)


def chained(layer: Layer) -> None:
    """A layer on another's output in one program, and a scan over 8 layers, as call by call."""
    x, ids, factors = workload.tokens(layer.cfg, 64)

    def block(x: Array, params: Any) -> Array:
        return x + layer.traced(x, ids, factors, params)

    one = jax.jit(block)
    two = jax.jit(lambda x, params, others: block(block(x, params), others))
    want = one(one(x, layer.params), layer.others)
    y = two(x, layer.params, layer.others)
    layer.checks.same_bits(y, want, layer.record("two layers in one program", y))
    if SCANNED_LAYERS * layer.params.num_bytes > MAX_SCANNED_BYTES:
        return
    layers = [workload.weights(layer.cfg, seed) for seed in range(SCANNED_LAYERS)]
    want = x
    for params in layers:
        want = one(want, params)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    y = jax.jit(lambda x, stack: lax.scan(lambda x, p: (block(x, p), None), x, stack)[0])(
        x, stacked
    )
    layer.checks.same_bits(y, want, layer.record(f"scan over {SCANNED_LAYERS} layers", y))


def bare(layer: Layer, compiler: bare_launch.Compiler) -> None:
    """The recorded launch through the driver alone, on the same arrays: the same bits."""
    records = layer.subject.recorded()
    stream = driver.Stream()
    for num_tokens in RECORDED_TOKENS:
        recorded = records.get(f"{layer.shape}-{num_tokens}")
        if recorded is None:
            continue
        tokens = workload.tokens(layer.cfg, num_tokens)
        y = layer.call(*tokens, layer.params)
        name = layer.record(f"{num_tokens} tokens, jitted", y)
        if not layer.with_reference:
            continue
        operands = workload.record_operands(*tokens, layer.params)
        alone = bare_launch.BareLayer(recorded, compiler, operands)
        layer.checks.same_bits(y, alone.run(stream), f"{name}, as the bare launch")
        alone.free()


def run_process(subject: Subject, graphs: str, shapes: list[str]) -> None:
    """Every check with graphs on or off; writes <script>_graphs_<graphs>.json."""
    checks, digests = Checks(f"{subject.script}_graphs_{graphs}"), {}
    counts = {*TOKENS, *RECORDED_TOKENS}
    plans = [subject.plan(shape, num_tokens) for shape in shapes for num_tokens in counts]
    checks.check(True, "kernels", workload.compile_kernels(plans))
    compiler = bare_launch.Compiler()
    if graphs == "on":
        records = subject.recorded()
        names = [f"{shape}-{count}" for shape in shapes for count in RECORDED_TOKENS]
        used = [records[name] for name in names if name in records]
        compiler.compile_all(part for each in used for part in (each.staging, each.mega))
    jax.block_until_ready(jnp.zeros(1))
    driver.use_device()
    parts: list[Callable[[Layer], None]] = [
        token_counts, routings, padding, many_calls, chained, partial(bare, compiler=compiler)
    ]  # fmt: skip
    for shape in shapes:
        layer = Layer(subject, shape, graphs, checks, digests)
        for part in (*parts, *subject.parts):
            part(layer)
    counted = graph_capture.launches()
    seen = f"{counted.captured} kernels launched into graphs, {counted.direct} to streams, in all"
    checks.check((counted.captured > 0) == (graphs == "on"), f"graphs {graphs}", seen)
    checks.finish(digests=digests)


def run(subject: Subject) -> None:
    """Both processes, one after the other, and the comparison of their outputs."""
    parser = argparse.ArgumentParser(description=f"{subject.recipe} on one H200.")
    parser.add_argument("--quick", action="store_true", help="one shape")
    parser.add_argument("--shapes", nargs="+", default=list(subject.shapes))
    parser.add_argument("--graphs", choices=[*graph_capture.GRAPH_FLAGS], help="one process's part")
    # What else the script has read of its command line.
    arguments, rest = parser.parse_known_args()
    faulthandler.dump_traceback_later(SECONDS * (1 if arguments.graphs else 2), exit=True)
    shapes = ["qwen3_30b"] if arguments.quick else arguments.shapes
    if arguments.graphs:
        run_process(subject, arguments.graphs, shapes)
    checks = Checks(subject.script)
    library = graph_capture.build(Path(tempfile.mkdtemp()))
    digests: list[dict[str, str]] = []
    for graphs in graph_capture.GRAPH_FLAGS:
        print(f"CUDA graphs {graphs}", flush=True)
        written = OUT / f"{subject.script}_graphs_{graphs}.json"
        written.unlink(missing_ok=True)
        command = [sys.executable, sys.argv[0], *rest, "--graphs", graphs, "--shapes", *shapes]
        environment = graph_capture.environment(graphs, library) | {"OUT": str(OUT)}
        status = subprocess.run(command, env=environment, check=False).returncode
        checks.check(written.exists(), f"graphs {graphs}", f"exit status {status}")
        if written.exists():
            result = json.loads(written.read_text())
            checks.done += result["checks"]
            digests.append(result["digests"])
    if len(digests) == 2:
        for name, digest in digests[0].items():
            same = digests[1].get(name) == digest
            checks.check(same, f"{name}, graphs on and off alike")
    checks.finish()
