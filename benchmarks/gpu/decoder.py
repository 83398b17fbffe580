"""Whole models on one GPU: examples/generate.py's decoder with random weights of the real sizes.

    PYTHONPATH=.:examples:benchmarks/gpu python benchmarks/gpu/decoder.py [--models NAME ...]

Decode steps at four batch sizes, each sequence with a cache of `--context` positions, all of which
attention goes over; layers are scanned, a step is one program. Where a step's time goes is from
the profiler, in the same program without CUDA graphs (experts, router, attention, rest); where the
profiler sees no kernel, from programs without the experts and without both. Beside them the bytes
that a step must read, at the copy rate of the same run: the experts that the batch's tokens are
routed to, attention's weights, keys and values, the head. Each model is a process of its own, which
adds its rows to $OUT/decoder_h200.json after every batch. As benchmarks/results/decoder_h200*.json
benchmarks/pages.py makes a page of them. `--tiny` runs all of it on a CPU.
"""

import argparse
import contextlib
import faulthandler
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.92")

import attention
import generate
import jax
import jax.numpy as jnp
import numpy as np
import random_decoder
import step_trace
from flax import nnx

import jax_megamoe as mm
from jax_megamoe.cli.gpu.measure import versions

BATCHES = (1, 8, 64, 256)
MODELS = ("qwen3_30b_fp8_block", "qwen3_30b_mxfp4_block", "gpt_oss_120b_mxfp4_block")
COMMAND = "PYTHONPATH=.:examples:benchmarks/gpu python benchmarks/gpu/decoder.py"
SECONDS = 170
"""Of a model, after which its process ends."""
STEPS_TRACED = 3

OUT = Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="decoder_"))
Json = dict[str, Any]
Captures = Callable[[str, np.ndarray, np.ndarray | None], None] | None
"""See `mm.capture_routing`."""


class Job(NamedTuple):
    """A program to compile: `function(state, tokens, lengths, cache)`, the cache donated."""

    function: Callable[..., Any]
    tokens: Any
    cache: Any
    options: Json


def step(graph: Any, state: Any, tokens: jax.Array, lengths: jax.Array, cache: Any) -> Any:
    """The next tokens [B], whether all logits are finite, and the cache."""
    model = nnx.merge(graph, state)
    logits, cache = generate.after_token(model, tokens, lengths, cache)
    return jnp.argmax(logits, -1).astype(jnp.int32), jnp.isfinite(logits).all(), cache


def prompt_step(graph: Any, state: Any, tokens: jax.Array, lengths: jax.Array, cache: Any) -> Any:
    """`step` of prompts [B, T]."""
    model = nnx.merge(graph, state)
    logits, cache = generate.after_prompts(model, tokens, lengths, cache)
    return jnp.argmax(logits, -1).astype(jnp.int32), jnp.isfinite(logits).all(), cache


def copy_rate() -> float:
    """Bytes a second of a device-to-device copy, read plus written; of JAX's on a CPU."""
    if jax.default_backend() == "gpu":
        driver: Any = import_module("driver")  # needs cuda-bindings, which a CPU has not
        driver.use_device()
        return driver.copy_rate()
    array, copy = jnp.zeros(1 << 24, jnp.uint8), jax.jit(lambda a: a ^ jnp.uint8(1))
    jax.block_until_ready(copy(array))
    start = time.perf_counter()
    jax.block_until_ready(copy(array))
    return 2 * array.nbytes / (time.perf_counter() - start)


def compile_programs(
    jobs: dict[str, Job], state: Any, threads: int, captures: Captures = None
) -> dict[str, Any]:
    """Programs by name, traced in this thread and compiled several at a time.

    The one called "routing" hands its layers' routing to `captures`.
    """

    def lowered(name: str, job: Job) -> Any:
        lengths = jax.ShapeDtypeStruct(job.tokens.shape[:1], jnp.int32)
        capture = captures is not None and name == "routing"
        with mm.capture_routing(captures) if capture else contextlib.nullcontext():
            traced = jax.jit(job.function, donate_argnums=3)
            return traced.lower(state, job.tokens, lengths, job.cache)

    def compiled(lowered: Any, options: Json) -> Any:
        try:
            return lowered.compile(compiler_options=options or None)
        except Exception as error:
            if not options:
                raise
            print(f"compiled without {options}: {error!r}"[:500], flush=True)
            return lowered.compile()

    with ThreadPoolExecutor(threads) as pool:
        found = {
            name: pool.submit(compiled, lowered(name, job), job.options)
            for name, job in jobs.items()
        }
        return {name: each.result() for name, each in found.items()}


