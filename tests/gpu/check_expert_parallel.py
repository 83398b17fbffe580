"""Expert parallelism over the GPUs of a host, in one process and in one process a GPU.

    PYTHONPATH=.:tests:benchmarks/gpu python tests/gpu/check_expert_parallel.py [--quick]

Of fp8_block, or of --recipe mxfp4_block or nvfp4_block.

Every result is compared bit for bit with one GPU that has all experts and all tokens, and that one
within tests/tolerances.py with `reference`. Prints a line for each check, and exits with 1 if one
failed. Each job runs in processes of its own and is killed after --timeout seconds.

Without GPUs, to try the script itself: JAX_PLATFORMS=cpu and --implementation xla --small.
"""

import argparse
import faulthandler
import gc
import json
import socket
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import graph_capture
import jax
import jax.numpy as jnp
import jobs
import numpy as np
import ranks
import workload
from jax import lax

import jax_megamoe as mm
from jax_megamoe import symmetric_memory
from jax_megamoe.plan import plan_mega_moe
from jax_megamoe.runtime.devices import device_spec

NUM_CALLS, NUM_CALLS_QUICK = 1000, 100
NUM_WARM = 4
TURNS = ("first", "later")
SECONDS_LATE = 5.0
SECONDS_BUSY = 3.0
COMPILES_REFERENCE = 2
"""Timeouts that the job on one GPU may take: it compiles `reference` for every cell."""
MEMORY_FRACTION = "0.5"
"""Of a GPU, for JAX; the rest is for symmetric buffers."""


@dataclass(frozen=True)
class Job:
    """One job of a child process, as JSON on its command line.

    Attributes:
        task: name of the function below that does it.
        num_ranks: ranks, one on a GPU.
        folder: where jobs leave files for later ones.
        how: the implementation.
        small: CPU sizes.
        quick: fewer calls.
        graphs: ``"on"`` or ``"off"``; empty: as XLA does by itself.
        recipe: of the layers.
        process: index of this process among one a GPU; None: all GPUs are in this one.
        port: of the coordinator of several processes.
    """

    task: str
    num_ranks: int
    folder: str
    how: str
    small: bool
    quick: bool
    graphs: str = ""
    recipe: str = "fp8_block"
    process: int | None = None
    port: int = 0


def compile_kernels(job: Job) -> None:
    """Compiles the kernels of all later jobs into the cache."""
    with jobs.check("kernels compiled") as remarks:
        device = device_spec(jax.devices()[0])
        pairs = [
            pair
            for cell in ranks.cells(job.small, job.recipe)
            for pair in ((cell, job.num_ranks), (cell.on_one_device(job.num_ranks), 1))
        ]
        remarks.append(
            workload.compile_kernels(
                plan_mega_moe(cell.config, device, cell.num_tokens, num_ranks, with_stats=True)
                for cell, num_ranks in pairs
            )
        )


def one_device(job: Job) -> None:
    """All experts on one device: compared with `reference`, and kept for the other jobs."""
    folder = Path(job.folder)
    cells = ranks.cells(job.small, job.recipe)
    weights = jax.device_put(ranks.save_weights(folder, cells[0].config))
    for cell in cells:
        one = cell.on_one_device(job.num_ranks)
        call = ranks.outside(one, None, job.how)
        run, oracle = jax.jit(call), jax.jit(ranks.outside(one, None, "reference"))
        made = ranks.loads(cell, job.num_ranks)
        results = {}
        with jobs.check(f"one GPU equals reference, {cell}") as remarks:
            worst = 0.0
            for name, tokens in made.items():
                y, counts = run(tokens, weights[0])
                ranks.assert_counts(counts, tokens, cell.config)
                want, _ = oracle(tokens, weights[0])
                worst = max(worst, ranks.assert_agree(y, want, job.how, name, job.recipe))
                results[name] = np.asarray(y)
            remarks.append(f"{len(made)} loads, largest relative error {worst:.1e}")
        tokens = made["random"]
        both = jax.jit(ranks.two_layers(call))
        results["two layers"] = np.asarray(both(tokens, *weights)[0])
        scan = jax.jit(ranks.scanned(call))
        results["scan"] = np.asarray(scan(tokens, weights[0])[0])
        bits = {name: array.view(np.uint16) for name, array in results.items()}
        np.savez(folder / results_of(cell), **bits)


def results_of(cell: Any) -> str:
    """Name of the file of a cell's results on one device."""
    return f"{cell}.npz"


