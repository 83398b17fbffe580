"""Logic and shifts (PTX ISA 9.7.8)."""

from emulator.ptx.decode.integer import plain
from emulator.ptx.statement import Statement, decodes


@decodes("and", "or", "xor", "not", "shl", "shr")
def _plain(s: Statement) -> None:
    plain(s, s.name.capitalize(), 1 if s.name == "not" else 2)


@decodes("lop3")
def _lop3(s: Statement) -> None:
    s.expect("b32")
    dst, src = [s.dst()], [s.src() for _ in range(3)]
    s.emit("Lop3", dst=dst, src=src, mode=s.literal())


@decodes("shf")
def _shf(s: Statement) -> None:
    right = s.need({"l": 0, "r": 1})
    wrap = s.need({"clamp": 0, "wrap": 1})
    plain(s, "Shf", 3, mode=right, mode2=wrap)
