"""The scripts that need a GPU, run in processes of their own where there is one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jax_megamoe.compile import has_source

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT, ROOT / "tests", ROOT / "tests/gpu", ROOT / "benchmarks/gpu")
NEEDED_GPUS = {
    "benchmarks/gpu/bare_launch.py --quick": 1,
    "tests/gpu/check_sm90.py --quick": 1,
    "tests/gpu/check_quantization.py": 1,
    "tests/gpu/check_model.py": 1,
    "tests/gpu/ranks_on_one_gpu.py --quick": 1,
    "tests/gpu/two_processes.py --quick": 1,
    "tests/gpu/check_staging.py --quick": 1,
    "tests/gpu/check_symmetric_memory.py": 1,
    "tests/gpu/check_expert_parallel.py --quick": 2,
    "tests/gpu/check_faults.py": 2,
    "tests/gpu/check_flashinfer.py --quick": 1,
    "tests/gpu/check_grouped.py --quick": 1,
    "tests/gpu/check_pallas.py --quick": 1,
}
"""How many GPUs of compute capability 9.0 each script needs."""

NEEDED_SOURCES = {"check_flashinfer": "flashinfer", "check_grouped": "humming"}
"""The kernel source that a script needs besides sgl's."""


def hopper_gpus() -> list[str]:
    """Names of the GPUs of compute capability 9.0; none where there is no driver."""
    query = ["nvidia-smi", "--query-gpu=compute_cap,name", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [line.partition(", ")[2] for line in listed.splitlines() if line.startswith("9.0")]


@pytest.mark.parametrize("command", NEEDED_GPUS)
def test_script(command: str, tmp_path: Path) -> None:
    gpus = hopper_gpus()
    if len(gpus) < NEEDED_GPUS[command]:
        pytest.skip(
            f"python {command}: needs {NEEDED_GPUS[command]} or more GPUs of compute capability "
            "9.0 (H100, H200), their driver, nvcc and the kernel source sgl-deep-gemm; "
            f"found {gpus}"
        )
    for name, source in NEEDED_SOURCES.items():
        if name in command and not has_source(source):
            pytest.skip(f"python {command}: python -m jax_megamoe sources fetch {source}")
    path = os.pathsep.join(map(str, FOLDERS))
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    environment |= {"PYTHONPATH": path, "OUT": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
