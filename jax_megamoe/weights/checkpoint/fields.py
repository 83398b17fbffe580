"""Fields of a JSON file from outside, checked as they are read.

Every reader of a model's config goes through `Fields`: a field of another kind than it should be is
one kind of error, ValueError, that names the field and the file. Nothing is converted: "false" is
no bool, 8.0 no integer.
"""

import json
import math
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from jax_megamoe import _checks
from jax_megamoe._files import read_json

MAX_INTEGER = 2**31 - 1
"""Largest integer of a config: sizes and ids are int32 wherever they are used."""

_REQUIRED = object()
_MAX_DIGITS = 20


class Fields(dict[str, Any]):
    """A JSON object and where it comes from.

    A field that is absent or null has its default; without one, it is an error.

    Args:
        content: the object.
        origin: where it comes from, for messages: a file's path or an argument's name.
        path: of the object in its file, such as ``quantization_config.``.

    Raises:
        ValueError: `content` is no JSON object.
    """

    def __init__(self, content: Any, origin: str, path: str = "") -> None:
        if not isinstance(content, Mapping):
            where = f"{path.rstrip('.')} in {origin}" if path else origin
            raise ValueError(_checks.message(where, "a JSON object", shown(content)))
        super().__init__(cast(Mapping[str, Any], content))
        self.origin = origin
        self.path = path

    def where(self, name: str) -> str:
        """What messages call the field."""
        return f"{self.path}{name} in {self.origin}"

    def integer(self, *names: str, default: Any = _REQUIRED, minimum: int = 0) -> int:
        """The first of these fields, an integer from `minimum` to `MAX_INTEGER`.

        Raises:
            ValueError: anything else, or no such field and no default.
        """
        name, value = self._first(names, default, f"an integer >= {minimum}")
        if name is None:
            return value
        return self._checked_integer(name, value, minimum)

    def of_layer(
        self, layer_index: int | None, *names: str, default: Any = _REQUIRED, minimum: int = 0
    ) -> int:
        """`integer`, or that of the layer in a list of one a layer.

        Args:
            layer_index: the layer; None: of any, for all have the same.
            names: see `integer`, as for default and minimum.
            default: see there.
            minimum: see there.

        Raises:
            ValueError: as `integer`; a list without that layer, or of different numbers without an
                index.
        """
        name = next((name for name in names if self.get(name) is not None), None)
        if name is None or not isinstance(self[name], list | tuple):
            return self.integer(*names, default=default, minimum=minimum)
        values = self.integers(name)
        if layer_index is None and len(set(values)) == 1:
            layer_index = 0
        if layer_index is None or layer_index >= len(values):
            which = "the same for all layers" if layer_index is None else f"for layer {layer_index}"
            raise self.wrong(name, f"an integer, or a list of one {which}")
        return self._checked_integer(name, values[layer_index], minimum)

    def number(self, *names: str, default: Any = _REQUIRED) -> float:
        """Likewise, a finite number."""
        name, value = self._first(names, default, "a finite number")
        if name is None:
            return value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) <= _LARGEST_FLOAT:
            raise self.wrong(name, "a finite number")
        return float(value)

    def flag(self, *names: str, default: Any = _REQUIRED) -> bool:
        """Likewise, true or false."""
        name, value = self._first(names, default, "true or false")
        if name is not None and not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, *names: str, default: Any = _REQUIRED) -> str:
        """Likewise, a string."""
        name, value = self._first(names, default, "a string")
        if name is not None and not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def one_of(self, name: str, choices: Iterable[str], default: Any = _REQUIRED) -> str:
        """Likewise, one of these strings."""
        listed = list(choices)
        value = self.text(name, default=default)
        if value not in listed:
            raise self.wrong(name, f"one of {listed}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; of none, if there is no such field."""
        values = self._list(name)
        for value in values:
            if not isinstance(value, str):
                raise self.wrong(name, "a list of strings", value)
        return tuple(values)

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers from 0 to `MAX_INTEGER`; of none, if there is no such field."""
        return tuple(self._checked_integer(name, value, 0) for value in self._list(name))

    def each(self, name: str) -> "dict[str, Fields]":
        """An object of objects; of none, if there is no such field."""
        inner = self.inner(name)
        return {} if inner is None else {key: inner.required_inner(key) for key in inner}

    def inner(self, name: str) -> "Fields | None":
        """An object; None, if there is no such field."""
        return None if self.get(name) is None else self.required_inner(name)

    def required_inner(self, name: str) -> "Fields":
        """An object.

        Raises:
            ValueError: anything else.
        """
        return Fields(self.get(name), self.origin, f"{self.path}{name}.")

    def wrong(self, name: str, expected: str, got: Any = _REQUIRED) -> ValueError:
        """The error of a field with another value than expected."""
        value = self.get(name) if got is _REQUIRED else got
        return ValueError(_checks.message(self.where(name), expected, shown(value)))

    def _first(self, names: tuple[str, ...], default: Any, expected: str) -> tuple[str | None, Any]:
        """The first of the fields that is there; (None, the default) if none is."""
        for name in names:
            if self.get(name) is not None:
                return name, self[name]
        if default is not _REQUIRED:
            return None, default
        present = next((name for name in names if name in self), None)
        if present is not None:
            raise self.wrong(present, expected)
        raise ValueError(_checks.message(self.where(" or ".join(names)), expected, "no such key"))

    def _list(self, name: str) -> list[Any]:
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list | tuple):
            raise self.wrong(name, "a list")
        return list(cast(list[Any], value))

    def _checked_integer(self, name: str, value: Any, minimum: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, f"an integer >= {minimum}", value)
        if value < minimum:
            raise self.wrong(name, f"an integer >= {minimum}", value)
        if value > MAX_INTEGER:
            raise self.wrong(name, f"an integer <= {MAX_INTEGER}", value)
        return value


def read_fields(path: Path) -> Fields:
    """The object in a JSON file. NaN and infinity are read, for config.json files have them.

    Raises:
        ValueError: not JSON, or another value than an object; the message names the file.
        FileNotFoundError, OSError: it cannot be opened.
    """
    return Fields(read_json(path, constants=True), str(path))


def shown(value: Any) -> str:
    """A value as messages show it, short however large it is."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int) and abs(value) >= 10**_MAX_DIGITS:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, int | float | str):
        return reprlib.repr(value)
    if isinstance(value, Mapping):
        return f"an object of {len(cast(Mapping[str, Any], value))} keys"
    is_list = isinstance(value, list | tuple)
    return f"a list of {len(cast(list[Any], value))}" if is_list else type(value).__name__


_LARGEST_FLOAT = math.ldexp(1 - 2.0**-53, 1024)
