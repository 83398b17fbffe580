"""Bulk copies and reductions (PTX ISA 9.7.9, cp.async.bulk and cp.reduce.async.bulk)."""

from emulator.ptx.encoding import ATOMICS
from emulator.ptx.statement import CACHE_HINTS, Statement

_SPACES = ("shared::cluster", "shared::cta", "global")


def _direction(s: Statement) -> tuple[str, str]:
    """Takes the destination's and the source's space."""
    to, source = (s.need({name: name for name in _SPACES}) for _ in range(2))
    return to, source


def hint(s: Statement) -> None:
    """Takes ``.L2::cache_hint`` and its policy operand, the last."""
    if s.flag("L2::cache_hint"):
        s.operands.pop()


def copy(s: Statement) -> None:
    """``cp.async.bulk`` after these qualifiers."""
    if s.flag("commit_group"):
        return s.emit("BulkCommit")
    if s.flag("wait_group"):
        return s.emit("BulkWait", mode=int(s.flag("read")), immediate=s.literal())
    if s.flag("prefetch"):
        s.qualifiers.clear()  # to the L2 cache: no effect
        s.operands.clear()
        return s.emit("Nop")
    hint(s)
    s.drop(CACHE_HINTS)
    in_order = [q for q in s.qualifiers if q in _SPACES]
    _direction(s)
    match in_order:
        case ["shared::cluster" | "shared::cta", "global"]:
            s.expect("mbarrier::complete_tx::bytes")
            multicast = s.flag("multicast::cluster")
            to, source, size, barrier = (
                s.bare_address(),
                s.bare_address(),
                s.src(),
                s.bare_address(),
            )
            mask = [s.src()] if multicast else []
            src = [to, source, size, barrier, *mask]
            s.emit("BulkLoad", src=src, mode=int(multicast))
        case ["global", "shared::cta"]:
            s.expect("bulk_group")
            s.emit("BulkStore", src=[s.bare_address(), s.bare_address(), s.src()])
        case ["shared::cluster", "shared::cta"]:
            s.expect("mbarrier::complete_tx::bytes")
            src = [s.bare_address(), s.bare_address(), s.src(), s.bare_address()]
            s.emit("BulkShared", src=src)
        case _:
            s.error("direction not supported")


def reduce(s: Statement) -> None:
    """``cp.reduce.async.bulk`` after these qualifiers."""
    hint(s)
    s.drop(CACHE_HINTS, "noftz")
    in_order = [q for q in s.qualifiers if q in _SPACES]
    _direction(s)
    mode2, type = s.need(ATOMICS), s.type()
    match in_order:
        case ["global", "shared::cta"]:
            s.expect("bulk_group")
            src = [s.bare_address(), s.bare_address(), s.src()]
            s.emit("BulkReduce", type=type, src=src, mode2=mode2)
        case ["shared::cluster", "shared::cta"]:
            s.expect("mbarrier::complete_tx::bytes")
            src = [s.bare_address(), s.bare_address(), s.src(), s.bare_address()]
            s.emit("BulkReduce", type=type, src=src, mode=1, mode2=mode2)
        case _:
            s.error("direction not supported")
