"""Integer arithmetic (PTX ISA 9.7.1) where it does not share a name with floating point."""

from emulator.ptx.statement import Statement, decodes

_SOURCES = {"rem": 2, "popc": 1, "clz": 1, "brev": 1, "fns": 3, "bfe": 3, "bfi": 4}


def plain(s: Statement, op: str, sources: int, **fields: int) -> None:
    """``name.type d, a, ...``: all operands but the first are sources."""
    s.emit(op, type=s.type(), dst=[s.dst()], src=s.rest(sources), **fields)


@decodes(*_SOURCES)
def _plain(s: Statement) -> None:
    plain(s, s.name.capitalize(), _SOURCES[s.name])


@decodes("bfind")
def _bfind(s: Statement) -> None:
    plain(s, "Bfind", 1, mode=int(s.flag("shiftamt")))


@decodes("dp4a")
def _dp4a(s: Statement) -> None:
    types = s.types()
    if len(types) != 2:
        s.error("two types expected")
    s.emit("Dp4a", type=types[0], type2=types[1], dst=[s.dst()], src=s.rest(3))
