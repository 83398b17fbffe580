"""Breaks rules of tcgen05 in the emulator, one at a time: the kernels' outputs must not agree then.

    PYTHONPATH=.:tests:tests/plan python tests/emulator/check_rules.py [RULE ...]

Hopper has no tcgen05, so no GPU confirms these rules; that a wrong one is noticed says that the
kernels depend on it as it stands. Prints a line a rule and writes
benchmarks/results/emulator_rules.json; ends with 1 if a broken rule passes unseen.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from emulator import build

RESULT = build.ROOT / "benchmarks" / "results" / "emulator_rules.json"


class Rule(NamedTuple):
    """A rule, the text that has it, a wrong one, and the format whose call must show it."""

    name: str
    file: str
    right: str
    wrong: str
    form: str = "mxfp8"


WORK, LAYOUT, MOVE = "tcgen05_work.cc", "operands.cc", "instructions/tcgen05.cc"
RULES = [
    Rule("128-byte swizzle: three bits of the row", LAYOUT, "swizzled(128, 7)", "swizzled(128, 3)"),
    Rule(
        "groups of eight rows are a stride apart",
        LAYOUT,
        "start + row / 8 * stride + row % 8 * 16",
        "start + row / 8 * leading + row % 8 * 16",
    ),
    Rule("a word's byte is the scale id", WORK, "(first_byte + block)", "(block)"),
    Rule("a row's scale is in lane row % 32", WORK, "lane = row % 32", "lane = row / 4"),
    Rule("further rows' scales are in the next columns", WORK,
         "column = address + row / 32", "column = address"),
    Rule("a pair's B is halved by columns", WORK, "cluster.ctas[first + i], op.source[2]",
         "cluster.ctas[first + ctas - 1 - i], op.source[2]"),
    Rule("the first product of a tile overwrites", WORK, "accumulate ? ToFloat(sum) : 0",
         "ToFloat(sum)"),
    Rule("further products accumulate", WORK, "accumulate ? ToFloat(sum) : 0", "0.0f"),
    Rule("warpx4: scales go to all four quarters", WORK, "quarter = 0; quarter < 4",
         "quarter = 0; quarter < 1"),
    Rule("a commit reaches each CTA of its mask", WORK, "SharedAddress(rank, barrier & 0xffffff)",
         "SharedAddress(op.issuer, barrier & 0xffffff)"),
    Rule("16x256b: rows 8 to 15 are in every second pair", MOVE, "8 * (i / 2 & 1), i / 4 * 8",
         "8 * (i & 1), i / 4 * 8"),
    Rule("16U4_ALIGN16B: the low nibble comes first", LAYOUT, "to[2 * i] = kE2m1[at[i] & 15]",
         "to[2 * i + 1] = kE2m1[at[i] & 15]", "mxfp4"),
    Rule("format 5 is E2M1", WORK, "if (format == 5) return Element::kE2m1Padded",
         "if (format == 5) return Element::kE4m3", "mxfp4"),
    Rule("block16: 16 elements a scale", WORK, "shape.block = 16", "shape.block = 32", "nvfp4"),
    Rule("format 1 of kind::f16 is BF16", WORK, "format == 1 ? Element::kBf16 : Element::kF16",
         "format == 1 ? Element::kF16 : Element::kBf16", "bf16"),
]  # fmt: skip

CELL = """
import sys, jax
from emulator import cells
cell = cells.Cell(sys.argv[1], "sgl")
with cells.standing_in(cell.device) as stand_in:
    print(cells.check(cell, stand_in).error)
"""


def noticed(form: str, library: Path) -> str:
    """What a cell says on a library; "" if it is right."""
    done = subprocess.run(
        [sys.executable, "-c", CELL, form],
        env=os.environ | {"EMULATOR_LIBRARY": str(library), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr.strip().splitlines()[-1][:160] if done.returncode else ""


def _compile(source: Path, output: Path) -> None:
    compiler = build.find_compiler()
    assert compiler is not None
    folders = [f"-I{build.ROOT}", f"-I{build.INTERPRETER}"]
    command = [compiler, *build.FLAGS, *folders, "-c", str(source), "-o", output]
    subprocess.run(command, check=True)


def broken(rule: Rule, objects: dict[str, Path], folder: Path) -> Path:
    """The library with a rule broken."""
    text = (build.INTERPRETER / rule.file).read_text()
    assert text.count(rule.right) == 1, f"{rule.name}: {rule.right} is not there once"
    source = build.INTERPRETER / rule.file.replace(".cc", ".broken.cpp")
    source.write_text(text.replace(rule.right, rule.wrong))
    try:
        _compile(source, folder / "broken.o")
    finally:
        source.unlink()
    linked = {**objects, rule.file: folder / "broken.o"}
    library = folder / "libcuda-broken.so"
    compiler = build.find_compiler()
    assert compiler is not None
    subprocess.run([compiler, "-shared", *linked.values(), "-o", library], check=True)
    return library


def main(names: list[str]) -> int:
    """Breaks the rules whose names begin so, or all; records of the others stay."""
    old = json.loads(RESULT.read_text()) if RESULT.exists() else []
    found = {record["rule"]: record for record in old}
    with tempfile.TemporaryDirectory() as name:
        folder, objects = Path(name), {}
        for i, source in enumerate(build.sources()):
            objects[str(source.relative_to(build.INTERPRETER))] = folder / f"{i}.o"
            _compile(source, folder / f"{i}.o")
        for rule in RULES:
            if names and not any(rule.name.startswith(name) for name in names):
                continue
            seen = noticed(rule.form, broken(rule, objects, folder))
            print(f"{rule.name}: {seen or 'PASSES UNSEEN'}", flush=True)
            fields = {"rule": rule.name, "file": rule.file, "form": rule.form, "seen": seen}
            found[rule.name] = fields
    kept = [found[rule.name] for rule in RULES if rule.name in found]
    RESULT.write_text(json.dumps(kept, indent=1) + "\n")
    return int(any(not record["seen"] for record in kept))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
