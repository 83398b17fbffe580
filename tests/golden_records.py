"""The recorded arrays under tests/golden, bitwise comparison, and a count of what was compared."""

import collections
import functools
from pathlib import Path

import ml_dtypes
import numpy as np

FOLDER = Path(__file__).parent / "golden"

_compared: collections.Counter[str] = collections.Counter()


def compared(name: str) -> None:
    """Counts one recorded value as compared; `name` says which file it stands in."""
    _compared[name] += 1


def counts() -> dict[str, int]:
    """How many records were compared, by file."""
    return dict(_compared)


def add(more: dict[str, int]) -> None:
    """Adds the counts of another process."""
    _compared.update(more)


def summary() -> list[str]:
    """One line a file: how many of its records were compared."""
    return [f"golden {name}: {count} records compared" for name, count in sorted(_compared.items())]


@functools.cache
def arrays(file: str) -> dict[str, np.ndarray]:
    """Every array of tests/golden/{file}.npz, by name."""
    with np.load(FOLDER / f"{file}.npz") as stored:
        return {name: stored[name] for name in stored.files}


def bfloat16(file: str, name: str) -> np.ndarray:
    """A BF16 array that is stored as its bits."""
    return arrays(file)[name].view(ml_dtypes.bfloat16)


def bits(array: object) -> np.ndarray:
    """The array's bits as unsigned integers of its element size."""
    host = np.asarray(array)
    return np.ascontiguousarray(host).view(f"u{host.dtype.itemsize}").reshape(host.shape)


def assert_same(got: object, want: object, where: str = "") -> None:
    """Asserts equal shapes and bits; the message has the first difference."""
    left, right = bits(got), bits(want)
    assert left.shape == right.shape, f"{where}: shape {left.shape}, expected {right.shape}"
    different = np.argwhere(left != right)
    if len(different):
        first = tuple(different[0].tolist())
        raise AssertionError(
            f"{where}: {len(different)} of {left.size} differ, first at {first}: "
            f"{left[first]:#x}, expected {right[first]:#x}"
        )


def assert_recorded(file: str, name: str, got: object) -> None:
    """Asserts that `got` has the recorded array's bits, and counts it."""
    assert_same(got, arrays(file)[name], f"{file}.npz {name}")
    compared(f"{file}.npz")
