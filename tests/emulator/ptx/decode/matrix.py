"""Warp matrices (PTX ISA 9.7.14: ldmatrix, stmatrix, mma.sync)."""

from emulator.ptx.statement import Statement, decodes

# Types of a and b: their number in interpreter/instructions/matrix.cc, bits of an element.
_ELEMENTS = {"f16": (0, 16), "bf16": (1, 16), "e4m3": (2, 8), "e5m2": (3, 8), "s8": (4, 8),
             "u8": (5, 8), "e2m1": (6, 4)}  # fmt: skip


@decodes("stmatrix")
def _stmatrix(s: Statement) -> None:
    s.expect("sync", "aligned")
    count, shape = _matrices(s)
    wide = s.need({"b16": 0, "b8": 1})
    transposed = int(s.flag("trans"))
    if (shape == "m16n8") != bool(wide) or (wide and not transposed):
        s.error("shape and type not supported")
    base, offset = s.address()
    src = [base, *s.srcs()]
    if len(src) != count + 1:
        s.error("number of registers")
    s.emit("StoreMatrix", src=src, mode=count, mode2=transposed, flags=wide, immediate=offset)


@decodes("ldmatrix")
def _ldmatrix(s: Statement) -> None:
    s.expect("sync", "aligned")
    count, shape = _matrices(s)
    s.expect("b16")
    if shape != "m8n8":
        s.error("shape not supported")
    transposed = int(s.flag("trans"))
    dst = s.dsts()
    base, offset = s.address()
    if len(dst) != count:
        s.error("number of registers")
    s.emit("LoadMatrix", dst=dst, src=[base], mode=count, mode2=transposed, immediate=offset)


def _matrices(s: Statement) -> tuple[int, str]:
    s.need({"shared": 0, "shared::cta": 0})
    count = s.need({"x1": 1, "x2": 2, "x4": 4})
    return count, s.need({"m8n8": "m8n8", "m16n8": "m16n8", "m16n16": "m16n16"})


@decodes("mma")
def _mma(s: Statement) -> None:
    s.expect("sync", "aligned", "row", "col")
    scale = _scale(s)
    shape = s.matching(r"m16n8k(\d+)")
    s.drop("satfinite")
    d, a, b, c = _mma_types(s)
    depth = int(shape[1])
    number, bits = _ELEMENTS.get(a, (-1, 0))
    other, other_bits = _ELEMENTS.get(b, (-1, 0))
    wanted = ("s32", "s32") if a in ("s8", "u8") else ("f32", "f32")
    if number < 0 or other < 0 or (d, c) != wanted:
        s.error("types not supported")
    if scale == 0 and (bits != other_bits or bits == 4):
        s.error("types not supported")
    registers = s.dsts()
    left, right, sums = s.srcs(), s.srcs(), s.srcs()
    width = max(bits, other_bits)
    if (
        (len(registers), len(sums)) != (4, 4)
        or len(left) != depth * width * 16 // 1024
        or (len(right) != depth * width * 8 // 1024)
    ):
        s.error("number of registers")
    scales = [each for _ in range(2 if scale else 0) for each in (s.src(), *s.srcs())]
    s.emit("Mma", dst=registers, src=[*left, *right, *sums, *scales], mode=depth,
           mode2=number | other << 4, flags=scale)  # fmt: skip


def _mma_types(s: Statement) -> list[str]:
    """Types of d, a, b and c; those of the scales are `_scale`'s."""
    known = {*_ELEMENTS, "f32", "s32"}
    found = [q for q in s.qualifiers if q in known]
    s.qualifiers = [q for q in s.qualifiers if q not in known]
    if len(found) != 4:
        s.error("four types expected")
    return found


def _scale(s: Statement) -> int:
    """0 without block scales; else elements a scale and 256 for UE8M0."""
    kind = s.choice({"kind::mxf8f6f4": 1, "kind::mxf4": 2, "kind::mxf4nvf4": 3}, 0)
    if not kind:
        return 0
    s.expect("block_scale")
    vectors = {"scale_vec::1X": 1, "scale_vec::2X": 2, "scale_vec::4X": 4}
    vector = s.choice(vectors, 0 if kind == 3 else kind)
    exponent = s.need({"ue8m0": 256, "ue4m3": 0})
    allowed = ((1, 1, 256), (2, 2, 256), (3, 2, 256), (3, 4, 0), (3, 4, 256))
    if (kind, vector, exponent) not in allowed:
        s.error("block scales not supported")
    return vector | exponent
