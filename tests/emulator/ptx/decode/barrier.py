"""Barriers of warps, CTAs and clusters (PTX ISA 9.7.13: bar, bar.warp.sync, barrier.cluster)."""

from emulator.ptx.statement import Statement, decodes


@decodes("bar", "barrier")
def _bar(s: Statement) -> None:
    if s.flag("warp"):
        s.expect("sync")
        return s.emit("WarpSync", src=[s.src()])
    if s.flag("cluster"):
        wait = s.need({"arrive": False, "wait": True})
        s.drop("release", "relaxed", "acquire")
        aligned = s.flag("aligned")
        return s.emit("ClusterWait" if wait else "ClusterArrive", flags=int(aligned))
    s.drop("cta")
    if s.flag("red"):
        return _reduction(s)
    op = s.need({"sync": "BarrierSync", "arrive": "BarrierArrive"})
    aligned = s.flag("aligned") or s.name == "bar"
    src = s.rest()
    if len(src) > 2 or (op == "BarrierArrive" and len(src) != 2):
        s.error("number of operands")
    s.emit(op, src=src, flags=int(aligned))


def _reduction(s: Statement) -> None:
    s.error("barrier reductions are not supported")