@dataclass
class Ready:
    """What a job on all ranks starts from: the ranks, parameters on them, results to equal."""

    world: Any
    weights: Any
    cells: list[Any]
    expected: dict[str, Any]


def on_all_ranks(job: Job) -> Ready:
    """Joins the other processes, if there are any, and places the parameters."""
    if job.process is not None:
        jax.distributed.initialize(
            f"127.0.0.1:{job.port}", num_processes=job.num_ranks, process_id=job.process
        )
    devices = jax.devices()
    assert len(devices) == job.num_ranks, f"{job.num_ranks} devices expected, got {devices}"
    world = ranks.World(devices)
    folder = Path(job.folder)
    weights = world.place(ranks.load_weights(folder, ranks.cells(job.small, job.recipe)[0].config))
    expected = {}
    for cell in ranks.cells(job.small, job.recipe):
        with np.load(folder / results_of(cell)) as file:
            expected[str(cell)] = {name: file[name] for name in file.files}
    return Ready(world, weights, ranks.cells(job.small, job.recipe), expected)


def equal(job: Job) -> None:
    """Every cell and load, both ways to call, two layers, a scan, many calls; then no buffers."""
    ready = on_all_ranks(job)
    for cell in ready.cells:
        equal_cell(job, ready, cell)
    independent_calls(job, ready)
    leave(job, ready)


def equal_cell(job: Job, ready: Ready, cell: Any) -> None:
    """The checks of one cell."""
    world, (weights, others) = ready.world, ready.weights
    expected = ready.expected[str(cell)]
    made = ranks.loads(cell, job.num_ranks)
    placed = {name: world.place(tokens) for name, tokens in made.items()}
    call = ranks.outside(cell, world, job.how)
    run = jax.jit(call)
    for name, tokens in placed.items():
        with jobs.check(f"{cell}, {name}: equals one GPU, counts right"):
            y, counts = run(tokens, weights)
            ranks.assert_same(y, expected[name], job.how, job.recipe)
            ranks.assert_counts(counts, made[name], cell.config)
    with jobs.check(f"{cell}: in the caller's shard_map"):
        if job.how == "deep_gemm":
            allocate(cell, world)
        y, counts = jax.jit(ranks.inside(cell, world, job.how))(placed["uneven ranks"], weights)
        ranks.assert_same(y, expected["uneven ranks"], job.how, job.recipe)
        ranks.assert_counts(counts, made["uneven ranks"], cell.config)
    with jobs.check(f"{cell}: two layers on one buffer"):
        y, _ = jax.jit(ranks.two_layers(call))(placed["random"], weights, others)
        ranks.assert_same(y, expected["two layers"], job.how, job.recipe)
    with jobs.check(f"{cell}: a scan over {ranks.NUM_SCANNED} layers"):
        y, _ = jax.jit(ranks.scanned(call))(placed["random"], weights)
        ranks.assert_same(y, expected["scan"], job.how, job.recipe)
    num_calls = NUM_CALLS_QUICK if job.quick else NUM_CALLS
    with jobs.check(f"{cell}: {num_calls} calls, two loads in turn, all like the first"):
        pair = [placed["random"], placed["uneven ranks"]]
        ranks.assert_repeats(call, pair, weights, world, num_calls)


def independent_calls(job: Job, ready: Ready) -> None:
    """Calls of one program that need nothing of each other, on one buffer: they must take turns."""
    calls = [(ready.cells[which], load) for which in (0, 1) for load in ("random", "uneven ranks")]
    tokens = [ready.world.place(ranks.loads(cell, job.num_ranks)[load]) for cell, load in calls]

    @jax.jit
    def program(tokens: Any, weights: Any) -> Any:
        return [
            ranks.outside(cell, ready.world, job.how)(each, weights)[0]
            for (cell, _), each in zip(calls, tokens, strict=True)
        ]

    with jobs.check(f"{len(calls)} independent calls in a program, {NUM_CALLS_QUICK} times"):
        for _ in range(NUM_CALLS_QUICK):
            results = program(tokens, ready.weights[0])
        for (cell, load), y in zip(calls, results, strict=True):
            ranks.assert_same(y, ready.expected[str(cell)][load], job.how, job.recipe)


def allocate(cell: Any, world: Any) -> None:
    """The symmetric buffers, which a call inside the caller's shard_map cannot allocate."""
    mm.allocate_buffers(cell.config, mesh=world.mesh, axis="ep")


