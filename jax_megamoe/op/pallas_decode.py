"""Stored weights to BF16 in the registers of a Pallas kernel.

Assembly does it two values an operation, on compute capability 8.0 and newer: four bytes are spread
over the upper halves of 16-bit lanes, their exponents and mantissas moved where BF16 has them, and
the difference of the exponents' biases multiplied in. Every step is exact.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Int32, UInt8

_LANES = 0x80008000
"""The signs of two BF16; as two BF16, what a sum is not changed by."""


def _assembly(moves: str, mask: int, bias: int, operands: int) -> str:
    """Assembly of four values in $0 and $1.

    Args:
        moves: instructions from bytes in the upper halves of r's lanes to s, whose exponent and
            mantissa are where BF16's are, and r, whose signs are.
        mask: exponent and mantissa in s.
        bias: two BF16 that multiply the difference of the biases.
        operands: 1, the codes, or 3, with four scales in two registers.
    """
    lines = [f"mov.b32 bias, {bias:#x};", f"mov.b32 none, {_LANES:#x};"]
    for half, spread in enumerate((0x1404, 0x3424)):
        lines.append(f"prmt.b32 r, $2, 0, {spread:#x};")
        lines.append(moves)
        lines.append(f"and.b32 s, s, {mask:#x};")
        lines.append(f"and.b32 r, r, {_LANES:#x};")
        lines.append("or.b32 s, s, r;")
        if operands == 1:
            lines.append(f"fma.rn.bf16x2 ${half}, s, bias, none;")
        else:
            lines.append("fma.rn.bf16x2 s, s, bias, none;")
            lines.append(f"fma.rn.bf16x2 ${half}, s, ${half + 3}, none;")
    return "{ .reg .b32 r, s, bias, none; " + " ".join(lines) + " }"


# Between the biases 7 of E4M3 and 127 are 2^120, between 1 of E2M1 and 127 2^126. The odd value of
# a pair has the upper four bits.
_MOVES = {
    "e4m3": ("shr.u32 s, r, 4;", 0x07F007F0, 0x7B807B80),
    "e2m1 odd": ("shr.u32 s, r, 6;", 0x01C001C0, 0x7E807E80),
    "e2m1 even": ("shr.u32 s, r, 2; shl.b32 r, r, 4;", 0x01C001C0, 0x7E807E80),
}


def assembly(name: str, *, scaled: bool) -> str:
    """The assembly that decodes four bytes.

    Args:
        name: ``"e4m3"``, ``"e2m1 odd"`` or ``"e2m1 even"``.
        scaled: four scales follow the codes.
    """
    return _assembly(*_MOVES[name], operands=3 if scaled else 1)


def decoded(
    name: str, codes: Any, scales: BFloat16[Array, "n k"] | None, *, assembled: bool
) -> BFloat16[Array, "n k"]:
    """Values times scales; NaN of E4M3 becomes 480.

    Args:
        name: as of `assembly`.
        codes: float8_e4m3fn [N, K] or uint8 pairs.
        scales: of each value; None: 1.
        assembled: False where an interpreter runs the kernel.
    """
    if not assembled:
        values = codes.astype(jnp.bfloat16) if name == "e4m3" else _e2m1(codes, name)
        return values if scales is None else values * scales
    from jax.experimental.pallas import triton  # noqa: PLC0415 (a JAX without it has no kernel)

    if codes.dtype != jnp.uint8:
        codes = lax.bitcast_convert_type(codes, jnp.uint8)
    (values,) = triton.elementwise_inline_asm(
        assembly(name, scaled=scales is not None),
        args=[codes] if scales is None else [codes, scales],
        constraints="=r,=r,r" + ",r,r" * (scales is not None),
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16)],
    )
    return values


def _e2m1(pairs: UInt8[Array, "n half"], name: str) -> BFloat16[Array, "n half"]:
    bits = (pairs >> 4 if name == "e2m1 odd" else pairs & 15).astype(jnp.uint16)
    half = lax.bitcast_convert_type(((bits & 8) << 12) | ((bits & 7) << 9), jnp.float16)
    return (half.astype(jnp.float32) * jnp.float32(2**14)).astype(jnp.bfloat16)


def word_rows(row: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """Where a row's scale words are, `weights.layout.UTCCP`."""
    return row // 128 * 128 + row % 32 * 4 + row % 128 // 32


def spread_scales(words: Int32[Array, " n"], each: int) -> BFloat16[Array, "n k"]:
    """UE8M0 scales of 128 k of each row, every one `each` times: [N, 4 * each]."""
    shifts = 8 * jnp.arange(4, dtype=jnp.int32)
    shape = (words.shape[0], 4)
    words = jnp.broadcast_to(words[:, None], shape)
    exponent = (words >> jnp.broadcast_to(shifts[None, :], shape)) & 255
    # 2^-127 is no normal number.
    bits = jnp.where(exponent == 0, 0x40, exponent << 7).astype(jnp.uint16)
    scales = lax.bitcast_convert_type(bits, jnp.bfloat16)
    return lax.broadcast_in_dim(scales, (*shape, each), (0, 1)).reshape(shape[0], 4 * each)
