"""A PTX module: its variables and kernels (PTX ISA 5, State spaces, and 11, Directives)."""

import re
from dataclasses import dataclass, field

import numpy as np

import emulator.ptx.decode  # noqa: F401 (registers the decoders)
from emulator.ptx.body import Body
from emulator.ptx.encoding import BITS, PtxError, align, number, split_commas
from emulator.ptx.registers import compact

_VARIABLE = re.compile(
    r"((?:\.\w+\s+)*?)\.(global|const|shared)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)"
    r"(\[(\d*)\])?\s*(?:=\s*(.*))?",
    re.DOTALL,
)
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+(?:\.\w+\s+)*(?:\.align\s+\d+\s+)?)?"
    r"([\w$]+)(?:\[(\d+)\])?"
)
_ENTRY = re.compile(r"(?:\.visible\s+|\.weak\s+)?\.entry\s+([\w$]+)\s*\(")
_FUNCTION = re.compile(r"(\.extern\s+|\.visible\s+|\.weak\s+)?\.func\b")
_FILE = re.compile(r"\.file\s+(\d+)\s+\"([^\"]*)\"")
_HEADERS = (".version", ".target", ".address_size", ".file")
_THREADS = re.compile(r"\.maxntid\s+(\d+)")


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter: its place in the parameter block."""

    name: str
    offset: int
    size: int


@dataclass
class Kernel:
    """A kernel as the interpreter takes it.

    Attributes:
        instructions: array of `encoding.INSTRUCTION`.
        pool, constants: int32 operands; uint64 constants.
        local_bytes: local memory of a thread.
        static_shared, dynamic_at: bytes of static shared memory; where dynamic shared memory
            starts, behind it.
        globals, global_bytes, global_references: offsets and contents of the module's variables;
            (offset, name) of words that hold the address of another.
        locations, files, text: source of each instruction, for messages.
        max_threads: ``.maxntid``, or 0.
    """

    name: str
    parameters: list[Parameter]
    parameter_bytes: int
    instructions: np.ndarray
    pool: np.ndarray
    constants: np.ndarray
    num_registers: int
    local_bytes: int
    static_shared: int
    dynamic_at: int
    globals: dict[str, int]
    global_bytes: bytes
    global_references: list[tuple[int, str]]
    locations: list[tuple[int, int] | None]
    files: dict[int, str]
    max_threads: int
    text: list[str] = field(repr=False)


def parse(text: str) -> dict[str, Kernel]:
    """The kernels of a PTX module by name.

    Raises:
        PtxError: something is not supported; names the line.
    """
    return Module(text).kernels


class Module:
    """The module's variables while its kernels are decoded."""

    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        blocks = re.compile(r"/\*.*?\*/", re.DOTALL)
        text = blocks.sub(lambda comment: "\n" * comment[0].count("\n"), text)
        self._text = re.sub(r"//[^\n]*", "", text)
        self.globals: dict[str, int] = {}
        self._bytes = bytearray()
        self._references: list[tuple[int, str]] = []
        self.shared: dict[str, int] = {}
        self.dynamic: dict[str, int] = {}
        self._static_shared = 0
        self._files: dict[int, str] = {}
        self.kernels: dict[str, Kernel] = {}
        self._parse()

    def _line(self, position: int) -> int:
        return self._text.count("\n", 0, position) + 1

    def _parse(self) -> None:
        text, position = self._text, 0
        while found := re.compile(r"\S").search(text, position):
            position = found.start()
            if text.startswith(_HEADERS, position):
                end = text.index("\n", position)
                if file := _FILE.match(text, position):
                    self._files[int(file[1])] = file[2]
                position = end
            elif text.startswith(".section", position):
                position = self._closing(text.index("{", position))
            elif entry := _ENTRY.match(text, position):
                position = self._entry(entry)
            elif function := _FUNCTION.match(text, position):
                if "extern" not in (function[1] or ""):
                    line = self._line(position)
                    raise PtxError(f"PTX line {line}: device functions are not supported")
                position = text.index(";", position) + 1
            else:
                end = text.index(";", position)
                self.variable(text[position:end], self._line(position))
                position = end + 1

    def _closing(self, brace: int) -> int:
        """One past the brace that closes the one at `brace`."""
        depth = 0
        for i in range(brace, len(self._text)):
            depth += {"{": 1, "}": -1}.get(self._text[i], 0)
            if depth == 0:
                return i + 1
        raise PtxError(f"PTX line {self._line(brace)}: a brace is not closed")

    def variable(self, declaration: str, line: int) -> None:
        """Adds a variable of the module, or a shared one declared in a kernel."""
        if declaration.startswith(".pragma"):
            return
        found = _VARIABLE.fullmatch(declaration.strip())
        if not found or found[4] not in BITS:
            raise PtxError(f"PTX line {line}: declaration `{declaration[:80]}` not supported")
        space, name, is_array, count, values = found[2], found[5], found[6], found[7], found[8]
        size = BITS[found[4]] // 8
        alignment = int(found[3] or size)
        if space == "shared":
            if is_array and not count:
                self.dynamic[name] = alignment
            else:
                self._static_shared = align(self._static_shared, alignment)
                self.shared[name] = self._static_shared
                self._static_shared += size * int(count or 1)
            return
        start = align(len(self._bytes), max(alignment, 16))
        self._bytes.extend(bytes(start - len(self._bytes)))
        self.globals[name] = start
        data = self._values(values, size, start) if values else b""
        self._bytes.extend(data.ljust(size * int(count or 1), b"\0"))

    def _values(self, text: str, size: int, start: int) -> bytes:
        data = b""
        for each in split_commas(text.strip().strip("{}")):
            value = number(each)
            if value is None:
                name = re.fullmatch(r"(?:generic\()?([\w$]+)\)?", each)
                if not name:
                    raise PtxError(f"initial value `{each}` not supported")
                self._references.append((start + len(data), name[1]))
                value = 0
            data += (value & ((1 << (8 * size)) - 1)).to_bytes(size, "little")
        return data

    def _entry(self, entry: re.Match[str]) -> int:
        """Decodes a kernel; returns the position behind it."""
        text = self._text
        close = text.index(")", entry.end())
        parameters = self._parameters(text[entry.end() : close])
        brace = text.index("{", close)
        end = self._closing(brace)
        offsets = {p.name: p.offset for p in parameters}
        body = Body(self, offsets, text[brace + 1 : end - 1], self._line(brace))
        body.run()
        instructions = body.array()
        num_registers = compact(instructions, body.pool, body.num_registers)
        threads = _THREADS.search(text[close:brace])
        self.kernels[entry[1]] = Kernel(
            entry[1],
            parameters,
            max((p.offset + p.size for p in parameters), default=0),
            instructions,
            np.array(body.pool, np.int32),
            np.array(body.constants, np.uint64),
            num_registers,
            align(body.local_bytes, 16),
            self._static_shared,
            align(self._static_shared, max([16, *self.dynamic.values()])),
            dict(self.globals),
            bytes(self._bytes),
            self._references,
            body.locations,
            self._files,
            int(threads[1]) if threads else 0,
            self.lines,
        )
        return end

    @staticmethod
    def _parameters(text: str) -> list[Parameter]:
        parameters: list[Parameter] = []
        offset = 0
        for declaration in split_commas(text):
            found = _PARAMETER.fullmatch(declaration.strip())
            if not found or found[2] not in BITS:
                raise PtxError(f"parameter `{declaration}` not supported")
            size = BITS[found[2]] // 8
            offset = align(offset, int(found[1] or size))
            size *= int(found[4] or 1)
            parameters.append(Parameter(found[3], offset, size))
            offset += size
        return parameters
