"""Executes the whole table of cells and writes what came out.

    PYTHONPATH=.:tests:tests/plan python tests/emulator/run_cells.py [SOURCE:FORMAT ...]

Writes benchmarks/results/emulated.json, a record a cell, and emulated.md from it. Cells with a
record of the same kernels are not run again, so an interrupted run goes on; without arguments all
families are done. It takes about an hour on two cores, most of it nvcc's.
"""

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# XLA's threads on a CPU: callbacks of eight ranks may hold eight, and wait for others that copy.
os.environ.setdefault("NPROC", "32")

import jax

jax.config.update("jax_num_cpu_devices", 8)

from emulator import cells, end_to_end, grid  # noqa: E402 (devices are counted first)
from emulator.build import library_path  # noqa: E402
from emulator.cells import Cell  # noqa: E402
from emulator.machine import EmulatorError  # noqa: E402
from emulator.ptx import PtxError  # noqa: E402
from emulator.standing_in import StandIn  # noqa: E402

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

Record = dict[str, Any]


def record(cell: Cell, stand_in: StandIn) -> Record:
    """What a cell gave: an outcome, or what is wrong."""
    start = time.perf_counter()
    fields: Record = {"cell": str(cell), "form": cell.form, "source": cell.source}
    fields |= {"activation": cell.activation, "shared": cell.shared, "ranks": cell.ranks}
    fields |= {"tokens": cell.tokens}
    try:
        fields |= dataclasses.asdict(cells.check(cell, stand_in))
    except (EmulatorError, PtxError, cells.CellFailure) as error:
        fields["wrong"] = str(error).splitlines()[0]
    return fields | {"seconds": round(time.perf_counter() - start, 1)}


def records(
    families: list[tuple[str, str]], groups: bool, stand_in: StandIn
) -> Iterator[tuple[str, Callable[[], Record]]]:
    """Names of all records of these families and, if asked for, of the grouped products, and what
    makes each.

    README's cells come first, then buffers used again, then the grid, one call of each family in
    turn: what a run has at any time is a fair part of the whole.
    """
    for cell in (*grid.plain(families), *(grid.grouped() if groups else ())):
        yield str(cell), functools.partial(record, cell, stand_in)
    for family in families:
        name = f"{Cell(*family, ranks=2, grid_id=77)}: five calls on one buffer"
        yield name, functools.partial(reused, *family, stand_in)
    for cell in grid.mixed(families):
        yield str(cell), functools.partial(record, cell, stand_in)


def reused(form: str, source: str, stand_in: StandIn) -> Record:
    """Five calls on one buffer by two ranks, as replays of a graph."""
    start = time.perf_counter()
    cell = Cell(form, source, ranks=2, grid_id=77)
    fields: Record = {"cell": f"{cell}: five calls on one buffer", "form": form, "source": source}
    fields |= {"activation": cell.activation, "shared": "", "ranks": 2}
    try:
        outcomes = cells.reuse(cell, stand_in)
        worst = max(outcomes, key=lambda outcome: outcome.error)
        fields |= dataclasses.asdict(worst)
    except (EmulatorError, PtxError, cells.CellFailure) as error:
        fields["wrong"] = str(error).splitlines()[0]
    return fields | {"seconds": round(time.perf_counter() - start, 1)}


def driven(names: list[str]) -> Iterator[Record]:
    """Calls down to the driver's functions, in a process of their own."""
    command = [sys.executable, str(Path(__file__).with_name("end_to_end.py")), *names]
    known = end_to_end.of_families()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            found = json.loads(line)
            cell, allowed = known[found["case"]][1], cells.limit(known[found["case"]][1])
            fields: Record = {"cell": found["case"], "form": cell.form, "source": cell.source}
            fields |= {"activation": cell.activation, "shared": "", "ranks": cell.ranks}
            fields |= {"tokens": cell.tokens, "error": found["error"]}
            if found["error"] > allowed.norm:
                fields["wrong"] = f"{found}, allowed {allowed.norm}"
            yield fields | {"seconds": 0.0}


HEAD = """# Kernels executed by the emulator

`PYTHONPATH=.:tests:tests/plan python tests/emulator/run_cells.py` wrote this. \
[docs/emulator.md](../../docs/emulator.md) says what it means.

A cell is a call of `mega_moe` whose kernels were executed; its error is that of all rows against \
`reference`, the worst row's beside it. Sums of FP8 products on SM90 are cut to 14 bits as on an \
H200: *exact* is the error of the same call with exact sums. Source `humming` is implementation \
`grouped`; *to the driver* are calls through the compiled module, whose tile and instructions are \
not kept.

README's cells are called once each, then drawn calls of every family in turn \
([how](../../tests/emulator/grid.py)): {done} of the {planned} calls that there are to make were \
executed, {wrong} wrong. Records stay when the emulator changes: {older} are of an earlier version \
of it.

"""


