"""The statements of one kernel: directives, labels, scopes, and operands of instructions."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from emulator.ptx.encoding import (
    BITS,
    INSTRUCTION,
    OPS,
    SPECIAL_REGISTERS,
    TYPES,
    PtxError,
    align,
    number,
)
from emulator.ptx.statement import DECODERS, Statement

if TYPE_CHECKING:
    from emulator.ptx.module import Module

_LABEL = re.compile(r"([\w$]+)\s*:(?!:)")
_TARGETS = re.compile(r"\s*\.branchtargets\s+([^;]*);")
_VARIABLE = re.compile(
    r"\.(local|shared)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?"
)
_CALL_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+([\w$]+)")
# Directives that change nothing of what is computed (PTX ISA 11, Directives).
_WITHOUT_EFFECT = (".pragma", ".noreturn")


class Body:
    """Decodes the text between a kernel's braces.

    Attributes:
        instructions: fields of `encoding.INSTRUCTION` for each instruction.
        pool, constants: operands, and the constants that negative ones number.
        locations: the ``.loc`` (file, line) in force at each instruction, or None.
        line: the PTX line being decoded.
    """

    def __init__(self, module: "Module", parameters: dict[str, int], text: str, line: int) -> None:
        self.module, self.parameters, self.text, self.line = module, parameters, text, line
        self.instructions: list[dict[str, int]] = []
        self.pool: list[int] = []
        self.constants: list[int] = []
        self.locations: list[tuple[int, int] | None] = []
        self.num_registers = self.local_bytes = 0
        self._constant_index: dict[int, int] = {}
        self._locals: dict[str, int] = {}
        self._location: tuple[int, int] | None = None
        self._scopes: list[dict[str, int]] = [{}]
        self._labels: list[dict[str, int]] = [{}]
        # References to labels: instruction, name, depth of its scope, place in the pool.
        self._references: list[tuple[int, str, int, int | None]] = []
        self._tables: dict[str, list[str]] = {}
        self._predicate = (-1, 0)

    def error(self, what: str) -> NoReturn:
        """Raises PtxError with the line."""
        raise PtxError(f"PTX line {self.line}: {what}")

    # Statements

    def run(self) -> None:
        """Decodes all statements; a return is added at the end."""
        text, position = self.text, 0
        while position < len(text):
            character = text[position]
            if character.isspace() or character == ";":
                self.line += character == "\n"
                position += 1
            elif character == "{":
                self._scopes.append({})
                self._labels.append({})
                position += 1
            elif character == "}":
                self._leave()
                position += 1
            elif text.startswith((".loc ", ".loc\t"), position):
                end = text.index("\n", position)
                numbers = re.match(r"\.loc\s+(\d+)\s+(\d+)", text[position:end])
                self._location = (int(numbers[1]), int(numbers[2])) if numbers else None
                position = end
            elif label := _LABEL.match(text, position):
                self._labels[-1][label[1]] = len(self.instructions)
                position = label.end()
                if table := _TARGETS.match(text, position):
                    self._tables[label[1]] = [t.strip() for t in table[1].split(",")]
                    position = table.end()
            else:
                end = text.index(";", position)
                self._statement(" ".join(text[position:end].split()))
                self.line += text.count("\n", position, end)
                position = end + 1
        self.emit("Return")
        self._leave()
        if self._references:
            self.error(f"label {self._references[0][1]} not found")

    def _leave(self) -> None:
        """Ends a scope: references made in it or deeper see its labels."""
        depth = len(self._labels)
        labels = self._labels.pop()
        self._scopes.pop()
        rest = []
        for index, name, made_at, place in self._references:
            if made_at >= depth and name in labels:
                if place is None:
                    self.instructions[index]["target"] = labels[name]
                else:
                    self.pool[place] = labels[name]
            else:
                rest.append((index, name, min(made_at, depth - 1), place))
        self._references = rest

    def _statement(self, text: str) -> None:
        if text.startswith("."):
            return self._directive(text)
        if guard := re.match(r"@(!?)(%?[\w$]+)\s+", text):
            self._predicate = (self.destination(guard[2]), int(guard[1] == "!"))
            text = text[guard.end() :]
        opcode = re.match(r"[\w.:]+", text)
        if not opcode:
            self.error(f"statement `{text}` not understood")
        statement = Statement(self, opcode[0], text[opcode.end() :].strip())
        decoder = DECODERS.get(statement.name)
        if decoder is None:
            statement.error(f"instruction {statement.name} not supported")
        decoder(statement)
        statement.done()
        self._predicate = (-1, 0)

    def _directive(self, text: str) -> None:
        if text.startswith(_WITHOUT_EFFECT):
            return
        if found := re.match(r"\.reg\s+\.(\w+)\s+(.*)", text):
            if found[1] not in BITS:
                self.error(f"register type .{found[1]} not supported")
            for name in found[2].split(","):
                self._declare(name.strip())
        elif found := _VARIABLE.fullmatch(text):
            if found[1] == "shared":
                self.module.variable(text, self.line)
                return
            size = BITS[found[3]] // 8
            self.local_bytes = align(self.local_bytes, int(found[2] or size))
            self._locals[found[4]] = self.local_bytes
            self.local_bytes += size * int(found[5] or 1)
        elif found := _CALL_PARAMETER.match(text):
            self._scopes[-1]["param:" + found[2]] = self.temporary()
        else:
            self.error(f"directive `{text}` not supported")

    def _declare(self, name: str) -> None:
        if many := re.fullmatch(r"(%?[\w$]+)<(\d+)>", name):
            for i in range(int(many[2])):
                self._scopes[-1][f"{many[1]}{i}"] = self.temporary()
        else:
            self._scopes[-1][name] = self.temporary()

    # Operands

    def temporary(self) -> int:
        """A new register."""
        self.num_registers += 1
        return self.num_registers - 1

    def lookup(self, name: str) -> int | None:
        """The register of a name; None if it is none."""
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        return None

    def call_parameter(self, name: str) -> int:
        """The register that stands for a ``.param`` variable of a call."""
        register = self.lookup("param:" + name)
        if register is None:
            self.error(f"parameter {name} of a call not declared")
        return register

    def is_call_parameter(self, name: str) -> bool:
        """Whether a name is a ``.param`` variable of a call."""
        return self.lookup("param:" + name) is not None

    def constant(self, value: int) -> int:
        """The operand that stands for a constant."""
        value &= (1 << 64) - 1
        if value not in self._constant_index:
            self._constant_index[value] = len(self.constants)
            self.constants.append(value)
        return -1 - self._constant_index[value]

    def destination(self, text: str) -> int:
        """A register that is written; ``_`` is one that nobody reads."""
        text = text.strip()
        register = self.temporary() if text == "_" else self.lookup(text)
        if register is None:
            self.error(f"register {text} not declared")
        return register

    def source(self, text: str) -> int:
        """A register or a constant; `emit`s what computes it, if it must be computed."""
        text = text.strip()
        if text.startswith("!"):
            operand, target = self.source(text[1:]), self.temporary()
            self.emit("Not", type="pred", dst=[target], src=[operand], guarded=False)
            return target
        register = self.lookup(text)
        if register is not None:
            return register
        value = number(text)
        if value is not None:
            return self.constant(value)
        if text.startswith("%") and text[1:] in SPECIAL_REGISTERS:
            target, mode = self.temporary(), SPECIAL_REGISTERS[text[1:]]
            self.emit("SpecialRegister", type="b64", dst=[target], mode=mode, guarded=False)
            return target
        return self._symbol(text)

    def _symbol(self, text: str) -> int:
        found = re.fullmatch(r"([\w$]+)\s*(?:\+\s*(-?\d+))?", text)
        if not found:
            self.error(f"operand {text} not understood")
        name, offset = found[1], int(found[2] or 0)
        module = self.module
        if name in self.parameters:
            op, base, mode = "ParameterAddress", self.parameters[name], 0
        elif name in self._locals:
            op, base, mode = "LocalAddress", self._locals[name], 0
        elif name in module.shared:
            op, base, mode = "SharedAddress", module.shared[name], 0
        elif name in module.dynamic:
            op, base, mode = "SharedAddress", 0, 1
        elif name in module.globals:
            op, base, mode = "GlobalAddress", module.globals[name], 0
        else:
            self.error(f"symbol {name} not declared")
        target = self.temporary()
        self.emit(op, dst=[target], immediate=base + offset, mode=mode, guarded=False)
        return target

    def address(self, text: str) -> tuple[int, int]:
        """``[base+offset]``: an operand and a number."""
        found = re.fullmatch(r"\[\s*(%?[\w$]+)\s*(?:([+-])\s*(-?\d+))?\s*\]", text.strip())
        if not found:
            self.error(f"address {text} not understood")
        offset = int(found[3] or 0) * (-1 if found[2] == "-" else 1)
        return self.source(found[1]), offset

    def sum(self, base: int, offset: int) -> int:
        """A register with ``base + offset``."""
        target = self.temporary()
        source = [base, self.constant(offset)]
        self.emit("Add", type="b64", dst=[target], src=source, guarded=False)
        return target

    # Instructions

    def emit(
        self, op: str, *, type: str = "b32", type2: str = "b32", dst: Sequence[int] = (),
        src: Sequence[int] = (), mode: int = 0, mode2: int = 0, flags: int = 0, immediate: int = 0,
        guarded: bool = True,
    ) -> None:  # fmt: skip
        """Adds an instruction; `guarded`: under the statement's predicate."""
        predicate, negated = self._predicate if guarded else (-1, 0)
        fields = dict(
            op=OPS[op], type=TYPES[type], type2=TYPES[type2], mode=mode, mode2=mode2, flags=flags,
            predicate=predicate, negated=negated, num_dst=len(dst), num_src=len(src),
            dst=len(self.pool), src=len(self.pool) + len(dst), immediate=immediate, target=-1,
            line=self.line,
        )  # fmt: skip
        self.pool += [*dst, *src]
        self.instructions.append(fields)
        self.locations.append(self._location)

    def branch(self, label: str) -> None:
        """Adds a branch to a label, which may come later."""
        self.emit("Branch")
        self._references.append((len(self.instructions) - 1, label, len(self._labels), None))

    def branch_indexed(self, index: int, table: str) -> None:
        """Adds a branch to one of a table's labels."""
        if table not in self._tables:
            self.error(f"branch targets {table} not declared")
        names = self._tables[table]
        self.emit("BranchIndexed", src=[index, *([0] * len(names))])
        at = len(self.instructions) - 1
        first = self.instructions[at]["src"] + 1
        for i, name in enumerate(names):
            self._references.append((at, name, len(self._labels), first + i))

    def array(self) -> np.ndarray:
        """The instructions as an array of `encoding.INSTRUCTION`."""
        rows = [tuple(inst[name] for name in INSTRUCTION.names or ()) for inst in self.instructions]
        return np.array(rows, INSTRUCTION)
