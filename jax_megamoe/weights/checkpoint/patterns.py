"""Patterns over module names, as quantisation configs have them, in bounded time.

Three kinds: a name without its beginning or end, such as ``mlp``, which stands for whatever has it
as whole components; the same with ``*``, ``?`` and ``[...]``; and after ``re:`` a regular
expression, matched from the name's beginning (compressed-tensors). They come from outside, so
Python's `re`, which backtracks, does not run them. Here a pattern maps the set of positions that it
may start at to the set of positions that it may end at, in steps that are counted.

A set of positions is an int: bit p is set for the position before character p.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise

from jax_megamoe import _checks

_MAX_STEPS = 20_000
"""Of one pattern over one name; what configs have takes tens."""
_MAX_LENGTH = 2000
_MAX_DEPTH = 50
_MAX_REPEATS = 1000


@dataclass
class _Name:
    """A name, and how many steps are left for the pattern that is matched with it."""

    text: str
    steps: int = _MAX_STEPS
    masks: dict[Callable[[str], bool], int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return 1 << len(self.text)

    def where(self, accepts: Callable[[str], bool]) -> int:
        """Positions before the characters that are accepted."""
        if accepts not in self.masks:
            bits = ("1" if accepts(character) else "0" for character in reversed(self.text))
            self.masks[accepts] = int("0" + "".join(bits), 2)
        return self.masks[accepts]

    def boundaries(self) -> int:
        """Positions between a word's character and none, as ``\\b``."""
        words = [False, *(_is_word(character) for character in self.text), False]
        pairs = enumerate(pairwise(words))
        return sum(1 << p for p, (before, after) in pairs if before != after)


_Step = Callable[[_Name, int], int]
"""Positions after, from positions before."""


class TooCostly(Exception):
    """A pattern takes more than `_MAX_STEPS` over a name."""


def matches(pattern: str, name: str) -> bool:
    """Whether the pattern stands for the module of that name, or for one around it.

    Raises:
        ValueError: a regular expression that is malformed, has what is not understood here
            (backreferences, lookbehind, flags), or takes too long.
    """
    if not pattern.startswith("re:"):
        if not set(pattern) & set("*?["):
            return f".{pattern}." in f".{name}."
        dots = _Name(name).where(".".__eq__)
        starts, ends = 1 | dots << 1, dots | 1 << len(name)
        return bool(_run(pattern, _glob, name, starts) & ends)
    return bool(_run(pattern, _regex, name, 1))


def _run(pattern: str, compiled: Callable[[str], _Step], name: str, starts: int) -> int:
    if len(pattern) > _MAX_LENGTH:
        expected = f"at most {_MAX_LENGTH} characters"
        raise ValueError(_checks.message(_shown(pattern), expected, len(pattern)))
    step = compiled(pattern)
    try:
        return step(_Name(name), starts)
    except TooCostly:
        expected = f"a pattern that takes at most {_MAX_STEPS} steps over {name[:100]!r}"
        raise ValueError(_checks.message(_shown(pattern), expected, "more")) from None


def _shown(pattern: str) -> str:
    return f"pattern {pattern[:100]!r}"


@lru_cache(maxsize=4096)
def _glob(pattern: str) -> _Step:
    steps: list[_Step] = []
    rest = pattern
    while rest:
        character, rest = rest[0], rest[1:]
        closing = rest.find("]", 2 if rest.startswith("!") else 1)
        if character == "*":
            steps.append(_repeated(_one(_anything), 0, None))
        elif character == "?":
            steps.append(_one(_anything))
        elif character == "[" and closing > 0:
            inner, rest = rest[:closing], rest[closing + 1 :]
            steps.append(_one(_glob_set(inner)))
        else:
            steps.append(_one(character.__eq__))
    return _sequence(steps)


