"""Arithmetic of integers and floats under one name (PTX ISA 9.7.1, 9.7.3 to 9.7.5)."""

from emulator.ptx.decode.integer import plain
from emulator.ptx.encoding import FLOATS, FTZ, NAN, ROUNDINGS, SAT
from emulator.ptx.statement import Statement, decodes


def _flags(s: Statement) -> int:
    bits = {"ftz": FTZ, "NaN": NAN, "sat": SAT}
    return sum(bit for name, bit in bits.items() if s.flag(name))


def _arithmetic(s: Statement, integer: str, floating: str, sources: int = 2) -> None:
    """Emits the integer or the float opcode by the type.

    Mixed precision has the types of the result and of the narrow sources
    (``add.f32.bf16 d, a, c``: `a` is narrow, `c` is not).
    """
    types = s.types()
    flags, mode = _flags(s), s.choice(ROUNDINGS, 0)
    if not types or not (floating if types[0] in FLOATS else integer):
        s.error("type not supported")
    op = floating if types[0] in FLOATS else integer
    if len(types) > 2 or (len(types) == 2 and (types[0] != "f32" or types[1] not in FLOATS)):
        s.error("types not supported")
    dst = [s.dst()]
    s.emit(op, type=types[0], type2=types[-1], dst=dst, src=s.rest(sources), mode=mode, flags=flags)


@decodes("add")
def _add(s: Statement) -> None:
    _arithmetic(s, "Add", "FAdd")


@decodes("sub")
def _sub(s: Statement) -> None:
    _arithmetic(s, "Sub", "FSub")


@decodes("mul")
def _mul(s: Statement) -> None:
    half = s.choice({"hi": "MulHi", "wide": "MulWide", "lo": "MulLo"}, "MulLo")
    _arithmetic(s, half, "FMul")


@decodes("mad")
def _mad(s: Statement) -> None:
    half = s.choice({"hi": "MadHi", "wide": "MadWide", "lo": "MadLo"}, "MadLo")
    _arithmetic(s, half, "FFma", 3)


@decodes("fma")
def _fma(s: Statement) -> None:
    _arithmetic(s, "", "FFma", 3)


@decodes("div")
def _div(s: Statement) -> None:
    s.drop("approx", "full")  # 2 ulp; divided exactly here
    _arithmetic(s, "Div", "FDiv")


@decodes("abs")
def _abs(s: Statement) -> None:
    _arithmetic(s, "Abs", "FAbs", 1)


@decodes("neg")
def _neg(s: Statement) -> None:
    _arithmetic(s, "Neg", "FNeg", 1)


@decodes("min")
def _min(s: Statement) -> None:
    _arithmetic(s, "Min", "FMin")


@decodes("max")
def _max(s: Statement) -> None:
    _arithmetic(s, "Max", "FMax")


@decodes("ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh", "sin", "cos")
def _function(s: Statement) -> None:
    s.drop("approx")  # computed exactly and rounded; the ISA states a bound for each
    mode, flags = s.choice(ROUNDINGS, 0), _flags(s)
    if mode or flags & ~FTZ:
        s.error("rounding or flag not supported")
    plain(s, s.name.capitalize(), 1, flags=flags)


@decodes("copysign")
def _copysign(s: Statement) -> None:
    plain(s, "Copysign", 2)
