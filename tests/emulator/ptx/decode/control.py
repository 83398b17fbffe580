"""Control flow (PTX ISA 9.7.12), dependent grids (9.7.13); ends and delays of threads (9.7.19)."""

import re

from emulator.ptx.statement import Statement, decodes


@decodes("bra")
def _bra(s: Statement) -> None:
    s.drop("uni")
    s.body.branch(s.take())


@decodes("brx")
def _brx(s: Statement) -> None:
    s.expect("idx")
    s.drop("uni")
    s.body.branch_indexed(s.src(), s.take())


@decodes("ret", "exit")
def _ret(s: Statement) -> None:
    s.drop("uni")
    s.emit("Return")


@decodes("trap", "brkpt")
def _trap(s: Statement) -> None:
    s.emit("Trap")


@decodes("call")
def _call(s: Statement) -> None:
    """Of functions, only printf and assert are known."""
    s.drop("uni")
    found = re.fullmatch(
        r"call\S*\s+(?:\(([\w$]+)\)\s*,\s*)?([\w$]+)\s*(?:,\s*\(([^)]*)\))?", s.text
    )
    known = {"vprintf": "Printf", "__assertfail": "AssertFail"}
    if not found or found[2] not in known:
        s.error("call of a function that is not supported")
    s.operands.clear()
    arguments = [a.strip() for a in (found[3] or "").split(",") if a.strip()]
    s.emit(known[found[2]], src=[s.body.call_parameter(a) for a in arguments])


@decodes("nanosleep")
def _nanosleep(s: Statement) -> None:
    s.expect("u32")
    s.src()
    s.emit("Nop")


@decodes("griddepcontrol")
def _griddepcontrol(s: Statement) -> None:
    s.emit(s.need({"launch_dependents": "GridTrigger", "wait": "GridWait"}))


@decodes("setmaxnreg")
def _setmaxnreg(s: Statement) -> None:
    s.need({"inc": 0, "dec": 1})
    s.expect("sync", "aligned", "u32")
    registers = s.literal()
    if registers % 8 or not 24 <= registers <= 256:
        s.error("register count must be a multiple of 8 from 24 to 256")
    s.emit("Nop")
