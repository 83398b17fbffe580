"""cp: non-bulk asynchronous copies (PTX ISA 9.7.9, cp.async); others by their qualifiers."""

from emulator.ptx.decode import bulk_copy, tensor_copy
from emulator.ptx.statement import CACHE_HINTS, Statement, decodes


@decodes("cp")
def _cp(s: Statement) -> None:
    if s.flag("reduce"):
        s.expect("async", "bulk")
        return tensor_copy.copy(s, reduce=True) if s.flag("tensor") else bulk_copy.reduce(s)
    s.expect("async")
    if s.flag("bulk"):
        return tensor_copy.copy(s) if s.flag("tensor") else bulk_copy.copy(s)
    if s.flag("commit_group"):
        return s.emit("CopyCommit")
    if s.flag("wait_group"):
        return s.emit("CopyWait", immediate=s.literal())
    if s.flag("wait_all"):
        return s.emit("CopyWait", immediate=0, mode=1)
    if s.flag("mbarrier"):
        return _arrive(s)
    _copy(s)


def _arrive(s: Statement) -> None:
    s.expect("arrive")
    noinc = int(s.flag("noinc"))
    s.space()
    s.expect("b64")
    base, offset = s.address()
    s.emit("CopyArrive", src=[base], mode=noinc, immediate=offset)


def _copy(s: Statement) -> None:
    s.need({"ca": 0, "cg": 1})
    s.need({"shared": 0, "shared::cta": 0})
    s.expect("global")
    if s.flag("L2::cache_hint"):
        s.operands.pop()
    s.drop(CACHE_HINTS)
    to, source, size = s.bare_address(), s.bare_address(), s.literal()
    if size not in (4, 8, 16):
        s.error("4, 8 or 16 bytes expected")
    # Bytes beyond a source size are filled with zeros.
    source_size = s.src() if s.operands else s.body.constant(size)
    s.emit("CopyAsync", src=[to, source, source_size], mode=size)