def _glob_set(inner: str) -> Callable[[str], bool]:
    is_negated = inner.startswith("!")
    inner = inner.removeprefix("!")
    spans: list[tuple[str, str]] = []
    while inner:
        is_span = len(inner) > 2 and inner[1] == "-"
        spans.append((inner[0], inner[2] if is_span else inner[0]))
        inner = inner[3 if is_span else 1 :]
    return lambda c: any(low <= c <= high for low, high in spans) != is_negated


@lru_cache(maxsize=4096)
def _regex(pattern: str) -> _Step:
    parser = _Parser(pattern)
    step = parser.alternatives(0)
    if parser.rest:
        raise parser.wrong("balanced parentheses")
    return step


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _anything(character: str) -> bool:
    return character != "\n"


_CLASSES: dict[str, Callable[[str], bool]] = dict(
    d=str.isdecimal,
    D=lambda c: not c.isdecimal(),
    w=_is_word,
    W=lambda c: not _is_word(c),
    s=str.isspace,
    S=lambda c: not c.isspace(),
)
_ANCHORS: dict[str, Callable[[_Name], int]] = dict(
    A=lambda name: 1,
    Z=lambda name: name.end,
    b=lambda name: name.boundaries(),
    B=lambda name: (2 * name.end - 1) & ~name.boundaries(),
)


