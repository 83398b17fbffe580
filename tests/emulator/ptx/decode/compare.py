"""Comparison and selection (PTX ISA 9.7.6 and 9.7.7)."""

from emulator.ptx.decode.integer import plain
from emulator.ptx.encoding import BOOLEANS, COMPARISONS, FTZ
from emulator.ptx.statement import Statement, decodes


@decodes("setp")
def _setp(s: Statement) -> None:
    mode, boolean = s.need(COMPARISONS), s.choice(BOOLEANS, 0)
    flags = FTZ if s.flag("ftz") else 0
    dst = s.dst_pair()
    s.emit(
        "Setp",
        type=s.type(),
        dst=dst,
        src=s.rest(3 if boolean else 2),
        mode=mode,
        mode2=boolean,
        flags=flags,
    )


@decodes("set")
def _set(s: Statement) -> None:
    mode, flags = s.need(COMPARISONS), FTZ if s.flag("ftz") else 0
    types = s.types()
    if len(types) != 2:
        s.error("two types expected")
    dst, src = [s.dst()], [s.src(), s.src()]
    s.emit("Set", type=types[1], type2=types[0], dst=dst, src=src, mode=mode, flags=flags)


@decodes("selp")
def _selp(s: Statement) -> None:
    plain(s, "Selp", 3)
