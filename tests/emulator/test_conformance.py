"""The emulator against an H200: each instruction of the conformance set, bit for bit.

`tests/gpu/record_conformance.py` made the record. Approximations are held to the error that the
PTX ISA states for them.
"""

from pathlib import Path

import numpy as np
import pytest
from emulator import machine
from emulator.conformance import cases
from emulator.conformance.cases import Case

RECORD = Path(__file__).parents[1] / "golden" / "conformance.npz"
CASES = {case.name: case for case in cases.cases()}


@pytest.fixture(scope="module")
def record() -> dict[str, np.ndarray]:
    with np.load(RECORD) as arrays:
        return dict(arrays)
