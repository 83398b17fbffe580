"""Conversion of numbers (PTX ISA 9.7.9, cvt and cvt.pack)."""

from emulator.ptx.encoding import FTZ, RELU, ROUNDINGS, SAT, SATFINITE
from emulator.ptx.statement import Statement, decodes


@decodes("cvt")
def _cvt(s: Statement) -> None:
    types = s.types()
    if len(types) != 2:
        s.error("two types expected")
    to, source = types
    mode = s.choice(ROUNDINGS, 0)
    bits = {"ftz": FTZ, "sat": SAT, "satfinite": SATFINITE, "relu": RELU}
    flags = sum(bit for name, bit in bits.items() if s.flag(name))
    packed = to.endswith("x2") or source.endswith("x2")
    op, dst, counts = "CvtPacked" if packed else "Cvt", [s.dst()], (1, 2) if packed else (1,)
    s.emit(op, type=to, type2=source, dst=dst, src=s.rest(*counts), mode=mode, flags=flags)
