"""Fifth-generation tensor cores and tensor memory (PTX ISA 9.7.16, tcgen05)."""

from emulator.ptx.statement import Statement, decodes

_KINDS = {"kind::f16": 0, "kind::f8f6f4": 1, "kind::mxf8f6f4": 2, "kind::mxf4": 3,
          "kind::mxf4nvf4": 4}  # fmt: skip
_SCALES = {"scale_vec::1X": 1, "scale_vec::2X": 2, "scale_vec::4X": 4, "block32": 32, "block16": 16}
_SHAPES = {"32x32b": 0, "16x64b": 1, "16x128b": 2, "16x256b": 3}
# Registers of a lane for x1 (PTX ISA, tcgen05.ld and .st: shapes).
_REGISTERS = {0: 1, 1: 1, 2: 2, 3: 4}


@decodes("tcgen05")
def _tcgen05(s: Statement) -> None:
    if s.flag("fence::before_thread_sync") or s.flag("fence::after_thread_sync"):
        return s.emit("Nop")
    if s.flag("wait::ld") or s.flag("wait::st"):
        s.expect("sync", "aligned")
        return s.emit("TensorWait")
    kinds = {"alloc": _alloc, "dealloc": _alloc, "relinquish_alloc_permit": _alloc, "ld": _move,
             "st": _move, "cp": _cp, "commit": _commit, "mma": _mma}  # fmt: skip
    name = next((q for q in s.qualifiers if q in kinds), "")
    s.need(kinds)(s, name)


def _group(s: Statement) -> int:
    return s.need({"cta_group::1": 1, "cta_group::2": 2})


def _alloc(s: Statement, name: str) -> None:
    group = _group(s)
    s.expect("sync", "aligned")
    if name == "relinquish_alloc_permit":
        return s.emit("Nop")
    s.expect("b32")
    if name == "dealloc":
        return s.emit("TensorDealloc", src=[s.src(), s.src()], mode=group)
    s.need({"shared::cta": 0})
    base, offset = s.address()
    s.emit("TensorAlloc", src=[base, s.src()], mode=group, immediate=offset)


def _move(s: Statement, name: str) -> None:
    s.expect("sync", "aligned")
    shape, count = s.need(_SHAPES), int(s.matching(r"x(\d+)")[1])
    s.expect("b32")
    if shape == _SHAPES["16x64b"]:
        s.error("shape not supported")
    if name == "ld":
        registers = s.dsts()
        base, offset = s.address()
        s.emit("TensorLd", dst=registers, src=[base], mode=shape, immediate=offset)
    else:
        base, offset = s.address()
        registers = s.srcs()
        s.emit("TensorSt", src=[base, *registers], mode=shape, immediate=offset)
    if len(registers) != count * _REGISTERS[shape]:
        s.error("number of registers")


def _cp(s: Statement, name: str) -> None:
    group = _group(s)
    s.expect("32x128b", "warpx4")
    to, source = s.bare_address(), s.src()
    s.emit("TensorCopy", src=[to, source], mode=group)


def _commit(s: Statement, name: str) -> None:
    group = _group(s)
    s.expect("mbarrier::arrive::one", "b64")
    s.drop("shared::cluster")
    multicast = s.flag("multicast::cluster")
    src = [s.bare_address(), *([s.src()] if multicast else [])]
    s.emit("TensorCommit", src=src, mode=group, flags=int(multicast))


def _mma(s: Statement, name: str) -> None:
    group, kind = _group(s), s.need(_KINDS)
    scaled = s.flag("block_scale")
    vector = s.choice(_SCALES, 0)
    if scaled != (kind >= 2):
        s.error("kind and block scales do not fit")
    s.drop("collector::a::discard")  # the default: nothing is kept between instructions
    src = [s.bare_address(), s.src(), s.src(), s.src()]
    if scaled:
        src += [s.bare_address(), s.bare_address()]
    src.append(s.src())
    s.emit("TensorMma", src=src, mode=kind, mode2=vector, flags=group)