def programs_of(loaded: random_decoder.Loaded, options: argparse.Namespace) -> dict[str, Job]:
    """What is compiled: steps, the same without CUDA graphs, one that hands out its routing, and
    a prompt; those that take longest first."""
    config, jobs = loaded.config, {}

    def job(function: Any, rows: tuple[int, ...], length: int, **changed: Any) -> Job:
        heads = (config.num_kv_heads, length, config.head_dim)
        shape = (len(config.windows), rows[0], *heads)
        cache = generate.Cache(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for _ in range(2)))
        tokens = jax.ShapeDtypeStruct(rows, jnp.int32)
        every = generate.COMPILER_OPTIONS | options.xla | changed
        return Job(partial(function, loaded.graph), tokens, cache, every)

    for count in sorted(options.batches, reverse=True):
        jobs[f"step {count}"] = job(step, (count,), options.context)
        if count in options.profile:
            jobs[f"traced {count}"] = job(step, (count,), options.context, **step_trace.NO_GRAPHS)
    jobs["routing"] = jobs[f"step {max(options.batches)}"]
    if options.prompt:
        jobs["prompt"] = job(prompt_step, (1, options.prompt), options.prompt)
    return jobs


def timed(run: Any, state: Any, call: tuple[Any, ...], enough: float = 0.2) -> tuple[float, Any]:
    """Median milliseconds of a step, of several in a row that take `enough` seconds; the cache."""
    *inputs, cache = call
    tokens, _, cache = run(state, *inputs, cache)
    jax.block_until_ready(tokens)
    times, steps = [], 1
    for repeat in range(6):
        start = time.perf_counter()
        for _ in range(steps):
            tokens, _, cache = run(state, *inputs, cache)
        jax.block_until_ready(tokens)
        taken = (time.perf_counter() - start) / steps
        if repeat:
            times.append(taken * 1e3)
        steps = max(1, min(100, int(enough / taken)))
    return statistics.median(times), cache


def profiled(run: Any, state: Any, call: tuple[Any, ...]) -> tuple[Json, Any]:
    """Milliseconds of a step by part, and the largest kernels; or why the profiler has none."""
    *inputs, cache = call
    tokens, _, cache = run(state, *inputs, cache)
    jax.block_until_ready(tokens)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS_TRACED):
                tokens, _, cache = run(state, *inputs, cache)
            jax.block_until_ready(tokens)
        try:
            events = step_trace.read(Path(folder), on_gpu=jax.default_backend() == "gpu")
        except (OSError, EOFError, ValueError, KeyError) as error:  # a file cut short or changed
            return {"profiler": f"unreadable: {error!r}"[:300]}, cache
    if not events:
        return {"profiler": "saw no kernel"}, cache
    scopes = step_trace.scopes_of(run.as_text())
    parts = step_trace.parts(events, scopes)
    kernels = step_trace.largest(events, scopes)
    scale = 1e3 * STEPS_TRACED
    return {
        "parts_from": "profiler",
        "parts_ms": {part: taken / scale for part, taken in parts.items()},
        "largest_kernels_ms": [[*names, taken / scale] for *names, taken in kernels],
    }, cache


@contextlib.contextmanager
def without(*parts: str) -> Iterator[None]:
    """Layers traced inside have no experts (router included), or no attention."""

    def no_experts(self: Any, x: jax.Array, **_: Any) -> jax.Array:
        return jnp.zeros_like(x)

    def no_attention(self: Any, x: jax.Array, place: Any) -> Any:
        heads = self.config.num_kv_heads, self.config.head_dim
        rows = jnp.zeros((*x.shape[:2], *heads), jnp.bfloat16)
        return jnp.zeros_like(x), generate.Cache(rows, rows)

    with contextlib.ExitStack() as stack:
        if "experts" in parts:
            stack.enter_context(mock.patch.object(mm.MegaMoEBlock, "__call__", no_experts))
        if "attention" in parts:
            stack.enter_context(mock.patch.object(generate.Attention, "__call__", no_attention))
        yield


