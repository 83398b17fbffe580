"""mega_moe through jit, shard_map, the compiled module and a libcuda that the emulator carries out.

In a process of its own, as the CUDA driver is chosen once a process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tolerances

from emulator.fixtures import needs

HERE = Path(__file__).parent
LAUNCHES = {  # of the staging kernel and the fused one; those of all ranks run as one
    "mxfp8": 2,
    "mxfp4 over 2 ranks": 3,
    "mxfp4 over 4 ranks": 5,
    "mxfp4 over 8 ranks": 9,
    "fp8_block over 2 ranks": 3,
    "two layers over 2 ranks": 12,  # and each alone
    "a scan of three layers": 12,
    "reuse after an idle call": 9,
    "bf16 in slots": 6,
    "bf16 of 1,040 rows": 7,  # two blocks sort them
}


@pytest.fixture(scope="module")
def records() -> dict[str, dict[str, float]]:
    needs("sgl")
    root = HERE.parents[1]
    path = os.pathsep.join(map(str, (root, root / "tests", root / "tests" / "plan")))
    done = subprocess.run(
        [sys.executable, str(HERE / "end_to_end.py")],
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {record["case"]: record for record in found}


@pytest.mark.parametrize("name", LAUNCHES)
def test_call_reaches_the_kernels_and_comes_back(records, name):
    record = records[name]
    form = next((form for form in ("fp8_block", "bf16") if name.startswith(form)), "mxfp4")
    table = tolerances.KERNEL_AGREEMENT if form == "fp8_block" else tolerances.EMULATED
    assert record["error"] <= table[form].norm
    assert record["launches"] == LAUNCHES[name]