class _Parser:
    """Reads a regular expression, what is in Python's syntax and needs no memory of the text."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.rest = pattern.removeprefix("re:")

    def wrong(self, expected: str) -> ValueError:
        got = repr(self.rest[:20]) if self.rest else "its end"
        return ValueError(_checks.message(_shown(self._pattern), expected, got))

    def alternatives(self, depth: int) -> _Step:
        if depth > _MAX_DEPTH:
            raise self.wrong(f"at most {_MAX_DEPTH} groups in each other")
        branches = [self._branch(depth)]
        while self._took("|"):
            branches.append(self._branch(depth))
        return branches[0] if len(branches) == 1 else _either(branches)

    def _branch(self, depth: int) -> _Step:
        steps: list[_Step] = []
        while self.rest and self.rest[0] not in "|)":
            steps.append(self._repeats(self._atom(depth)))
        return _sequence(steps)

    def _atom(self, depth: int) -> _Step:
        if self._took("("):
            return self._group(depth)
        if self._took("["):
            return _one(self._set())
        if self._took("\\"):
            return self._escape()
        character = self._character()
        if character in "*+?":
            self.rest = character + self.rest
            raise self.wrong("something to repeat")
        anchors: dict[str, Callable[[_Name], int]] = {"^": _ANCHORS["A"], "$": _ANCHORS["Z"]}
        if character in anchors:
            return _anchored(anchors[character])
        return _one(_anything if character == "." else character.__eq__)

    def _group(self, depth: int) -> _Step:
        wanted: bool | None = None
        if self._took("?=") or self.rest.startswith("?!"):
            wanted = not self._took("?!")
        elif self._took("?P<"):
            name, closing, self.rest = self.rest.partition(">")
            if not closing or not name.isidentifier():
                raise self.wrong("a group's name and >")
        elif not self._took("?:") and self.rest.startswith("?"):
            raise self.wrong("a group, (?:...), (?P<name>...), (?=...) or (?!...)")
        step = self.alternatives(depth + 1)
        if not self._took(")"):
            raise self.wrong("a closing parenthesis")
        return step if wanted is None else partial(_looked_ahead, step, wanted)

    def _repeats(self, step: _Step) -> _Step:
        bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        found = next((sign for sign in bounds if self._took(sign)), None)
        if found is not None:
            step = _repeated(step, *bounds[found])
        elif self.rest.startswith("{") and (counts := self._counts()) is not None:
            step = _repeated(step, *counts)
        else:
            return step
        self._took("?")
        if self.rest and self.rest[0] in "*+?":
            raise self.wrong("one repetition")
        return step

    def _counts(self) -> tuple[int, int | None] | None:
        """Of ``{m}``, ``{m,}``, ``{,n}`` and ``{m,n}``; None where the brace stands for itself."""
        inner, closing, rest = self.rest[1:].partition("}")
        low, comma, high = inner.partition(",")
        digits = set(string.digits)
        if not closing or not set(low) <= digits or not set(high) <= digits or inner in ("", ","):
            return None
        if max(len(low), len(high)) > 4 or max(int(low or 0), int(high or 0)) > _MAX_REPEATS:
            raise self.wrong(f"at most {_MAX_REPEATS} repetitions")
        least, most = int(low or 0), int(high) if high else None if comma else int(low)
        if most is not None and least > most:
            raise self.wrong("repetitions from fewer to more")
        self.rest = rest
        return least, most

    def _set(self) -> Callable[[str], bool]:
        is_negated = self._took("^")
        tests: list[Callable[[str], bool]] = []
        while not tests or not self.rest.startswith("]"):
            low = self._in_set()
            if self.rest.startswith("-") and not self.rest.startswith("-]"):
                self._took("-")
                high = self._in_set()
                if not isinstance(low, str) or not isinstance(high, str) or low > high:
                    raise self.wrong("a span of characters, from lower to higher")
                tests.append(lambda c, low=low, high=high: low <= c <= high)
            else:
                tests.append(low.__eq__ if isinstance(low, str) else low)
        self._took("]")
        return lambda c: any(test(c) for test in tests) != is_negated

    def _in_set(self) -> str | Callable[[str], bool]:
        if not self._took("\\"):
            return self._character()
        character = self._character()
        return _CLASSES[character] if character in _CLASSES else self._literal(character)

    def _escape(self) -> _Step:
        character = self._character()
        if character in _ANCHORS:
            return _anchored(_ANCHORS[character])
        if character in _CLASSES:
            return _one(_CLASSES[character])
        return _one(self._literal(character).__eq__)

    def _literal(self, character: str) -> str:
        if character in string.ascii_letters + string.digits:
            self.rest = character + self.rest
            raise self.wrong("an escape of punctuation, or one of \\d \\w \\s \\b")
        return character

    def _character(self) -> str:
        if not self.rest:
            raise self.wrong("more of the pattern")
        character, self.rest = self.rest[0], self.rest[1:]
        return character

    def _took(self, start: str) -> bool:
        if not self.rest.startswith(start):
            return False
        self.rest = self.rest.removeprefix(start)
        return True


def _one(accepts: Callable[[str], bool]) -> _Step:
    def step(name: _Name, positions: int) -> int:
        name.steps -= 1
        if name.steps < 0:
            raise TooCostly
        return (positions & name.where(accepts)) << 1

    return step


def _anchored(at: Callable[[_Name], int]) -> _Step:
    return lambda name, positions: positions & at(name)


def _sequence(steps: Sequence[_Step]) -> _Step:
    def step(name: _Name, positions: int) -> int:
        for each in steps:
            if not positions:
                break
            positions = each(name, positions)
        return positions

    return step


def _either(branches: Sequence[_Step]) -> _Step:
    def step(name: _Name, positions: int) -> int:
        after = 0
        for branch in branches:
            after |= branch(name, positions)
        return after

    return step


def _repeated(once: _Step, least: int, most: int | None) -> _Step:
    def step(name: _Name, positions: int) -> int:
        for _ in range(least):
            name.steps -= 1
            positions = once(name, positions) if positions else 0
        reached = new = positions
        rounds = least
        while new and rounds != most:
            name.steps -= 1
            if name.steps < 0:
                raise TooCostly
            new = once(name, new) & ~reached
            reached |= new
            rounds += 1
        return reached

    return step


def _looked_ahead(step: _Step, wanted: bool, name: _Name, positions: int) -> int:
    held = 0
    for place in range(positions.bit_length()):
        bit = 1 << place
        if positions & bit and bool(step(name, bit)) == wanted:
            held |= bit
    return held