def by_omission(
    loaded: random_decoder.Loaded, job: Job, whole: float, call: tuple[Any, ...]
) -> tuple[Json, Any]:
    """Milliseconds of a step by part, from steps without the experts and without attention too."""
    *inputs, cache = call
    left = []
    for parts in (("experts",), ("experts", "attention")):
        with without(*parts):
            run = compile_programs({"": job}, loaded.state, 1)[""]
        taken, cache = timed(run, loaded.state, (*inputs, cache))
        left.append(taken)
    found = {"experts": whole - left[0], "attention": left[0] - left[1], "rest": left[1]}
    return {"parts_from": "programs without them", "parts_ms": found}, cache


def parts_of(
    loaded: random_decoder.Loaded,
    programs: dict[str, Any],
    jobs: dict[str, Job],
    row: Json,
    call: tuple[Any, ...],
    options: argparse.Namespace,
) -> tuple[Json, Any]:
    """Where the time of a row's step goes, or why that is not known; the cache."""
    count, (*inputs, cache) = row["batch"], call
    if count not in options.profile:
        return {"parts_missing": "not asked for, see --profile"}, cache
    traced, found = programs[f"traced {count}"], {}
    plain, cache = timed(traced, loaded.state, call)
    if not options.omit:
        found, cache = profiled(traced, loaded.state, (*inputs, cache))
    if "parts_ms" not in found:
        job = jobs[f"step {count}"]
        more, cache = by_omission(loaded, job, row["ms"], (*inputs, cache))
        found |= more
    return found | {"ms_without_graphs": plain}, cache


def needed(
    loaded: random_decoder.Loaded, count: int, context: int, touched: float
) -> dict[str, float]:
    """Bytes that a step must read, by part. Of a window's layer the window's positions."""
    config, sizes = loaded.config, loaded.sizes
    layers = len(config.windows)
    seen = sum(min(window, context) for window in config.windows)
    row = 2 * config.num_kv_heads * config.head_dim * 2
    return {
        "experts": layers * touched * sizes["expert"],
        "router": layers * sizes["router"],
        "attention": layers * sizes["attention"] + count * seen * row,
        "rest": sizes["head"],
    }


def shares(row: Json, rate: float) -> Json:
    """A row with its limits: what its bytes take at the copy rate."""
    limits = {part: size / rate * 1e3 for part, size in row["bytes"].items()}
    whole = sum(limits.values())
    row |= {"limit_ms": limits | {"step": whole}, "of_limit": {"step": whole / row["ms"]}}
    for part, taken in row.get("parts_ms", {}).items():
        if limits.get(part) and taken > 0:
            row["of_limit"][part] = limits[part] / taken
    return row


