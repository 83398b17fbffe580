"""Two processes of four CPU devices each run one layer over eight ranks, with jax.distributed.

Started without arguments, this makes a checkpoint file, starts the two processes, runs the same
layer over eight devices of its own and compares. Each process reads its half of the experts alone.
"""

import faulthandler
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_megamoe as mm
from jax_megamoe.cli.demo.checkpoint import EXPERTS, write_checkpoint

PROCESSES, DEVICES = 2, 8
SECONDS = 100  # a process that hangs ends itself after so many
TOLERANCE = 5e-4  # relative; where matmuls sum in another order, roundings after them may tip

config = mm.MoEConfig(
    num_experts=32,
    top_k=4,
    hidden_size=256,
    intermediate_size=256,
    max_num_tokens=16,
    weight_format=mm.MXFP8,
)


def run_layer(checkpoint: Path) -> tuple[np.ndarray, int]:
    """The rows of the output that this process's devices hold, and the bytes read to load.

    One program for any number of processes, all of which make each call. Every process makes all
    tokens from the same seed and hands those of its devices to them.
    """
    mesh = Mesh(np.array(jax.devices()), ("ep",))
    read = bytes_read()
    weights = mm.load_experts(
        config, checkpoint, prefix=EXPERTS, mesh=mesh, axis="ep", progress=False
    )
    read = bytes_read() - read
    layer = mm.MegaMoE(config, weights, mesh=mesh, axis="ep")

    rng = np.random.default_rng(0)
    num_tokens = DEVICES * config.max_num_tokens
    x = rng.standard_normal((num_tokens, config.hidden_size), np.float32)
    scores = np.exp(rng.standard_normal((num_tokens, config.num_experts), np.float32))
    topk_ids = np.argsort(-scores)[:, : config.top_k].astype(np.int32)
    topk_weights = np.take_along_axis(scores, topk_ids, 1) / scores.sum(1, keepdims=True)
    tokens = (x.astype(ml_dtypes.bfloat16), topk_ids, topk_weights)
    y = layer(*jax.device_put(tokens, NamedSharding(mesh, P("ep"))))
    shards = sorted(y.addressable_shards, key=lambda shard: shard.index[0].start)
    return np.concatenate([np.asarray(shard.data, np.float32) for shard in shards]), read


def bytes_read() -> int:
    """Bytes that this process has read so far, Python modules too; 0 on systems that do not say."""
    counters = Path("/proc/self/io")
    return int(counters.read_text().split()[1]) if counters.exists() else 0


def run_process(process: int, address: str, checkpoint: Path) -> None:
    """One of the two: meets the other at `address`, leaves its rows beside the checkpoint."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    jax.config.update("jax_num_cpu_devices", DEVICES // PROCESSES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, PROCESSES, process)
    y, read = run_layer(checkpoint)
    np.savez(checkpoint.with_name(f"{process}.npz"), y=y, read=read)


def start_processes(checkpoint: Path) -> None:
    """Runs all of them to their end; leaves none behind, whatever happens."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    with ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(PROCESSES)]
        running = [
            subprocess.Popen(
                [sys.executable, __file__, str(process), address, str(checkpoint)],
                stdout=log,
                stderr=log,
                env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
            )
            for process, log in enumerate(logs)
        ]
        try:
            # Where one fails, the others would wait for it.
            while (codes := {each.poll() for each in running}) <= {0, None} and None in codes:
                time.sleep(0.05)
        finally:
            for each in running:
                each.kill()
                each.wait()
        if any(each.returncode for each in running):
            printed = [log.read() for log in logs if log.seek(0) == 0]
            raise SystemExit("\n".join(printed))


def main() -> None:
    """Both processes, and the same layer in this one; exits non-zero where they differ."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    with tempfile.TemporaryDirectory() as folder:
        size = write_checkpoint(Path(folder), config, seed=0, shards=1)
        (checkpoint,) = Path(folder).glob("*.safetensors")
        start_processes(checkpoint)
        parts = [np.load(checkpoint.with_name(f"{process}.npz")) for process in range(PROCESSES)]
        want, _ = run_layer(checkpoint)
        for process, part in enumerate(parts):
            print(
                f"process {process}: {len(part['y'])} tokens, read {part['read'] / 1e6:.1f} of the "
                f"checkpoint's {size / 1e6:.1f} MB"
            )
        got = np.concatenate([part["y"] for part in parts])
    error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    same = "bit for bit" if np.array_equal(got, want) else f"to {error:.1e}"
    print(f"{PROCESSES} processes agree {same} with one of {DEVICES} devices: {got.shape}")
    if not error <= TOLERANCE:
        raise SystemExit(f"expected a relative error of at most {TOLERANCE}")
    if any(part["read"] > 0.6 * size for part in parts):
        raise SystemExit("expected each process to read its half of the experts alone")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        try:
            run_process(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # the usual way out waits for the other process
