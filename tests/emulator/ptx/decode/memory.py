"""Loads, stores, atomics and fences (PTX ISA 9.7.9 ld, st, prefetch; 9.7.13 atom, red, membar)."""

import re

from emulator.ptx.encoding import ATOMICS, BITS, SPACES
from emulator.ptx.statement import CACHE_HINTS, ORDERS, SCOPES, Statement, decodes

_POLLING = {"acquire", "relaxed", "volatile", "mmio"}


def _vector_size(s: Statement) -> int:
    return s.choice({"v2": 2, "v4": 4, "v8": 8}, 1)


def _hinted(s: Statement) -> bool:
    """Takes ``.L2::cache_hint``: its policy operand is the last one."""
    hinted = s.flag("L2::cache_hint")
    if hinted:
        s.operands.pop()
    return hinted


@decodes("ld", "ldu")
def _ld(s: Statement) -> None:
    polls = any(q in _POLLING for q in s.qualifiers)
    type, space, count = s.type(), s.space(), _vector_size(s)
    noncoherent = int(s.flag("nc"))
    _hinted(s)
    s.drop(CACHE_HINTS, SCOPES, ORDERS)
    result = re.fullmatch(r"\[([\w$]+)\]", s.operands[-1])
    if space == SPACES["param"] and result and s.body.is_call_parameter(result[1]):
        s.emit("Mov", type=type, dst=[s.dst()], src=[s.body.call_parameter(result[1])])
        s.take()
        return
    dst = s.dsts()
    if len(dst) != count:
        s.error("vector size and destinations differ")
    base, offset = s.address()
    # After a load that may be part of a polling loop another warp gets its turn.
    flags = int(polls)
    s.emit("Load", type=type, dst=dst, src=[base], mode=space, mode2=noncoherent,
           immediate=offset, flags=flags)  # fmt: skip


@decodes("st")
def _st(s: Statement) -> None:
    if s.flag("bulk"):
        s.drop("weak")
        base, offset = s.address()
        space = s.space("shared")
        if space != SPACES["shared"]:
            s.error("state space not supported")
        return s.emit("StoreBulk", src=[base, s.src(), s.src()], immediate=offset)
    if s.flag("async"):
        return _st_async(s)
    type, space, count = s.type(), s.space(), _vector_size(s)
    _hinted(s)
    s.drop(CACHE_HINTS, SCOPES, ORDERS)
    argument = re.fullmatch(r"\[([\w$]+)(?:\+0)?\]", s.operands[0])
    if space == SPACES["param"]:
        if not argument:
            s.error("store to a kernel parameter")
        s.take()
        dst = [s.body.call_parameter(argument[1])]
        return s.emit("Mov", type=type, dst=dst, src=[s.src()])
    base, offset = s.address()
    values = s.srcs()
    if len(values) != count:
        s.error("vector size and values differ")
    s.emit("Store", type=type, src=[base, *values], mode=space, immediate=offset)


def _st_async(s: Statement) -> None:
    s.drop("weak", SCOPES, "relaxed")
    s.expect("shared::cluster", "mbarrier::complete_tx::bytes")
    type, count = s.type(), _vector_size(s)
    at, values, barrier = s.bare_address(), s.srcs(), s.bare_address()
    if len(values) != count:
        s.error("vector size and values differ")
    s.emit("StoreAsync", type=type, src=[at, barrier, *values])


@decodes("atom", "red")
def _atomic(s: Statement) -> None:
    if s.name == "red" and s.flag("async"):
        return _red_async(s)
    mode2, space = s.need(ATOMICS), s.space()
    types = s.types()
    _hinted(s)
    s.drop(CACHE_HINTS, SCOPES, ORDERS, "noftz")  # 16-bit floats have no .ftz
    if len(types) != 1 or types[0] == "b128":
        s.error("type not supported")
    dst = [s.dst()] if s.name == "atom" else []
    base, offset = s.address()
    values = s.rest()
    if len(values) != (2 if mode2 == ATOMICS["cas"] else 1):
        s.error("number of values")
    s.emit("Atomic", type=types[0], dst=dst, src=[base, *values], mode=space, mode2=mode2,
           immediate=offset)  # fmt: skip


def _red_async(s: Statement) -> None:
    s.drop("relaxed", "cluster")
    s.expect("shared::cluster", "mbarrier::complete_tx::bytes")
    mode2, type = s.need(ATOMICS), s.type()
    if BITS[type] not in (32, 64):
        s.error("type not supported")
    at, value, barrier = s.bare_address(), s.src(), s.bare_address()
    s.emit("ReduceAsync", type=type, src=[at, barrier, value], mode2=mode2)


@decodes("prefetch", "prefetchu", "discard", "applypriority")
def _prefetch(s: Statement) -> None:
    s.drop("L1", "L2", "tensormap", "param", "global", "const", "generic", CACHE_HINTS)
    s.address()
    if s.name in ("discard", "applypriority"):
        s.drop("128B")
        s.literal()
    s.emit("Nop")


@decodes("createpolicy")
def _createpolicy(s: Statement) -> None:
    s.qualifiers.clear()  # cache policies: no effect
    dst = [s.dst()]
    s.operands.clear()
    s.emit("Mov", type="b64", dst=dst, src=[s.body.constant(0)])


@decodes("fence", "membar")
def _fence(s: Statement) -> None:
    # Warps' instructions are sequentially consistent here, so there is nothing to order.
    s.drop(SCOPES, ORDERS, "gl", "mbarrier_init", "proxy", "alias", "async", "async::generic",
           "async::global", "async::shared::cta", "async::shared::cluster", "global", "shared::cta",
           "shared::cluster", "tensormap::generic", "sync_restrict::shared::cta",
           "sync_restrict::shared::cluster")  # fmt: skip
    if "proxy" in s.text and "tensormap" in s.text:
        s.error("tensor maps in memory are not supported")
    s.emit("Nop")
