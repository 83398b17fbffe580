"""The cases of the conformance set: kernels, inputs, and how their results are compared.

Inputs come from seeds, so that only results are recorded. `record.py` runs the cases on an H200,
`test_conformance.py` on the emulator.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from emulator.conformance import wgmma
from emulator.machine import TensorMap

FOLDER = Path(__file__).parent
ARCH = "sm_90a"
ROW_KERNELS = {
    "integer": ("integer", "logic", "compare"),
    "floating": ("floating", "approximate", "half", "convert"),
    "warp": ("shuffle", "vote", "reduce", "diverge"),
    "memory": ("access", "atomics", "barriers", "copies"),
    "cluster": ("mbarrier", "cluster", "bulk"),
    "matrix": ("fragments", "mma_bf16", "mma_f16", "mma_e4m3", "mma_e5m2"),
}
"""Kernels of rows, by source file."""
_OUTPUT_ROWS = {"atomics": 41, "bulk": 64 + 16}
_SPECIAL = np.array(
    [0, 1, 0xFFFFFFFF, 0x80000000, 0x7FFFFFFF, 31, 32, 0x3F800000, 0xBF800000, 0x7F800000,
     0xFF800000, 0x7FC00000, 0x7F7FFFFF, 0x00800000, 0x007FFFFF, 0x00000100, 0x43E00000,
     0x43E80000, 0x3E800000, 0x3F000000, 0x4B000000, 0x4EFFFFFF, 0x4F000000, 0xCF000000,
     0x7E007E00, 0x7C01FC00, 0x7F7F7F7F, 0xFF80FF80],
    np.uint32,
)  # fmt: skip
"""Edges of integers, of float32, and of pairs of narrow floats."""


@dataclass(frozen=True)
class Row:
    """One row of a result: its name and how it is compared."""

    name: str
    kind: str


@dataclass(frozen=True)
class Case:
    """One launch.

    Attributes:
        name: of the case; results are recorded under it.
        file: the source file without its ending; ``"wgmma"`` is generated.
        kernel: the function.
        arguments: as `emulator.machine.run` takes them; argument 1 is the output.
        results: indices of the arguments that are recorded.
        rows: of the output; empty: one of bits or of float32 (`kind`).
        kind: how results without rows are compared.
    """

    name: str
    file: str
    kernel: str
    arguments: list[Any]
    grid: int = 1
    block: int = 128
    cluster: int = 1
    shared_bytes: int = 0
    results: tuple[int, ...] = (1,)
    rows: tuple[Row, ...] = ()
    kind: str = "bits"
    settings: dict[str, float] = field(default_factory=dict)


def source(file: str) -> str:
    """CUDA of a source file."""
    return wgmma.source() if file == "wgmma" else (FOLDER / f"{file}.cu").read_text()


@functools.cache
def rows_of(file: str, kernel: str) -> tuple[Row, ...]:
    """The rows that a kernel writes, in order, read from the macros of its source."""
    text = re.sub(r"#define(?:.*\\\n)*.*\n", "", source(file))
    start = text.index(f"void {kernel}(")
    end = text.find('extern "C"', start)
    body = text[start : end if end > 0 else len(text)]
    rows: list[Row] = []
    for found in re.finditer(r"\b([A-Z][A-Z0-9_]*)\((\w+)(?:, (\w+))?", body):
        macro, name, kind = found.groups()
        rows += _rows(macro, name, kind or "bits")
    return tuple(rows)


def _rows(macro: str, name: str, kind: str) -> list[Row]:
    if macro in ("ROW64", "L2"):
        return [Row(f"{name}.low", kind), Row(f"{name}.high", kind)]
    if macro == "SHUFFLE":
        return [Row(name, "bits"), Row(f"{name}_valid", "bits")]
    if macro == "ATOM":
        return [Row(name, "bits"), Row(f"{name}_after", "bits")]
    if macro == "MMA":
        return [Row(f"{name}_{i}", "f32") for i in range(4)]
    if macro in ("COMPARE", "COMPARE_F", "VOTE", "REDUX", "COPY", "REDUCE"):
        return [Row(name, "bits")]
    return [Row(name, kind)] if re.fullmatch(r"ROW|[RFNPIW][123]", macro) else []


def words(name: str, count: int) -> np.ndarray:
    """Random words of a case: bits, floats of moderate size, and the special values."""
    rng = np.random.default_rng(list(name.encode()))
    bits = rng.integers(0, 2**32, count, np.uint32)
    moderate = (rng.standard_normal(count) * np.exp2(rng.integers(-12, 12, count))).astype("f4")
    special = rng.choice(_SPECIAL, count)
    kind = rng.integers(0, 8, count)
    return np.where(kind < 3, bits, np.where(kind < 7, moderate.view(np.uint32), special))


def elements(name: str, count: int, type: str, spread: int) -> np.ndarray:
    """Words of random elements whose sizes are spread over some powers of two."""
    rng = np.random.default_rng(list(name.encode()))
    dtype = {
        "bf16": ml_dtypes.bfloat16, "f16": np.float16, "e4m3": ml_dtypes.float8_e4m3fn,
        "e5m2": ml_dtypes.float8_e5m2, "f32": np.float32,
    }[type]  # fmt: skip
    values = rng.standard_normal(count) * np.exp2(rng.uniform(-spread, spread, count))
    limit = 400.0 if type in ("e4m3", "e5m2") else 3e4
    return np.clip(values, -limit, limit).astype(dtype).view(np.uint32)


def row_cases() -> Iterator[Case]:
    """One case a kernel of rows."""
    for file, kernels in ROW_KERNELS.items():
        for kernel in kernels:
            rows = rows_of(file, kernel)
            grid, block = 2, 128
            threads = grid * block
            if kernel.startswith("mma"):
                types = {"mma_e5m2": ("e5m2", "e4m3")}.get(kernel, (kernel[4:],) * 2)
                width = 4 if "e" in types[0] else 2
                given = np.concatenate(
                    [
                        elements(f"{kernel}a", 4 * threads * width, types[0], 3),
                        elements(f"{kernel}b", 2 * threads * width, types[1], 3),
                        elements(f"{kernel}c", 4 * threads, "f32", 6),
                    ]
                )
            else:
                given = words(kernel, 3 * threads)
                given[threads : 2 * threads : 16] = given[:threads:16]  # some operands are equal
            out = np.zeros((_OUTPUT_ROWS.get(kernel, len(rows)), threads), np.uint32)
            cluster = 2 if kernel == "cluster" else 1
            yield Case(kernel, file, kernel, [given, out], grid, block, cluster, rows=rows)


TENSOR_CASES = (
    # name, type, dims, box, swizzle, coordinates, fill
    ("1d", "uint32", (200,), (64,), 0, (100,), 0),
    ("1d_end", "uint32", (200,), (64,), 0, (172,), 0),
    ("2d_plain", "uint8", (256, 40), (64, 8), 0, (64, 5), 0),
    ("2d_128", "uint8", (256, 40), (128, 16), 128, (128, 5), 0),
    ("2d_64", "uint8", (256, 40), (64, 16), 64, (64, 9), 0),
    ("2d_32", "uint8", (256, 40), (32, 16), 32, (32, 3), 0),
    ("2d_below", "uint8", (256, 40), (128, 16), 128, (-64, -3), 0),
    ("2d_beyond", "uint8", (256, 40), (128, 16), 128, (192, 33), 0),
    ("2d_outside", "uint8", (256, 40), (128, 16), 64 * 2, (512, 60), 0),
    ("2d_bf16_nan", "bfloat16", (96, 20), (64, 8), 128, (64, 15), 1),
    ("2d_f32_nan", "float32", (48, 20), (32, 8), 128, (32, 15), 1),
    ("2d_f32", "float32", (48, 20), (16, 8), 64, (40, -2), 0),
    ("2d_odd_rows", "uint8", (144, 37), (128, 13), 128, (16, 30), 0),
    ("3d", "uint8", (128, 12, 6), (64, 8, 2), 64, (64, 7, 3), 0),
    ("3d_below", "uint32", (32, 12, 6), (32, 4, 3), 128, (8, -1, -1), 0),
    ("4d", "uint8", (128, 8, 4, 3), (128, 4, 2, 2), 128, (0, 2, 3, 1), 0),
    ("5d", "uint32", (16, 6, 4, 3, 2), (8, 3, 2, 2, 2), 32, (12, 4, 3, 2, 1), 0),
)
_TYPE_BYTES = {"uint8": 1, "uint32": 4, "bfloat16": 2, "float32": 4}


def tensor_cases() -> Iterator[Case]:
    """Loads of boxes, a store, a multicast."""
    for name, type, dims, box, swizzle, at, fill in TENSOR_CASES:
        size = _TYPE_BYTES[type]
        strides = [int(np.prod(dims[:k])) * size for k in range(1, len(dims))]
        data = words(name, int(np.prod(dims)) * size // 4)
        num_bytes = int(np.prod(box)) * size
        given = np.array([*at, num_bytes], np.int32).view(np.uint32)
        out = np.zeros(num_bytes // 4, np.uint32)
        descriptor = TensorMap(2, type, dims, strides, box, swizzle, fill)
        arguments = [given, out, data, descriptor]
        yield Case(
            f"load_{name}", "tensor_copy", f"load{len(dims)}", arguments, 1, 128, 1, num_bytes
        )
    for swizzle, at in ((128, (128, 5)), (64, (64, 3)), (0, (240, 36)), (32, (32, 39))):
        width = swizzle or 64
        given = np.array([*at, width * 8], np.int32).view(np.uint32)
        data = words(f"store{swizzle}", 256 * 40 // 4)
        descriptor = TensorMap(2, "uint8", (256, 40), (256,), (width, 8), swizzle)
        arguments = [given, np.zeros(128, np.uint32), data, descriptor]
        yield Case(f"store_{swizzle}", "tensor_copy", "store2", arguments, shared_bytes=width * 8,
                   results=(2,))  # fmt: skip
    given = np.array([128, 3, 1024, 8], np.uint32)
    descriptor = TensorMap(2, "uint8", (256, 40), (256,), (128, 8), 128)
    data = words("multicast", 256 * 40 // 4)
    arguments = [given, np.zeros(2 * 512, np.uint32), data, descriptor]
    yield Case("multicast", "tensor_copy", "multicast2", arguments, 2, 128, 2, 2048)


def wgmma_cases() -> Iterator[Case]:
    """Each wgmma kernel on operands of narrow and of wide spread."""
    for kernel in wgmma.KERNELS:
        for spread in (0, 4):
            name = f"{kernel.name}_spread{spread}"
            a, b, d = kernel.operand_words
            given = np.concatenate(
                [
                    elements(f"{name}a", a * 4 // wgmma.ELEMENT_BYTES[kernel.a_type], kernel.a_type,
                             spread),
                    elements(f"{name}b", b * 4 // wgmma.ELEMENT_BYTES[kernel.b_type], kernel.b_type,
                             spread),
                    elements(f"{name}c", d, "f32", spread) if spread else np.zeros(d, np.uint32),
                ]
            )  # fmt: skip
            arguments = [given, np.zeros(d, np.uint32)]
            yield Case(name, "wgmma", kernel.name, arguments, shared_bytes=kernel.shared_bytes,
                       kind="f32")  # fmt: skip


def cases() -> Iterator[Case]:
    """All of them."""
    yield from row_cases()
    yield from tensor_cases()
    yield from wgmma_cases()
