"""Two JAX processes on one H200 under jax.distributed, a rank each: bit-equal to one rank.

    PYTHONPATH=.:tests:tests/gpu:benchmarks/gpu python tests/gpu/two_processes.py [--quick]

`mega_moe` runs over a mesh of both processes, its symmetric buffers exchanged by file descriptor.
The processes' kernels take turns on the GPU while they wait for each other, so a call takes
milliseconds. With ``--implementation xla`` the script runs without a GPU.
"""

import argparse
import faulthandler
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.3")  # two pools on one GPU

import jax
import numpy as np
import workload
from checks import OUT, Checks
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_megamoe as mm
from jax_megamoe.compile import find_source
from jax_megamoe.plan import plan_mega_moe

SCRIPT = "two_processes"
CFG = workload.EXPERT_PARALLEL
TOKENS = (64, 512)
RANKS = 2
REPEATS = 20
SECONDS = 200
SECONDS_AFTER_FAILURE = 5


def split(tree: Any, mesh: Mesh) -> Any:
    """Arrays that every process has whole, split over the ranks along their first dimension."""
    sharding = NamedSharding(mesh, P("ep"))

    def one(array: jax.Array) -> jax.Array:
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(one, tree)


def ways(mesh: Mesh, implementation: str) -> dict[str, Callable[..., Any]]:
    """f(x, ids, factors, weights, mask) over a mesh, by who opens `shard_map`."""

    def call(x: Any, ids: Any, factors: Any, weights: Any, mask: Any, **place: Any) -> Any:
        options = dict(config=CFG, axis="ep", implementation=implementation, return_stats=True)
        return mm.mega_moe(x, ids, factors, weights, padding_mask=mask, **place, **options)

    inside = jax.shard_map(call, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    return {
        "mega_moe(mesh=)": jax.jit(partial(call, mesh=mesh)),
        "mega_moe in shard_map": jax.jit(inside),
    }


def idle_second_rank(num_tokens: int) -> np.ndarray:
    """A padding mask: the second rank has no tokens, the first some."""
    row = np.arange(num_tokens)
    return row >= num_tokens // 2 - 3


def run_process(rank: int, port: int, counts: tuple[int, ...], implementation: str) -> None:
    """One process's checks of its own rows; writes <script>_<rank>.json."""
    jax.distributed.initialize(f"127.0.0.1:{port}", RANKS, rank, local_device_ids=[0])
    checks = Checks(f"{SCRIPT}_{rank}")
    mesh = Mesh(np.array(jax.devices()), ("ep",))
    checks.check(jax.device_count() == RANKS, f"process {rank}", f"{jax.devices()}")
    params = workload.weights(CFG)
    everywhere = split(params, mesh)
    alone = jax.jit(partial(mm.mega_moe, config=CFG, implementation=implementation))
    if implementation == "deep_gemm":
        mm.allocate_buffers(CFG, mesh=mesh, axis="ep")
    for num_tokens in counts:
        tokens = workload.tokens(CFG, num_tokens)
        placed = split(tokens, mesh)
        for load, mask in (
            ("every row", np.zeros(num_tokens, bool)),
            ("padding", idle_second_rank(num_tokens)),
        ):
            want = np.asarray(alone(*tokens, params, padding_mask=mask))
            ids = np.asarray(tokens[1])[~mask]
            counted = np.bincount(ids.reshape(-1), minlength=CFG.num_experts)
            for way, call in ways(mesh, implementation).items():
                name = f"process {rank}, {num_tokens} tokens, {load}, {way}"
                arguments = (*placed, everywhere, split(mask, mesh))
                y, stats = call(*arguments)
                (part,), (own,) = y.addressable_shards, stats.addressable_shards
                checks.same_bits(part.data, want[part.index], f"{name}, as one rank")
                same = np.array_equal(own.data, counted[own.index])
                checks.check(same, f"{name}, counts", f"{own.data.sum()}")
                start = time.perf_counter()
                for _ in range(REPEATS):
                    y, stats = call(*arguments)
                jax.block_until_ready(y)
                milliseconds = 1e3 * (time.perf_counter() - start) / REPEATS
                (part,) = y.addressable_shards
                what = f"{name}, call {REPEATS + 1}, {milliseconds:.2f} ms a call"
                checks.same_bits(part.data, want[part.index], what)
    checks.finish()


def wait(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Exit statuses. A process whose peer failed would wait for it in a kernel: it is killed."""
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            time.sleep(SECONDS_AFTER_FAILURE)
            for process in processes:
                process.kill()
        time.sleep(0.1)
    return [process.wait() for process in processes]


def main() -> None:
    """Starts both processes and adds up their checks."""
    parser = argparse.ArgumentParser(description="Two processes on one GPU.")
    parser.add_argument("--quick", action="store_true", help="one number of tokens")
    parser.add_argument("--implementation", default="deep_gemm")
    parser.add_argument("--process", nargs=2, type=int, help="rank and port: one process's part")
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    counts = TOKENS[:1] if arguments.quick else TOKENS
    if arguments.process:
        run_process(*arguments.process, counts, arguments.implementation)
    checks = Checks(SCRIPT)
    if arguments.implementation == "deep_gemm":
        plans = [
            plan_mega_moe(CFG, workload.H200, rows // ranks, ranks, "sgl")
            for ranks in (1, RANKS)
            for rows in counts
        ]
        checks.check(
            True, f"kernels of {find_source('sgl').version}", workload.compile_kernels(plans)
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, *sys.argv[1:], "--process"]
    results = [OUT / f"{SCRIPT}_{rank}.json" for rank in range(RANKS)]
    for path in results:
        path.unlink(missing_ok=True)
    environment = os.environ | {"OUT": str(OUT)}
    processes = [
        subprocess.Popen([*command, str(rank), str(port)], env=environment) for rank in range(RANKS)
    ]
    statuses = wait(processes)
    checks.check(not any(statuses), "processes", f"exit statuses {statuses}")
    for path in results:
        checks.check(path.exists(), path.name)
        if path.exists():
            checks.done += json.loads(path.read_text())["checks"]
    checks.finish()


if __name__ == "__main__":
    main()
