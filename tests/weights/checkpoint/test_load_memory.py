"""Peak host memory of loading: parameters, one expert and a constant, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import checkpoint_files as files
import numpy as np
import pytest

E, H, INTER = 64, 2048, 1024
CONSTANT = 32 << 20
"""Bytes: what two threads leave in malloc's arenas, and XLA's own."""


@pytest.mark.parametrize(
    "source, form", [("fp8_block", "mxfp8"), ("floats", "bf16"), ("mxfp4", "mxfp4")]
)
def test_peak_is_parameters_and_one_expert(
    tmp_path: Path, rng: np.random.Generator, source: str, form: str
) -> None:
    one = getattr(files, source)(rng, 1, H, INTER)
    files.write_file(tmp_path / "warm-up", files.per_expert(one, prefix="experts"))
    many = {part: each._replace(**_repeated(each)) for part, each in one.items()}
    path = files.write_file(tmp_path / "whole", files.per_expert(many, prefix="experts"))
    root = Path(__file__).parents[3]
    script = Path(__file__).with_name("measure_load.py")
    done = subprocess.run(
        [sys.executable, script, path, *map(str, (E, H, INTER)), form],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | dict(PYTHONPATH=str(root), JAX_PLATFORMS="cpu"),
    )
    path.unlink()
    size, peak = map(int, done.stdout.split())
    expert = 3 * H * INTER * 4
    assert size > E * expert // 8
    assert peak <= size + expert + CONSTANT
    print(f"{source} to {form}: {size / 1e6:.0f} MB of parameters, peak {peak / 1e6:.0f} MB")


def _repeated(each: files.Stored) -> dict[str, np.ndarray | None]:
    """The first expert E times, without a copy."""
    return {
        kind: None if array is None else np.broadcast_to(array[0], (E, *array.shape[1:]))
        for kind, array in each._asdict().items()
        if kind != "values"
    }
