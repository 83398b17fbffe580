"""What two processes on two GPUs do when something goes wrong in one of them.

    PYTHONPATH=.:tests:tests/gpu:benchmarks/gpu python tests/gpu/check_faults.py [CASE ...]

Cases, all by default, under three minutes together:

- ``differ``: their configs differ; both are refused at once, with both values.
- ``raise``: one raises in Python and lives on; the other waits inside its kernel until this script
  ends it. JAX_MEGAMOE_KERNEL_TIMEOUT is set, but on Hopper the wait for the peers' token counts has
  no limit (docs/multi-process.md; found on two H200). If a kernel ends, mend what is said there.
- ``kill``: one is killed; the other ends by JAX's heartbeat, here 10 s.

Writes $OUT/check_faults.json, with the seconds from the fault to the other's end.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import workload
from checks import OUT, Checks
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_megamoe as mm

SCRIPT = "check_faults"
LIMIT_SECONDS = 10
"""Of the kernels in `raise`, of the heartbeat in `kill`."""

START_SECONDS = 90
"""Until the fault: two processes start, and compile a kernel."""

END_SECONDS = 45
"""From the fault until the other process ends, at most; in `raise`, how long it is watched."""

FAULT_STEP = 20
ENVIRONMENTS: dict[str, dict[str, str]] = {
    "differ": {},
    "raise": {"JAX_MEGAMOE_KERNEL_TIMEOUT": str(LIMIT_SECONDS)},
    "kill": {},
}


def run_process(case: str, rank: int, port: int) -> None:
    """One process of a case: calls the layer until something ends it. Prints what it does."""
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        2,
        rank,
        local_device_ids=[rank],
        heartbeat_timeout_seconds=LIMIT_SECONDS if case == "kill" else 100,
    )
    mesh = Mesh(np.array(jax.devices()), ("ep",))
    rows = NamedSharding(mesh, P("ep"))
    config = workload.EXPERT_PARALLEL

    def split(array: Any) -> jax.Array:
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, rows, lambda index: host[index])

    weights = jax.tree.map(split, workload.weights(config))
    tokens = [split(array) for array in workload.tokens(config, 64)]
    print(f"ready {time.time():.2f}", flush=True)
    if case == "differ":
        config = replace(config, max_num_tokens=config.max_num_tokens * (1 + rank))
    call = jax.jit(
        lambda *arrays: mm.mega_moe(
            *arrays, config=config, mesh=mesh, axis="ep", implementation="deep_gemm"
        )
    )
    step = 0
    while True:
        try:
            jax.block_until_ready(call(*tokens, weights))
        except Exception as error:
            print(f"{type(error).__name__}: {error} at {time.time():.2f}", flush=True)
            os._exit(3)
        step += 1
        print(f"step {step}", flush=True)
        if case == "raise" and rank == 1 and step == FAULT_STEP:
            print(f"fault {time.time():.2f}", flush=True)
            time.sleep(START_SECONDS + END_SECONDS)  # lives on without calling, as in a shutdown


def wait_for(what: Any, seconds: float) -> bool:
    """Whether `what()` becomes true in time."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def after(word: str, log: str) -> float:
    """The time that a line of a log names after a word; 0 if there is none."""
    found = [line for line in log.splitlines() if word in line]
    return float(found[-1].split()[-1]) if found else 0.0


def run_case(case: str, checks: Checks, folder: Path) -> dict[str, Any]:
    """Runs both processes of a case and checks how they end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    logs = [folder / f"{case}_{rank}.log" for rank in range(2)]
    environment = os.environ | ENVIRONMENTS[case] | {"XLA_CLIENT_MEM_FRACTION": "0.3"}
    command = [sys.executable, "-u", __file__, "--process", case]
    processes = [
        subprocess.Popen(
            [*command, str(rank), port],
            env=environment,
            stdout=logs[rank].open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        seconds = watch(case, processes, logs, checks)
    finally:
        for process in processes:
            process.kill()
    for process in processes:
        process.wait(30)
    tails = [log.read_text()[-1500:] for log in logs]
    return {"case": case, "seconds": seconds, "logs": tails}


def watch(
    case: str, processes: list[subprocess.Popen[bytes]], logs: list[Path], checks: Checks
) -> float:
    """Brings the fault about and returns the seconds until the process without it ended."""
    first = processes[0]
    if case == "differ":
        ended = wait_for(lambda: all(each.poll() is not None for each in processes), START_SECONDS)
        checks.check(ended, "differ: both end", str([each.poll() for each in processes]))
        texts = [log.read_text() for log in logs]
        sizes = [workload.EXPERT_PARALLEL.max_num_tokens * (1 + rank) for rank in range(2)]
        for rank, text in enumerate(texts):
            expected = (
                f"max_num_tokens: expected the same value in every process, got {sizes[0]} in "
                f"process 0 (groups[0][0]), {sizes[1]} in process 1"
            )
            checks.check(expected in text, f"differ: rank {rank} names both values")
        both_ready = max(after("ready", text) for text in texts)
        seconds = max(after("ValueError", text) for text in texts) - both_ready
        # Tracing the layer is part of it.
        checks.check(0 <= seconds < 10, "differ: refused at once", f"{seconds:.2f} s")
        return seconds
    reached = wait_for(
        lambda: f"step {FAULT_STEP}\n" in logs[1].read_text() or first.poll() is not None,
        START_SECONDS,
    )
    checks.check(reached and first.poll() is None, f"{case}: both call the layer")
    if case == "kill":
        processes[1].send_signal(signal.SIGKILL)
    start = time.monotonic()
    ended = wait_for(lambda: first.poll() is not None, END_SECONDS)
    seconds = time.monotonic() - start
    detail = f"{seconds:.1f} s, status {first.poll()}"
    if case == "raise":
        checks.check(not ended, "raise: the other still waits", detail)
    else:
        checks.check(ended, f"{case}: the other ends", detail)
    return seconds


def main() -> None:
    """Runs the cases that are named."""
    if sys.argv[1:2] == ["--process"]:
        run_process(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    parser = argparse.ArgumentParser(description="Faults of one of two processes.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(ENVIRONMENTS)}")
    named = parser.parse_args().cases
    checks = Checks(SCRIPT)
    cases = [run_case(case, checks, OUT) for case in named or ENVIRONMENTS]
    checks.finish(cases=cases)


if __name__ == "__main__":
    main()
