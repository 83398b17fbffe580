"""The emulator against an H200: each instruction of the conformance set, bit for bit.

`tests/gpu/record_conformance.py` made the record. Approximations are held to the error that the
PTX ISA states for them.
"""

import functools
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from emulator import machine
from emulator.conformance import cases, compiled
from emulator.conformance.cases import Case

RECORD = Path(__file__).parents[1] / "golden" / "conformance.npz"
CASES = {case.name: case for case in cases.cases()}


@functools.cache
def record() -> dict[str, np.ndarray]:
    with np.load(RECORD) as arrays:
        return dict(arrays)


def emulated(case: Case) -> np.ndarray:
    """The recorded argument of a case as the emulator leaves it."""
    arrays = machine.run(
        compiled.ptx(case.file),
        case.arguments,
        grid=case.grid,
        block=case.block,
        cluster=case.cluster,
        smem=case.shared_bytes,
        kernel=case.kernel,
        settings=case.settings,
    )
    (index,) = case.results
    return arrays[index]


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Units in the last place between float32 values; 0 where both are NaN."""
    ordered = [
        np.where(bits >> 31, -(bits & 0x7FFFFFFF).astype(np.int64), bits.astype(np.int64))
        for bits in (got, want)
    ]
    both_nan = np.isnan(got.view("f4")) & np.isnan(want.view("f4"))
    return np.where(both_nan, 0, np.abs(ordered[0] - ordered[1]))


def differs(kind: str, got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Where a row is not what the H200 gave, by the kind of the row."""
    if kind.startswith("ulp"):
        return ulps(got, want) > int(kind[3:])
    if kind in APPROXIMATE:
        values = got.view("f4").astype("f8"), want.view("f4").astype("f8")
        close = np.isclose(*values, **APPROXIMATE[kind], equal_nan=True)
        return ~close
    narrow = {"f32": np.float32, "f16x2": np.float16, "bf16x2": ml_dtypes.bfloat16}
    if kind not in narrow:
        return got != want
    values = got.view(narrow[kind]), want.view(narrow[kind])
    nan = np.isnan(values[0]) & np.isnan(values[1])
    bits = f"u{values[0].itemsize}"
    wrong = (values[0].view(bits) != values[1].view(bits)) & ~nan
    return wrong.reshape(len(got), -1).any(axis=1)


APPROXIMATE = {
    "lg2": {"rtol": 2**-22, "atol": 2**-22},
    "tanh": {"rtol": 2**-10.9, "atol": 0.0},
}
"""What the ISA states for lg2.approx (outside and inside [0.5, 2]) and for tanh.approx."""


@pytest.mark.parametrize("name", CASES)
def test_as_an_h200(name: str) -> None:
    case = CASES[name]
    got, want = emulated(case), record()[name]
    if not case.rows:
        wrong = differs(case.kind, got.reshape(-1), want.reshape(-1))
        assert not wrong.any(), f"{wrong.sum()} of {wrong.size}, first at {np.argmax(wrong)}"
        return
    for row, mine, theirs in zip(case.rows, got, want, strict=False):
        wrong = differs(row.kind, mine, theirs)
        at = int(np.argmax(wrong))
        message = f"{row.name}: {wrong.sum()} differ, first {mine[at]:#x}, H200 {theirs[at]:#x}"
        assert not wrong.any(), message


def test_every_case_is_recorded() -> None:
    assert sorted(record()) == sorted(CASES)
