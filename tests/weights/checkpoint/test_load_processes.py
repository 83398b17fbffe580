"""Two processes load one checkpoint: each reads its own half, and together they hold all of it."""

import hashlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import checkpoint_files as files
import numpy as np
from checkpoint_files import PREFIX

from jax_megamoe.weights.checkpoint.load import load_experts

E, H, INTER = 8, 128, 128


def test_each_process_reads_its_own(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors = files.per_expert(files.mxfp4(rng, E, H, INTER))
    folder = files.write_folder(tmp_path / "m", tensors)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    script = Path(__file__).with_name("load_process.py")
    environment = os.environ | dict(
        PYTHONPATH=str(Path(__file__).parents[3]), JAX_PLATFORMS="cpu", XLA_FLAGS=""
    )
    arguments = [folder, PREFIX, *map(str, (E, H, INTER))]
    running = [
        subprocess.Popen(
            [sys.executable, script, str(process), address, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for process in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], outputs
    # Gloo writes to standard output too: the result is its last line.
    read, held = zip(*(out.splitlines()[-1].split() for out, _ in outputs), strict=True)
    total = sum(array.nbytes for array in tensors.values())
    assert list(map(int, read)) == [total // 2] * 2
    config = files.make_config("mxfp4", E, H, INTER)
    whole = load_experts(config, folder, prefix=PREFIX, progress=False)
    halves = np.split(np.asarray(whole.routed.w2_weight), 2)
    assert list(held) == [hashlib.sha256(half.tobytes()).hexdigest() for half in halves]