def page(records: list[Record], planned: list[str], version: str) -> str:
    """emulated.md.

    Args:
        records: what was executed.
        planned: names of all cells.
        version: of the emulator.
    """
    wrong = sum("wrong" in r for r in records)
    older = sum(r["emulator"] != version for r in records)
    numbers = dict(done=len(records), planned=len(planned), wrong=wrong, older=older)
    lines = [
        HEAD.format(**numbers)
        + "| source | format | cells | of | wrong | largest error | worst row | exact "
        "| tile heights | ranks | tokens |",
        "|---" * 11 + "|",
    ]
    for form, source in dict.fromkeys((r["form"], r["source"]) for r in records):
        own = [r for r in records if (r["form"], r["source"]) == (form, source)]
        right = [r for r in own if "wrong" not in r]

        def values(name: str, right: list[Record] = right) -> str:
            found = {r.get(name) for r in right} - {None}
            return ", ".join(map(str, sorted(found)))

        def largest(name: str, right: list[Record] = right) -> str:
            found = [r[name] for r in right if r.get(name) is not None]
            return f"{max(found):.1e}" if found else ""

        number = sum(name.startswith(f"{source} {form} ") for name in [f"{n} " for n in planned])
        tiles = values("block_m").removeprefix("0, ")  # of calls that launched nothing
        lines.append(
            f"| {source} | {form} | {len(own)} | {number} | {len(own) - len(right)} | "
            f"{largest('error')} | {largest('worst')} | {largest('exact')} | {tiles} | "
            f"{values('ranks')} | {values('tokens')} |"
        )
    lines += [
        "",
        "| cell | error | worst row | equal | exact | tile | instructions |",
        "|---" * 7 + "|",
    ]
    for r in records:
        if "wrong" in r:
            lines.append(f"| {r['cell']} | wrong: {r['wrong']} | | | | | |")
            continue
        worst, exact = (f"{r[k]:.1e}" if r.get(k) is not None else "" for k in ("worst", "exact"))
        equal = f"{r['equal']:.4f}" if "equal" in r else ""
        lines.append(
            f"| {r['cell']} | {r['error']:.1e} | {worst} | {equal} | {exact} | "
            f"{r.get('block_m', '')} | {r.get('executed', '')} |"
        )
    return "\n".join([*lines, ""])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "families",
        nargs="*",
        metavar="SOURCE:FORMAT",
        help=f"or {cells.GROUPED} for the grouped products; default: all",
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no cell after")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of both files")
    return parser.parse_args()


def main(names: list[str], minutes: float, results: Path) -> None:
    """Runs what has no record of this emulator yet."""
    version, end = library_path().stem, time.monotonic() + 60 * minutes
    path = results / "emulated.json"
    kept: list[Record] = json.loads(path.read_text()) if path.exists() else []
    done = {r["cell"]: r for r in kept}
    current = {r["cell"] for r in kept if r["emulator"] == version}
    wanted = [f for f in cells.families() if not names or f"{f[1]}:{f[0]}" in names]
    groups = not names or cells.GROUPED in names

    def keep(fields: Record) -> None:
        done[fields["cell"]] = fields | {"emulator": version}
        print(fields["cell"], fields.get("wrong") or f"{fields['error']:.1e}",
              f"{fields['seconds']} s", flush=True)  # fmt: skip
        path.write_text(json.dumps(list(done.values()), indent=0) + "\n")

    with cells.standing_in(Cell("mxfp8", "sgl").device) as stand_in:
        every = list(records(cells.families(), True, stand_in))
        asked = {name for name, _ in records(wanted, groups, stand_in)} - current
        left = [each for each in every if each[0] in asked]
        left.sort(key=lambda each: each[0] in done and "wrong" not in done[each[0]])
        for number, (_, one) in enumerate(left):
            if time.monotonic() > end:
                break
            keep(one())
            if number % 16 == 15:
                jax.clear_caches()
                cells.forget()
    driven_names = [
        name
        for name, (_, cell) in end_to_end.of_families().items()
        if name not in current
        and ((cell.form, cell.source) in wanted or (groups and cell.source == cells.GROUPED))
    ]
    if driven_names and minutes:  # some minutes more
        for fields in driven(driven_names):
            keep(fields)
    planned = [name for name, _ in every] + list(end_to_end.of_families())
    ordered = sorted(done.values(), key=lambda r: (r["source"], r["form"]))
    (results / "emulated.md").write_text(page(ordered, planned, version))


if __name__ == "__main__":
    arguments = _arguments()
    main(arguments.families, arguments.minutes, arguments.results)
