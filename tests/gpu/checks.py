"""Counted checks of a script, its results as JSON, and comparisons of outputs."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import tolerances

OUT = Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="jax_megamoe_gpu_"))
"""Where scripts leave their results: $OUT."""


class Distance(NamedTuple):
    """How far an output is from the expected one.

    Attributes:
        norm: Euclidean norm of the difference over that of the expected output.
        token: the same of the worst row.
        gain: slope of the output against the expected one; NaN for zeros.
    """

    norm: float
    token: float
    gain: float


def distance(got: Any, want: Any) -> Distance:
    """Distance between two outputs [T, H], T >= 1."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        off, size = np.linalg.norm(got - want, axis=1), np.linalg.norm(want, axis=1)
        by_token = np.where(off == 0, 0, off / size)
        whole = np.linalg.norm(off) / np.linalg.norm(size) if off.any() else 0.0
        gain = np.vdot(got, want) / np.vdot(want, want)
    return Distance(float(whole), float(by_token.max()), float(gain))


def bits(array: Any) -> np.ndarray:
    """BF16 values as uint16; uint16 stays."""
    host = np.asarray(array)
    return host if host.dtype == np.uint16 else host.view(np.uint16)


class Checks:
    """The checks of one script. Each prints a line; `finish` ends the process."""

    def __init__(self, script: str) -> None:
        self.script = script
        self.done: list[dict[str, Any]] = []
        self._start = time.monotonic()

    def check(self, passed: Any, what: str, detail: str = "") -> None:
        """Counts one check."""
        self.done.append({"what": what, "passed": bool(passed), "detail": detail})
        mark = "ok    " if passed else "FAILED"
        seconds = time.monotonic() - self._start
        print(f"{seconds:6.1f} s  {mark}  {what}{': ' if detail else ''}{detail}", flush=True)

    def same_bits(self, got: Any, want: Any, what: str) -> None:
        """Checks that two BF16 outputs are equal bit for bit and hold no NaN."""
        left, right = bits(got), bits(want)
        if left.shape != right.shape:
            self.check(False, what, f"shape {left.shape}, expected {right.shape}")
            return
        different = np.argwhere(left != right)
        detail = "bit-equal"
        if len(different):
            first = tuple(different[0].tolist())
            rows = len(np.unique(different[:, 0]))
            detail = (
                f"{len(different)} of {left.size} differ, in {rows} rows, first at {first}: "
                f"{left[first]:#06x}, expected {right[first]:#06x}"
            )
        has_nan = bool(((right & 0x7FFF) > 0x7F80).any())
        self.check(not len(different) and not has_nan, what, detail + " with NaN" * has_nan)

    def agree(self, got: Any, want: Any, what: str, limit: tolerances.Agreement) -> None:
        """Checks a kernel's output against `reference`."""
        found = distance(got, want)
        near = found.norm <= limit.norm and found.token <= limit.token
        straight = abs(found.gain - 1) <= tolerances.GAIN
        detail = f"error {found.norm:.4f}, worst token {found.token:.4f}, gain {found.gain:.4f}"
        self.check(near and straight, what, detail)

    def finish(self, **more: Any) -> NoReturn:
        """Writes $OUT/<script>.json, prints the count, and exits: 1 where a check failed."""
        failed = [each["what"] for each in self.done if not each["passed"]]
        result = {"command": " ".join(sys.argv), "checks": self.done, **more}
        (OUT / f"{self.script}.json").write_text(json.dumps(result, indent=1))
        for what in failed:
            print(f"FAILED: {what}")
        print(f"{len(self.done) - len(failed)} checks passed", flush=True)
        sys.exit(1 if failed or not self.done else 0)
