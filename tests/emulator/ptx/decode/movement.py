"""Moves, addresses and bytes (PTX ISA 9.7.9: mov, cvta, prmt, isspacep, mapa, getctarank)."""

from emulator.ptx.encoding import BITS, SPACES, SPECIAL_REGISTERS, number
from emulator.ptx.statement import Statement, decodes, is_special_register


@decodes("mov")
def _mov(s: Statement) -> None:
    type = s.type()
    to, source = s.operands[0], s.operands[1] if len(s.operands) > 1 else ""
    if to.startswith("{"):
        dst = s.dsts()
        s.emit("Unpack", type=type, dst=dst, src=[s.src()], mode=BITS[type] // len(dst))
    elif source.startswith("{"):
        dst, src = [s.dst()], s.srcs()
        s.emit("Pack", type=type, dst=dst, src=src, mode=BITS[type] // len(src))
    elif is_special_register(source):
        dst, name = [s.dst()], s.take()[1:]
        s.emit("SpecialRegister", type=type, dst=dst, mode=SPECIAL_REGISTERS[name])
    elif type == "pred" and (value := number(source)) is not None:
        s.emit("Mov", type=type, dst=[s.dst()], src=[s.body.constant(int(value != 0))])
        s.take()
    else:
        s.emit("Mov", type=type, dst=[s.dst()], src=[s.src()])


@decodes("cvta")
def _cvta(s: Statement) -> None:
    to, space = s.flag("to"), s.space()
    s.drop("u32", "u64")
    dst, src = [s.dst()], [s.src()]
    if space in (SPACES["shared"], SPACES["cluster"], SPACES["local"]):
        s.emit("FromGeneric" if to else "ToGeneric", dst=dst, src=src, mode=space)
    elif space:  # global, constant and parameter addresses are generic ones
        s.emit("Mov", type="b64", dst=dst, src=src)
    else:
        s.error("state space expected")


@decodes("isspacep")
def _isspacep(s: Statement) -> None:
    space = s.space()
    if space in (SPACES["generic"], SPACES["param"]):
        s.error("state space not supported")
    s.emit("Isspacep", dst=[s.dst()], src=[s.src()], mode=space)


@decodes("prmt")
def _prmt(s: Statement) -> None:
    s.expect("b32")
    s.emit("Prmt", dst=[s.dst()], src=[s.src() for _ in range(3)])


@decodes("mapa")
def _mapa(s: Statement) -> None:
    space = s.space()
    s.drop("u32", "u64")
    s.emit("Mapa", dst=[s.dst()], src=[s.src(), s.src()], mode=space)


@decodes("getctarank")
def _getctarank(s: Statement) -> None:
    s.space()
    s.drop("u32", "u64")
    s.emit("GetCtaRank", dst=[s.dst()], src=[s.src()])
