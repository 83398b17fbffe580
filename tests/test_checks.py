"""_checks.py: the texts of errors."""

import numpy as np
import pytest

from jax_megamoe import _checks


def test_message() -> None:
    assert _checks.message("x", "a", 3) == "x: expected a, got 3"
    assert _checks.message("x", "a", 3, "do b") == "x: expected a, got 3; do b"


def test_message_is_short() -> None:
    """However long a name or a value from a file is."""
    long = "n" * 10_000_000
    text = _checks.message(long, long, long, "do b")
    assert len(text) < 6200
    assert text.endswith("n... (10000000 characters); do b")


def test_integer() -> None:
    value = _checks.integer("n", np.int64(3), minimum=3)
    assert value == 3 and type(value) is int
    assert _checks.integer("n", 0) == 0
    with pytest.raises(TypeError, match=r"^n: expected an integer, got 3.0 \(float\); hint$"):
        _checks.integer("n", 3.0, hint="hint")
    with pytest.raises(TypeError, match=r"^n: expected an integer, got True \(bool\)$"):
        _checks.integer("n", True)
    with pytest.raises(ValueError, match=r"^n: expected an integer >= 1, got 0; hint$"):
        _checks.integer("n", 0, minimum=1, hint="hint")


def test_finite() -> None:
    value = _checks.finite("a", 3)
    assert value == 3.0 and type(value) is float
    with pytest.raises(ValueError, match=r"^a: expected a finite number, got inf$"):
        _checks.finite("a", float("inf"))
    with pytest.raises(TypeError, match=r"^a: expected a number, got None \(NoneType\)$"):
        _checks.finite("a", None)
    with pytest.raises(TypeError, match=r"^a: expected a number, got False \(bool\)$"):
        _checks.finite("a", False)


def test_one_of() -> None:
    _checks.one_of("c", "a", ("a", "b"))
    with pytest.raises(ValueError, match=r"^c: expected one of \['a', 'b'\], got 'd'; hint$"):
        _checks.one_of("c", "d", ("a", "b"), "hint")


def test_multiple() -> None:
    for value in (0, 128, 256):
        _checks.multiple("n", value, 128)
    for value in (127, 129):
        with pytest.raises(ValueError, match=rf"^n: expected a multiple of 128, got {value}; h$"):
            _checks.multiple("n", value, 128, "h")


def test_at_most() -> None:
    _checks.at_most("n", 64, 64, "limit")
    with pytest.raises(ValueError, match=r"^n: expected at most limit = 64, got 65; h$"):
        _checks.at_most("n", 65, 64, "limit", "h")


def test_shape() -> None:
    array = np.zeros((3, 4))
    _checks.shape("x", array, (3, 4))
    _checks.shape("x", array, ("rows", 4))
    with pytest.raises(ValueError, match=r"^x: expected shape \[rows, 5\], got shape \[3, 4\]; h$"):
        _checks.shape("x", array, ("rows", 5), "h")
    with pytest.raises(ValueError, match=r"^x: expected shape \[rows\], got shape \[3, 4\]$"):
        _checks.shape("x", array, ("rows",))
    with pytest.raises(TypeError, match=r"^x: expected an array of shape \[rows\], got list$"):
        _checks.shape("x", [1, 2], ("rows",))


def test_dtype() -> None:
    array = np.zeros(3, np.float64)
    _checks.dtype("x", array, ["float32", "float64"])
    with pytest.raises(TypeError, match=r"^x: expected dtype float32, got float64; h$"):
        _checks.dtype("x", array, ["float32"], "h")
    message = r"^x: expected one of the dtypes \['int8', 'int32'\], got float64$"
    with pytest.raises(TypeError, match=message):
        _checks.dtype("x", array, ["int8", "int32"])
    with pytest.raises(TypeError, match=r"^x: expected dtype float32, got list$"):
        _checks.dtype("x", [1.0], ["float32"])