def late(job: Job) -> None:
    """First launches for which a rank comes seconds late, and later ones, which graphs replay."""
    ready = on_all_ranks(job)
    if job.process is None:
        late_device(job, ready, ready.cells[0])
        late_host(job, ready, ready.cells[1])
    else:
        late_process(job, ready, ready.cells[0], "before anything is allocated")
        if job.how == "deep_gemm":
            allocate(ready.cells[1], ready.world)
        late_process(job, ready, ready.cells[1], "with everything compiled")
    leave(job, ready)


def late_device(job: Job, ready: Ready, cell: Any) -> None:
    """The last device still computes something else when the others launch."""
    on_gpu = jax.default_backend() == "gpu"
    # Few and long kernels: more than a stream's queue holds would keep this thread waiting.
    size, times = (16384, 300) if on_gpu else (256, 3)
    matrix = jnp.full((size, size), 1 / size, jnp.bfloat16)
    matrix = jax.device_put(matrix, ready.world.mesh.devices[-1])

    def multiply(a: jax.Array) -> jax.Array:
        return lax.fori_loop(0, times, lambda _, product: a @ product, a)

    keep_busy = jax.jit(multiply).lower(matrix).compile()
    tokens = ranks.loads(cell, job.num_ranks)["random"]
    arguments = ready.world.place(tokens), ready.weights[0]
    run = jax.jit(ranks.outside(cell, ready.world, job.how)).lower(*arguments).compile()
    for turn in TURNS:
        with jobs.check(f"{cell}: {turn} launch while a device is busy for seconds") as remarks:
            start = time.perf_counter()
            busy = keep_busy(matrix)
            y, _ = jax.block_until_ready(run(*arguments))
            waited = time.perf_counter() - start
            remarks.append(f"done after {waited:.1f} s")
            busy.block_until_ready()
            ranks.assert_same(y, ready.expected[str(cell)]["random"], job.how, job.recipe)
            assert not on_gpu or waited > 1, f"waited only {waited:.1f} s"
        call_often(run, arguments)


def late_host(job: Job, ready: Ready, cell: Any) -> None:
    """The last device's host thread sleeps inside the program, before its launch."""
    world = ready.world

    def wait(rank: Any) -> Any:
        time.sleep(SECONDS_BUSY if int(rank) == world.num_ranks - 1 else 0)
        return np.zeros((), jnp.bfloat16)

    def delayed(x: Any) -> Any:
        nothing = jax.ShapeDtypeStruct((), jnp.bfloat16)
        zero = jax.pure_callback(wait, nothing, lax.axis_index("ep"))
        return x + lax.pcast(zero, "ep", to="varying")

    call = ranks.outside(cell, world, job.how)

    def program(tokens: Any, weights: Any) -> Any:
        x = jax.shard_map(
            delayed, mesh=world.mesh, in_specs=jax.P("ep"), out_specs=jax.P("ep"), check_vma=False
        )(tokens[0])
        return call((x, *tokens[1:]), weights)

    tokens = ranks.loads(cell, job.num_ranks)["random"]
    arguments = world.place(tokens), ready.weights[0]
    run = jax.jit(program).lower(*arguments).compile()
    for turn in TURNS:
        with jobs.check(f"{cell}: {turn} launch while a host thread sleeps") as remarks:
            start = time.perf_counter()
            y, _ = jax.block_until_ready(run(*arguments))
            remarks.append(f"done after {time.perf_counter() - start:.1f} s")
            ranks.assert_same(y, ready.expected[str(cell)]["random"], job.how, job.recipe)
            assert time.perf_counter() - start >= SECONDS_BUSY


def late_process(job: Job, ready: Ready, cell: Any, when: str) -> None:
    """The last process sleeps before its first call; the others wait for it in theirs."""
    tokens = ranks.loads(cell, job.num_ranks)["random"]
    arguments = ready.world.place(tokens), ready.weights[0]
    run = jax.jit(ranks.outside(cell, ready.world, job.how))
    if when == "with everything compiled":
        run = run.lower(*arguments).compile()
    for turn in TURNS:
        with jobs.check(f"{cell}: a process late {when}, {turn} launch") as remarks:
            start = time.perf_counter()
            if job.process == job.num_ranks - 1:
                time.sleep(SECONDS_LATE)
            y, _ = jax.block_until_ready(run(*arguments))
            remarks.append(f"done after {time.perf_counter() - start:.1f} s")
            ranks.assert_same(y, ready.expected[str(cell)]["random"], job.how, job.recipe)
        call_often(run, arguments)


def call_often(run: Any, arguments: Any) -> None:
    """Calls enough for XLA to have captured the launch: it runs the first ones as they are."""
    for _ in range(NUM_WARM):
        jax.block_until_ready(run(*arguments))


