"""Numbers that the parser and the interpreter share: instructions, types, special registers.

The opcodes are read from ``interpreter/opcodes.def``; the other lists are repeated, in the same
order, in ``interpreter/instruction.h``.
"""

import re
from pathlib import Path

import numpy as np


class PtxError(Exception):
    """PTX that the emulator does not execute; the text names the line and what is unknown."""


INTERPRETER = Path(__file__).parents[1] / "interpreter"


def _numbered(names: str) -> dict[str, int]:
    return {name: i for i, name in enumerate(names.split())}


OPS = {
    name: i
    for i, name in enumerate(
        re.findall(r"^OP\((\w+),", (INTERPRETER / "opcodes.def").read_text(), re.MULTILINE)
    )
}
TYPES = _numbered(
    "b8 b16 b32 b64 u8 u16 u32 u64 s8 s16 s32 s64 f16 bf16 f32 f64 pred f32x2 f16x2 bf16x2 b128 "
    "e4m3x2 e5m2x2 e2m1x2 ue8m0x2 e2m3x2 e3m2x2 tf32 u16x2 s16x2 e4m3 e5m2 e2m1"
)
SPECIAL_REGISTERS = _numbered(
    "tid.x tid.y tid.z ntid.x ntid.y ntid.z ctaid.x ctaid.y ctaid.z nctaid.x nctaid.y nctaid.z "
    "laneid warpid nwarpid smid nsmid gridid clock clock_hi clock64 globaltimer globaltimer_lo "
    "globaltimer_hi cluster_ctarank cluster_nctarank cluster_ctaid.x cluster_ctaid.y "
    "cluster_ctaid.z cluster_nctaid.x cluster_nctaid.y cluster_nctaid.z clusterid.x clusterid.y "
    "clusterid.z nclusterid.x nclusterid.y nclusterid.z lanemask_eq lanemask_lt lanemask_le "
    "lanemask_gt lanemask_ge dynamic_smem_size total_smem_size"
)
SPACES = _numbered("generic global shared cluster local param")
"""State spaces; `shared` is the CTA's own window, `cluster` any CTA's of the cluster."""
BITS = {
    "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32,
    "u32": 32, "s32": 32, "f32": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64, "pred": 1,
    "f16x2": 32, "bf16x2": 32, "f32x2": 64, "b128": 128, "u16x2": 32, "s16x2": 32, "tf32": 32,
    "e4m3x2": 16, "e5m2x2": 16, "e2m1x2": 8, "ue8m0x2": 16,
}  # fmt: skip
FLOATS = {"f16", "bf16", "f32", "f64", "f32x2", "f16x2", "bf16x2"}
COMPARISONS = _numbered("eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan")
BOOLEANS = {"and": 1, "or": 2, "xor": 3}
ATOMICS = _numbered("add min max and or xor exch cas inc dec")
ROUNDINGS = _numbered("rn rz rm rp rni rzi rmi rpi rna")
FTZ, NAN, SAT, SATFINITE, RELU, ABS, NOFTZ = 1, 2, 4, 8, 16, 32, 64
"""Bits of an instruction's flags: what ``.ftz .NaN .sat .satfinite .relu .abs .noftz`` set."""

INSTRUCTION = np.dtype(
    [
        (name, "<i4")
        for name in (
            "op", "type", "type2", "mode", "mode2", "flags", "predicate", "negated", "num_dst",
            "num_src", "dst", "src",
        )
    ]
    + [("immediate", "<i8"), ("target", "<i4"), ("line", "<i4")]
)  # fmt: skip
"""One instruction, 64 bytes: ``struct Instruction`` of interpreter/instruction.h.

`dst` and `src` are offsets into the kernel's operand pool, whose entries are registers (from 0) or
constants (-1 for the first). `mode`, `mode2` and `flags` mean what the opcode's file says.
"""


def align(value: int, alignment: int) -> int:
    """`value` rounded up to a multiple of `alignment`."""
    return -(-value // alignment) * alignment


def number(text: str) -> int | None:
    """A PTX literal's bits; None if the text is none (PTX ISA 4.5, Constants)."""
    text = text.strip()
    if found := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})", text):
        return int(found[1] or found[2], 16)
    text = re.sub(r"(?<=[0-9a-fA-F])[uU]$", "", text)
    if re.fullmatch(r"-?0[xX][0-9a-fA-F]+|-?0[bB][01]+|-?[1-9]\d*|0", text):
        return int(text, 0)
    return int(text, 8) if re.fullmatch(r"-?0[0-7]+", text) else None


def split_commas(text: str) -> list[str]:
    """Parts of a list of operands; commas inside brackets do not count."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        if character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts
