"""Matrix multiplication by a warpgroup (PTX ISA 9.7.15, wgmma)."""

from emulator.ptx.statement import Statement, decodes

_TYPES = {"e4m3": (0, 32), "e5m2": (1, 32), "bf16": (4, 16), "f16": (5, 16)}


@decodes("wgmma")
def _wgmma(s: Statement) -> None:
    kind = s.need({k: k for k in ("fence", "commit_group", "wait_group", "mma_async")})
    s.expect("sync", "aligned")
    if kind != "mma_async":
        if kind == "wait_group":
            s.literal()
        return s.emit("Nop")
    shape = s.matching(r"m64n(\d+)k(\d+)")
    columns, depth = int(shape[1]), int(shape[2])
    types = [q for q in s.qualifiers if q == "f32" or q in _TYPES]
    s.qualifiers = [q for q in s.qualifiers if q not in types]
    if len(types) != 3 or types[0] != "f32" or not {*types[1:]} <= {*_TYPES}:
        s.error("types not supported")
    (left, left_depth), (right, right_depth) = (_TYPES[t] for t in types[1:])
    if columns % 8 or not 8 <= columns <= 256 or (left_depth, right_depth) != (depth, depth):
        s.error("shape not supported")
    sums = s.dsts()
    in_registers = s.operands[0].startswith("{")
    a = s.srcs()
    src = [s.src(), s.src(), *a]
    if len(sums) != columns // 2 or len(a) != (4 if in_registers else 1):
        s.error("number of registers")
    # Scales of the operands, then, for 16-bit types, whether they are transposed.
    expected = [1, 1] + [0] * ((1 if in_registers else 2) if depth == 16 else 0)
    if [s.literal() for _ in range(len(s.operands))] != expected:
        s.error("negated or transposed operands are not supported")
    s.emit("Wgmma", dst=sums, src=[*src, *sums], mode=columns, mode2=left | right << 4,
           flags=int(in_registers))  # fmt: skip
