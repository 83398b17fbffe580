"""What a launch must agree with, read from a cubin: its kernels and where their parameters lie.

A cubin is an ELF file. Each kernel has a section ``.nv.info.<kernel>`` of attributes: a byte for
the form, a byte for the attribute, two bytes that are the value or the length of what follows.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_SIZED = 4  # form of an attribute whose value follows it
_REGISTER_COUNT = 0x2F  # in .nv.info: u32 symbol, u32 registers
_PARAMETER = 0x17  # u32 index, u16 ordinal, u16 offset, u32 whose upper 14 bits are the size
_PARAMETER_BANK = (
    0x0A  # u32 symbol of the bank, u16 where in constant bank 0 the block starts, u16 size
)
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")


@dataclass(frozen=True)
class CubinKernel:
    """A kernel of a cubin.

    Attributes:
        symbol: its mangled name.
        parameters: (offset, bytes) of each in the parameter block, in order.
        parameter_base: where the parameter block starts in constant bank 0, bytes.
        parameter_bytes: size of the block.
        registers: a thread's.
    """

    symbol: str
    parameters: tuple[tuple[int, int], ...]
    parameter_base: int
    parameter_bytes: int
    registers: int


def read_kernels(cubin: bytes) -> tuple[CubinKernel, ...]:
    """The kernels of a cubin, in file order.

    Raises:
        ValueError: not a 64-bit little-endian ELF file, or one that ends early.
    """
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"cubin: expected a 64-bit ELF file, got {cubin[:6]!r}")
    try:
        return tuple(_kernels(dict(_sections(cubin))))
    except (struct.error, ValueError, IndexError, KeyError) as error:
        raise ValueError(f"cubin: expected a whole ELF file, got {len(cubin)} bytes") from error


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [_SECTION.unpack_from(cubin, table + i * entry_bytes) for i in range(count)]
    names_at, names_bytes = headers[names_index][4:6]
    names = cubin[names_at : names_at + names_bytes]
    for name_at, _, _, _, offset, size, *_ in headers:
        yield _name(names, name_at), cubin[offset : offset + size]


def _name(names: bytes, at: int) -> str:
    return names[at : names.index(b"\0", at)].decode()


def _kernels(sections: dict[str, bytes]) -> Iterator[CubinKernel]:
    prefix = ".nv.info."
    registers: dict[str, int] = {}
    for attribute, value in _attributes(sections[".nv.info"]):
        if attribute == _REGISTER_COUNT:
            index, count = struct.unpack("<II", value)
            name_at = _SYMBOL.unpack_from(sections[".symtab"], index * _SYMBOL.size)[0]
            registers[_name(sections[".strtab"], name_at)] = count
    for name, content in sections.items():
        if not name.startswith(prefix):
            continue
        attributes = list(_attributes(content))
        bank = next((value for key, value in attributes if key == _PARAMETER_BANK), None)
        if bank is None:
            continue  # a device function
        _, base, size = struct.unpack("<IHH", bank)
        places = sorted(
            struct.unpack("<IHHI", value)[1:] for key, value in attributes if key == _PARAMETER
        )
        symbol = name.removeprefix(prefix)
        yield CubinKernel(
            symbol,
            tuple((offset, packed >> 18) for _, offset, packed in places),
            base,
            size,
            registers[symbol],
        )


def _attributes(content: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(content):
        form, attribute, value = struct.unpack_from("<BBH", content, at)
        at += 4
        if form == _SIZED:
            yield attribute, content[at : at + value]
            at += value