def measure(name: str, options: argparse.Namespace) -> None:
    """One model: its rows, saved one by one."""
    case = random_decoder.CASES[name]
    case = case.small() if options.tiny else case
    rate = copy_rate()
    most = max(*options.batches, options.prompt)
    loaded = random_decoder.load(case, most, sorted({*options.batches, options.prompt} - {0}))
    about = {
        "command": f"{COMMAND} {shlex.join(sys.argv[1:])}",
        "device": jax.devices()[0].device_kind, "versions": versions(), "context": options.context,
        "compiler_options": generate.COMPILER_OPTIONS | options.xla,
        "attention_kernel": not options.no_kernel,
        "layout": loaded.layout, "copy_bytes_per_second": rate, "bytes_of": loaded.sizes,
        "model_bytes": sum(array.nbytes for array in jax.tree.leaves(loaded.state)),
    }  # fmt: skip
    start = time.perf_counter()
    jobs = programs_of(loaded, options)
    routed: list[np.ndarray] = []
    programs = compile_programs(
        jobs, loaded.state, options.threads, lambda name, chosen, mask: routed.append(chosen)
    )
    print(f"{len(jobs)} programs compiled in {time.perf_counter() - start:.1f} s", flush=True)
    large = max(options.batches)
    model = nnx.merge(loaded.graph, loaded.state)
    cache = random_decoder.full_cache(model, large, options.context)
    vocab = case.raw["vocab_size"]
    tokens = jax.random.randint(jax.random.key(3), (large,), 0, vocab, jnp.int32)
    lengths = jnp.full(large, options.context - 1, jnp.int32)
    _, finite, cache = programs["routing"](loaded.state, tokens, lengths, cache)
    finite = bool(finite)
    jax.effects_barrier()
    print(f"logits are {'' if finite else 'NOT '}finite", flush=True)
    about |= {"finite": finite}
    for count in sorted(options.batches):
        part = cache if count == large else jax.tree.map(lambda a, n=count: a[:, :n], cache)
        call = tokens[:count], lengths[:count], part
        touched = float(np.mean([len(np.unique(ids[:count])) for ids in routed]))
        row: Json = {"batch": count, "experts_touched": touched}
        row["ms"], part = timed(programs[f"step {count}"], loaded.state, call)
        row["tokens_per_second"] = count / row["ms"] * 1e3
        row["bytes"] = needed(loaded, count, options.context, touched)
        _save(name, about, shares(row, rate))
        more, part = parts_of(loaded, programs, jobs, row, (*call[:2], part), options)
        row |= more
        row["peak_bytes"] = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        _save(name, about, shares(row, rate))
        print(f"{name}, {line(row)}", flush=True)
        for kernel in row.get("largest_kernels_ms", ()) if count == 64 else ():
            print("   ", *kernel)
    if options.prompt:
        prompt = jnp.resize(tokens, (1, options.prompt))
        empty = random_decoder.full_cache(model, 1, options.prompt)
        call = prompt, jnp.full(1, options.prompt, jnp.int32), empty
        taken, _ = timed(programs["prompt"], loaded.state, call)
        _save(name, about, {"prompt_tokens": options.prompt, "ms": taken})
        print(f"a prompt of {options.prompt} tokens: {taken:.2f} ms", flush=True)


def line(row: Json) -> str:
    """A row as text."""
    found, limits, of = row.get("parts_ms", {}), row["limit_ms"], row["of_limit"]
    parts = [
        f"{part} {taken:.2f}" + (f" ({of[part]:.2f} of limit)" if part in of else "")
        for part, taken in found.items()
        if taken
    ]
    return (
        f"batch {row['batch']}: {row['ms']:.2f} ms a step, {row['tokens_per_second']:.0f} tokens/s,"
        f" limit {limits['step']:.2f} ms: {of['step']:.2f} of it; "
        + (", ".join(parts) or f"no parts: {row.get('parts_missing')}")
    )


def _save(name: str, about: Json, row: Json) -> None:
    """Puts a row into the file, in place of the one of the same batch or prompt."""
    path = OUT / "decoder_h200.json"
    result: Json = json.loads(path.read_text()) if path.exists() else {"models": {}}
    model = result["models"].setdefault(name, {"rows": []}) | about
    key = row.get("batch")
    model["rows"] = [each for each in model["rows"] if each.get("batch") != key] + [row]
    result["models"][name] = model
    path.write_text(json.dumps(result, indent=1))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Whole decoders on one GPU.")
    known = list(random_decoder.CASES)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=known)
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--context", type=int, default=1024, help="positions of a sequence")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt; 0: none")
    parser.add_argument("--profile", nargs="*", type=int, default=list(BATCHES), metavar="BATCH")
    parser.add_argument("--omit", action="store_true", help="parts without the profiler")
    parser.add_argument("--threads", type=int, default=10, help="programs compiled at a time")
    parser.add_argument("--xla", type=json.loads, default={}, help="compiler options, as JSON")
    parser.add_argument("--no-kernel", action="store_true", help="attention by XLA's products")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, to try the script")
    options = parser.parse_args()
    if len(options.models) > 1:
        own = [name for name in sys.argv[1:] if name not in options.models and name != "--models"]
        failed = [
            name
            for name in options.models
            if subprocess.run(
                [sys.executable, __file__, *own, "--models", name],
                env=os.environ | {"OUT": str(OUT)},
                check=False,
            ).returncode
        ]
        raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)
    if not options.tiny:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
    if options.no_kernel:
        attention.triton = None
    measure(options.models[0], options)


if __name__ == "__main__":
    main()
