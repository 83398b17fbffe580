"""mbarrier objects in shared memory (PTX ISA 9.7.13, mbarrier)."""

from emulator.ptx.encoding import SPACES
from emulator.ptx.statement import SCOPES, Statement, decodes


@decodes("mbarrier")
def _mbarrier(s: Statement) -> None:
    kinds = {
        "init": _init, "inval": _init, "arrive": _arrive, "try_wait": _wait, "test_wait": _wait,
        "expect_tx": _transactions, "complete_tx": _transactions,
    }  # fmt: skip
    # ``arrive.expect_tx`` is an arrival: the order of the names decides.
    name = next((q for q in s.qualifiers if q in kinds), "")
    s.need({name: name} if name else kinds)
    s.drop("acquire", "release", "relaxed", SCOPES)
    space = s.space()
    s.drop("b64")
    own = int(space == SPACES["shared"])
    kinds[name](s, name, own)


def _init(s: Statement, kind: str, own: int) -> None:
    base, offset = s.address()
    src = [base, *([s.src()] if kind == "init" else [])]
    s.emit("BarrierInit" if kind == "init" else "BarrierInval", src=src, immediate=offset)


def _arrive(s: Statement, kind: str, own: int) -> None:
    expect = s.flag("expect_tx")
    # The state that an arrival returns is only of use to waits without a parity: refused below.
    if len(s.operands) > 1 and not s.operands[0].startswith("["):
        s.dst()
    base, offset = s.address()
    src = [base, *s.rest()]
    if len(src) > 2 or (expect and len(src) != 2):
        s.error("number of operands")
    s.emit("BarrierArriveOn", src=src, immediate=offset, mode=own, mode2=int(expect))


def _wait(s: Statement, kind: str, own: int) -> None:
    s.expect("parity")
    dst = [s.dst()]
    base, offset = s.address()
    src = [base, s.src()]
    if s.operands:
        s.src()  # try_wait's time hint
    s.emit("BarrierTest", dst=dst, src=src, immediate=offset, mode2=int(kind == "try_wait"))


def _transactions(s: Statement, kind: str, own: int) -> None:
    base, offset = s.address()
    src, complete = [base, s.src()], int(kind == "complete_tx")
    s.emit("BarrierTransactions", src=src, immediate=offset, mode=own, mode2=complete)
