"""Integer arithmetic (PTX ISA 9.7.1) where it does not share a name with floating point."""

from emulator.ptx.statement import Statement, decodes


def plain(s: Statement, op: str, **fields: int) -> None:
    """``name.type d, a, ...``: all operands but the first are sources."""
    s.emit(op, type=s.type(), dst=[s.dst()], src=s.rest(), **fields)


@decodes("rem", "popc", "clz", "brev", "fns", "bfe", "bfi")
def _plain(s: Statement) -> None:
    plain(s, s.name.capitalize())


@decodes("bfind")
def _bfind(s: Statement) -> None:
    plain(s, "Bfind", mode=int(s.flag("shiftamt")))


@decodes("dp4a")
def _dp4a(s: Statement) -> None:
    types = s.types()
    if len(types) != 2:
        s.error("two types expected")
    s.emit("Dp4a", type=types[0], type2=types[1], dst=[s.dst()], src=s.rest())
