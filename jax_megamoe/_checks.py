"""The only builders of "expected ..., got ..." text, and the argument checks made of them.

Every message names the argument, what was expected and what was got, and where it helps a hint on
what to do.
Nothing here imports JAX: arrays are looked at through `shape` and `dtype` alone.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

_LONGEST = 2000
"""Characters of each part of a message; names and values from files have any length."""


def message(argument: str, expected: str, got: object, hint: str = "") -> str:
    """`argument: expected ..., got ...`, with an optional hint after it."""
    text = f"{_short(argument)}: expected {_short(expected)}, got {_short(str(got))}"
    return f"{text}; {hint}" if hint else text


def described(error: BaseException) -> str:
    """`Type: text` of an error that somebody else raised; the type alone where it has no text."""
    name, text = type(error).__name__, str(error)
    return f"{name}: {text}" if text else name


def _short(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}... ({len(text)} characters)"


def integer(argument: str, value: object, *, minimum: int = 0, hint: str = "") -> int:
    """`value` as an int of at least `minimum`.

    Raises:
        TypeError: for anything that is not an integer (a bool is none).
        ValueError: below `minimum`.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(
            message(argument, "an integer", f"{value!r} ({type(value).__name__})", hint)
        )
    number = value.__index__()
    if number < minimum:
        raise ValueError(message(argument, f"an integer >= {minimum}", number, hint))
    return number


def seed(value: object) -> int:
    """`value` as a seed of JAX's and NumPy's generators, an int from 0 to 2^32 - 1.

    Raises:
        TypeError: not an integer.
        ValueError: out of range.
    """
    number = integer("seed", value)
    at_most("seed", number, 2**32 - 1, "2^32 - 1")
    return number


def finite(argument: str, value: object) -> float:
    """`value` as a finite float.

    Raises:
        TypeError: not a real number.
        ValueError: NaN or infinite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(message(argument, "a number", f"{value!r} ({type(value).__name__})"))
    if not math.isfinite(value):
        raise ValueError(message(argument, "a finite number", value))
    return float(value)


def one_of(argument: str, value: object, choices: Iterable[object], hint: str = "") -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    listed = list(choices)
    if value not in listed:
        raise ValueError(message(argument, f"one of {listed}", repr(value), hint))


def multiple(argument: str, value: int, divisor: int, hint: str = "") -> None:
    """Raises ValueError unless `value` is a multiple of `divisor`."""
    if value % divisor:
        raise ValueError(message(argument, f"a multiple of {divisor}", value, hint))


def at_most(argument: str, value: int, limit: int, limit_name: str, hint: str = "") -> None:
    """Raises ValueError unless `value` <= `limit`, naming both."""
    if value > limit:
        raise ValueError(message(argument, f"at most {limit_name} = {limit}", value, hint))


def shape(argument: str, array: Any, expected: Sequence[int | str], hint: str = "") -> None:
    """Checks an array's shape; a string in `expected` stands for any size and names the axis.

    Raises:
        TypeError: `array` has no shape.
        ValueError: another rank or another size.
    """
    text = "shape [" + ", ".join(map(str, expected)) + "]"
    got = getattr(array, "shape", None)
    if got is None:
        raise TypeError(message(argument, f"an array of {text}", type(array).__name__, hint))
    fits = len(got) == len(expected) and all(
        isinstance(want, str) or want == size for want, size in zip(expected, got, strict=True)
    )
    if not fits:
        raise ValueError(message(argument, text, f"shape {list(got)}", hint))


def dtype(argument: str, array: Any, expected: Sequence[str], hint: str = "") -> None:
    """Raises TypeError unless the array's dtype is named in `expected`."""
    got = str(getattr(array, "dtype", type(array).__name__))
    if got not in expected:
        wanted = (
            f"dtype {expected[0]}" if len(expected) == 1 else f"one of the dtypes {list(expected)}"
        )
        raise TypeError(message(argument, wanted, got, hint))
