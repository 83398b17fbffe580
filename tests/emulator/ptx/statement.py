"""One PTX statement while it is decoded: every qualifier and operand must be taken by its decoder.

A decoder is a function of a `Statement`, registered for instruction names by `decodes`. What it
leaves behind, a qualifier or an operand, makes the statement an error: nothing is ignored.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NoReturn, TypeVar

from emulator.ptx.encoding import SPACES, SPECIAL_REGISTERS, TYPES, PtxError, number, split_commas

if TYPE_CHECKING:
    from emulator.ptx.body import Body

Decoder = Callable[["Statement"], None]
T = TypeVar("T")
DECODERS: dict[str, Decoder] = {}

# Qualifiers without a meaning here: there is one address space without caches.
CACHE_HINTS = {
    "ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "L1::evict_normal", "L1::evict_unchanged",
    "L1::evict_first", "L1::evict_last", "L1::no_allocate", "L2::evict_normal", "L2::evict_first",
    "L2::evict_last", "L2::64B", "L2::128B", "L2::256B", "level::eviction_priority",
}  # fmt: skip
SCOPES = {"cta", "cluster", "gpu", "sys"}
ORDERS = {"weak", "relaxed", "acquire", "release", "acq_rel", "sc", "volatile", "mmio"}


def decodes(*names: str) -> Callable[[Decoder], Decoder]:
    """Registers a function as the decoder of the instructions of these names."""

    def register(function: Decoder) -> Decoder:
        for name in names:
            assert name not in DECODERS, name
            DECODERS[name] = function
        return function

    return register


class Statement:
    """An instruction's qualifiers and operands, taken one after the other from the left.

    Attributes:
        name: the instruction's name, before the first dot.
        qualifiers: those not taken yet.
        operands: texts of those not taken yet.
    """

    def __init__(self, body: "Body", opcode: str, operands: str) -> None:
        self.body = body
        self.text = f"{opcode} {operands}"
        self.name, *self.qualifiers = opcode.split(".")
        self.operands = split_commas(operands)

    def error(self, what: str) -> NoReturn:
        """Raises PtxError with the line and the statement."""
        raise PtxError(f"PTX line {self.body.line}: {what} in `{self.text}`")

    def done(self) -> None:
        """Raises PtxError if something was not taken."""
        if self.qualifiers:
            self.error(f"qualifier .{self.qualifiers[0]} not supported")
        if self.operands:
            self.error(f"operand {self.operands[0]} not supported")

    # Qualifiers

    def flag(self, *names: str) -> bool:
        """Takes one qualifier if it is there."""
        return self.choice(dict.fromkeys(names, True), False)

    def choice(self, table: Mapping[str, T], default: T) -> T:
        """Takes the first qualifier that the table has; what the table says of it."""
        for i, qualifier in enumerate(self.qualifiers):
            if qualifier in table:
                del self.qualifiers[i]
                return table[qualifier]
        return default

    def need(self, table: Mapping[str, T]) -> T:
        """Like `choice`, but one must be there."""
        if not any(q in table for q in self.qualifiers):
            self.error(f"one of {', '.join('.' + name for name in table)} expected")
        return self.choice(table, next(iter(table.values())))

    def expect(self, *names: str) -> None:
        """Takes qualifiers that must be there."""
        for name in names:
            if not self.flag(name):
                self.error(f".{name} expected")

    def drop(self, *names: str | Iterable[str]) -> None:
        """Takes qualifiers that change nothing here."""
        known = {n for name in names for n in ([name] if isinstance(name, str) else name)}
        self.qualifiers = [q for q in self.qualifiers if q not in known]

    def types(self) -> list[str]:
        """Takes all type qualifiers, in order."""
        found = [q for q in self.qualifiers if q in TYPES]
        self.qualifiers = [q for q in self.qualifiers if q not in TYPES]
        return found

    def type(self) -> str:
        """Takes the one type qualifier."""
        found = self.types()
        if len(found) != 1:
            self.error("one type expected")
        return found[0]

    def matching(self, pattern: str) -> re.Match[str]:
        """Takes the first qualifier that matches in full."""
        for i, qualifier in enumerate(self.qualifiers):
            if found := re.fullmatch(pattern, qualifier):
                del self.qualifiers[i]
                return found
        self.error(f"a qualifier like .{pattern} expected")

    def space(self, default: str = "generic") -> int:
        """Takes a state space. `.cluster` alone is a scope (PTX ISA 9.7.9, ld)."""
        names = {"shared::cluster": "cluster", "shared::cta": "shared", "const": "global"}
        names |= {"param::entry": "param", "param::func": "param"}
        own = [q for q in SPACES if q not in ("generic", "cluster")]
        known = {q: SPACES[names.get(q, q)] for q in (*own, *names)}
        return self.choice(known, SPACES[default])

    # Operands

    def take(self) -> str:
        """Takes the next operand's text."""
        if not self.operands:
            self.error("too few operands")
        return self.operands.pop(0)

    def dst(self) -> int:
        """Takes a destination register."""
        return self.body.destination(self.take())

    def dsts(self) -> list[int]:
        """Takes a vector of destinations, or one."""
        return [self.body.destination(each) for each in _vector(self.take())]

    def dst_pair(self) -> list[int]:
        """Takes ``d|p``, or one destination."""
        return [self.body.destination(each) for each in self.take().split("|")]

    def src(self) -> int:
        """Takes a source: a register, a literal, a special register or a symbol's address."""
        return self.body.source(self.take())

    def srcs(self) -> list[int]:
        """Takes a vector of sources, or one."""
        return [self.body.source(each) for each in _vector(self.take())]

    def rest(self, *counts: int) -> list[int]:
        """Takes all operands that are left, each one source; so many (or so many) there are."""
        if counts and len(self.operands) not in counts:
            self.error(f"{' or '.join(map(str, counts))} sources expected")
        return [self.src() for _ in range(len(self.operands))]

    def address(self) -> tuple[int, int]:
        """Takes ``[base+offset]``: a source and a number."""
        return self.body.address(self.take())

    def bare_address(self) -> int:
        """Takes ``[base]``."""
        base, offset = self.address()
        return base if not offset else self.body.sum(base, offset)

    def literal(self) -> int:
        """Takes an integer literal."""
        text = self.take()
        value = number(text)
        if value is None:
            self.error(f"{text} is not an integer literal")
        return value

    def tensor(self) -> tuple[int, list[int]]:
        """Takes ``[map, {c0, c1}]``: the map's address and the coordinates."""
        text = self.take()
        found = re.fullmatch(r"\[\s*([^,]+?)\s*,\s*(\{[^}]*\})\s*\]", text)
        if not found:
            self.error(f"{text} is not a tensor map with coordinates")
        return self.body.source(found[1]), [self.body.source(c) for c in _vector(found[2])]

    def emit(self, op: str, **fields: object) -> None:
        """Adds an instruction; see `Body.emit`."""
        self.body.emit(op, **fields)  # type: ignore[arg-type]


def is_special_register(text: str) -> bool:
    """Whether an operand names a special register."""
    return text.startswith("%") and text[1:] in SPECIAL_REGISTERS


def _vector(text: str) -> list[str]:
    return split_commas(text[1:-1]) if text.startswith("{") else [text]
