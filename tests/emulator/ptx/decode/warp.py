"""Exchange within a warp (PTX ISA 9.7.9 shfl; 9.7.13 vote, match, redux, activemask, elect)."""

from emulator.ptx.encoding import ABS, NAN
from emulator.ptx.statement import Statement, decodes


@decodes("shfl")
def _shfl(s: Statement) -> None:
    s.expect("sync", "b32")
    mode = s.need({"up": 0, "down": 1, "bfly": 2, "idx": 3})
    dst = s.dst_pair()
    s.emit("Shuffle", dst=dst, src=[s.src() for _ in range(4)], mode=mode)


@decodes("vote")
def _vote(s: Statement) -> None:
    s.expect("sync")
    mode = s.need({"all": 0, "any": 1, "uni": 2, "ballot": 3})
    s.expect("b32" if mode == 3 else "pred")
    s.emit("Vote", dst=[s.dst()], src=[s.src(), s.src()], mode=mode)


@decodes("match")
def _match(s: Statement) -> None:
    s.expect("sync")
    mode = s.need({"any": 0, "all": 1})
    dst = s.dst_pair()
    s.emit("Match", type=s.type(), dst=dst, src=[s.src(), s.src()], mode=mode)


@decodes("redux")
def _redux(s: Statement) -> None:
    s.expect("sync")
    mode = s.need({"add": 0, "min": 1, "max": 2, "and": 3, "or": 4, "xor": 5})
    flags = (NAN if s.flag("NaN") else 0) | (ABS if s.flag("abs") else 0)
    s.emit("Redux", type=s.type(), dst=[s.dst()], src=[s.src(), s.src()], mode=mode, flags=flags)


@decodes("activemask")
def _activemask(s: Statement) -> None:
    s.expect("b32")
    s.emit("ActiveMask", dst=[s.dst()])


@decodes("elect")
def _elect(s: Statement) -> None:
    s.expect("sync")
    dst = s.dst_pair()
    if len(dst) != 2:
        s.error("two destinations expected")
    s.emit("Elect", dst=dst, src=[s.src()])