def leave(job: Job, ready: Ready) -> None:
    """Counts launches in CUDA graphs, and frees the buffers once every process is done."""

    if job.how == "deep_gemm":
        with jobs.check(f"CUDA graphs {job.graphs}") as remarks:
            counted = graph_capture.launches()
            remarks.append(f"{counted.captured} launches captured, {counted.direct} direct")
            assert (counted.captured > 0) == (job.graphs == "on"), str(counted)
    with jobs.check("buffers freed"):
        symmetric_memory.meet("end", symmetric_memory.groups_of(ready.world.mesh, "ep"))
        jax.clear_caches()
        gc.collect()
        symmetric_memory.close()
        symmetric_memory.meet("closed", symmetric_memory.groups_of(ready.world.mesh, "ep"))


TASKS = {each.__name__: each for each in (compile_kernels, one_device, equal, late)}


def all_jobs(job: Job) -> dict[str, Job]:
    """The jobs on all ranks by name, the ones that tell most first."""
    found = {}
    for task in ("equal", "late"):
        for graphs in ("on", "off"):
            for process in (None, 0):
                where = "one process" if process is None else f"{job.num_ranks} processes"
                each = replace(job, task=task, graphs=graphs, process=process)
                found[f"{task}, {where}, graphs {graphs}"] = each
    return found


def start_job(name: str, job: Job, gpus: list[str], tally: jobs.Tally, timeout: float) -> None:
    """Runs a job in one process, or in one on each GPU if it has a process index."""
    environment: dict[str, str] = {}
    if job.graphs and job.how == "deep_gemm":
        environment = graph_capture.environment(
            job.graphs, Path(job.folder, "liblaunch_counter.so")
        )
    environment |= {"XLA_CLIENT_MEM_FRACTION": MEMORY_FRACTION, "NCCL_NVLS_ENABLE": "0"}
    if job.process is None:
        members = [job]
        environments = [{"CUDA_VISIBLE_DEVICES": ",".join(gpus)}]
        if job.how != "deep_gemm":
            environments[0]["JAX_NUM_CPU_DEVICES"] = str(job.num_ranks)
    else:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
        members = [replace(job, process=index, port=port) for index in range(job.num_ranks)]
        environments = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus]
    commands = [
        [sys.executable, __file__, "--job", json.dumps(asdict(each)), "--timeout", str(timeout)]
        for each in members
    ]
    environments = [environment | each for each in environments]
    jobs.run(name, commands, environments, tally, timeout)


def main() -> None:
    """Runs all jobs, those that the others need first."""
    parser = argparse.ArgumentParser(description="Expert parallelism over the GPUs of a host.")
    parser.add_argument("--ranks", type=int, default=0, help="GPUs to use; all by default")
    parser.add_argument("--only", default="", help="jobs whose name has this, as 'graphs on'")
    parser.add_argument("--quick", action="store_true", help="fewer calls")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--implementation", default="deep_gemm")
    parser.add_argument("--recipe", default="fp8_block")
    parser.add_argument("--timeout", type=float, default=60, help="seconds a job may take")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        faulthandler.dump_traceback_later(options.timeout - 5, exit=False)
        job = Job(**json.loads(options.job))
        TASKS[job.task](job)
        return
    gpus = jobs.visible_gpus()
    num_ranks = options.ranks or len(gpus)
    on_gpu = options.implementation == "deep_gemm"
    if num_ranks < 2 or (on_gpu and num_ranks > len(gpus)):
        raise SystemExit(f"needs 2 GPUs or more, {options.ranks or 'all'} asked of {len(gpus)}")
    gpus = gpus[:num_ranks] if on_gpu else [""] * num_ranks
    tally = jobs.Tally()
    with tempfile.TemporaryDirectory() as folder:
        small, quick = options.small, options.quick
        how = options.implementation
        job = Job("", num_ranks, folder, how, small, quick, recipe=options.recipe)
        if on_gpu:
            graph_capture.build(Path(folder))
            start_job("kernels", replace(job, task="compile_kernels"), gpus, tally, options.timeout)
        one = replace(job, task="one_device")
        start_job("one GPU", one, gpus, tally, COMPILES_REFERENCE * options.timeout)
        if not all(
            Path(folder, results_of(cell)).exists() for cell in ranks.cells(small, options.recipe)
        ):
            jobs.finish(tally)
        for name, each in all_jobs(job).items():
            if options.only in name:
                start_job(name, each, gpus, tally, options.timeout)
    jobs.finish(tally)


if __name__ == "__main__":
    main()
