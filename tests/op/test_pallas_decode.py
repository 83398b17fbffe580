"""Decoding in a kernel's registers: the assembly, executed here, and what an interpreter runs."""

import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_megamoe.numerics.quantization import dequantize_mxfp4
from jax_megamoe.op import pallas_decode
from jax_megamoe.weights.layout import pack_scales, w2_scale_to_kernel

E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
BYTES = np.arange(256, dtype=np.uint8)


def fma(a: int, b: int, c: int) -> int:
    """fma.rn.bf16x2, by float64, which is exact for products of BF16 and a sum with -0."""
    lanes = np.uint32([a, b, c]).view(np.uint16).reshape(3, 2).view(ml_dtypes.bfloat16)
    x, y, z = lanes.astype(np.float64)
    return int((x * y + z).astype(ml_dtypes.bfloat16).view(np.uint16).view(np.uint32)[0])


def permuted(a: int, b: int, selector: int) -> int:
    """prmt.b32 in its default mode, without signs."""
    pool = np.uint32([a, b]).view(np.uint8)
    chosen = [pool[selector >> 4 * i & 7] for i in range(4)]
    return int(np.uint8(chosen).view(np.uint32)[0])


OPERATIONS = {
    "mov.b32": lambda a: a,
    "prmt.b32": permuted,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "fma.rn.bf16x2": fma,
}


def executed(text: str, *operands: int) -> np.ndarray:
    """The four BF16 that the assembly makes of its operands."""
    registers = {f"${2 + i}": value for i, value in enumerate(operands)}
    body = re.fullmatch(r"\{ \.reg \.b32 [^;]*; (.*;) \}", text)
    assert body
    for line in body[1].rstrip(";").split(";"):
        name, *rest = line.replace(",", " ").split()
        to, *sources = rest
        values = [registers[s] if s in registers else int(s, 0) for s in sources]
        registers[to] = OPERATIONS[name](*values)
    return np.uint32([registers["$0"], registers["$1"]]).view(ml_dtypes.bfloat16)


def wanted(name: str) -> np.ndarray:
    """What each byte means."""
    if name == "e4m3":
        values = BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return np.where(np.isnan(values), np.where(BYTES < 128, 480, -480), values)
    return E2M1[BYTES >> 4 if name == "e2m1 odd" else BYTES & 15]


NAMES = ("e4m3", "e2m1 even", "e2m1 odd")


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("name", NAMES)
def test_assembly_of_every_byte(name: str, scaled: bool) -> None:
    text = pallas_decode.assembly(name, scaled=scaled)
    scales = np.float32([2.0**-20, 1, 2.0**9, 2.0**100]).astype(ml_dtypes.bfloat16)
    registers = scales.view(np.uint32).tolist() if scaled else []
    got = [executed(text, int(four), *registers) for four in BYTES.view(np.uint32)]
    want = wanted(name).reshape(-1, 4) * (scales.astype(np.float32) if scaled else 1)
    np.testing.assert_array_equal(np.float32(got), want)
    np.testing.assert_array_equal(np.signbit(np.float32(got)), np.signbit(want))


@pytest.mark.parametrize("name", NAMES)
def test_interpreted_decoding_of_every_byte(name: str) -> None:
    codes = BYTES.view(ml_dtypes.float8_e4m3fn) if name == "e4m3" else BYTES
    finite = np.abs(wanted(name)) < 480
    got = pallas_decode.decoded(name, jnp.asarray(codes[None]), None, assembled=False)
    np.testing.assert_array_equal(np.float32(got[0])[finite], wanted(name)[finite])


def test_scales_lie_where_their_words_are() -> None:
    rng = np.random.default_rng(7)
    exponents = rng.integers(0, 247, (256, 8)).astype(np.uint8)
    words = np.asarray(w2_scale_to_kernel(exponents))
    plain = np.asarray(pack_scales(exponents))
    row = jnp.arange(256, dtype=jnp.int32)
    for i in range(2):
        np.testing.assert_array_equal(words[i][np.asarray(pallas_decode.word_rows(row))], plain[i])
        scales = pallas_decode.spread_scales(jnp.asarray(plain[i]), 16)
        assert scales.shape == (256, 64)
        values = np.asarray(scales.view(jnp.uint16)).reshape(256, 4, 16)
        expected = np.where(exponents == 0, 0x40, exponents.astype(np.int32) << 7)
        np.testing.assert_array_equal(
            values, np.repeat(expected[:, 4 * i : 4 * i + 4, None], 16, axis=2)
        )


def test_pairs_are_even_then_odd() -> None:
    pairs = jnp.asarray(BYTES[None])
    even, odd = (
        pallas_decode.decoded(f"e2m1 {half}", pairs, None, assembled=False)
        for half in ("even", "odd")
    )
    ones = jnp.full((1, 16), 127, jnp.uint8)
    want = np.float32(dequantize_mxfp4(pairs, ones))[0]
    np.testing.assert_array_equal(np.float32(jnp.stack([even, odd], -1)).reshape(-1), want)
