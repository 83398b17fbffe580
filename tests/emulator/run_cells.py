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
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


def page(records: list[Record]) -> str:
    """emulated.md."""
    lines = [
        "# Kernels executed by the emulator",
        "",
        "`PYTHONPATH=.:tests:tests/plan python tests/emulator/run_cells.py` wrote this. "
        "[docs/emulator.md](../../docs/emulator.md) says what it means.",
        "",
        "A cell is a call of `mega_moe` whose kernels were executed; its error is that of all rows "
        "against `reference`, the worst row's beside it.",
        "",
        "| source | format | cells | wrong | largest error | worst row | tile heights | ranks |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for form, source in dict.fromkeys((r["form"], r["source"]) for r in records):
        own = [r for r in records if (r["form"], r["source"]) == (form, source)]
        right = [r for r in own if "wrong" not in r]
        tiles = sorted({r["block_m"] for r in right} - {0})
        ranks = sorted({r["ranks"] for r in right})
        error, worst = (max((r[k] for r in right), default=0.0) for k in ("error", "worst"))
        lines.append(
            f"| {source} | {form} | {len(own)} | {len(own) - len(right)} | {error:.1e} | "
            f"{worst:.1e} | {', '.join(map(str, tiles))} | {', '.join(map(str, ranks))} |"
        )
    lines += [
        "",
        "| cell | error | worst row | equal | tile | instructions |",
        "|---|" + "---|" * 5,
    ]
    for r in records:
        if "wrong" in r:
            lines.append(f"| {r['cell']} | wrong: {r['wrong']} | | | | |")
        else:
            lines.append(
                f"| {r['cell']} | {r['error']:.1e} | {r['worst']:.1e} | {r['equal']:.4f} | "
                f"{r['block_m']} | {r['executed']} |"
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
        left = [each for each in records(wanted, groups, stand_in) if each[0] not in current]
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
    if driven_names and time.monotonic() < end:
        for fields in driven(driven_names):
            keep(fields)
    (results / "emulated.md").write_text(
        page(sorted(done.values(), key=lambda r: (r["source"], r["form"])))
    )


if __name__ == "__main__":
    arguments = _arguments()
    main(arguments.families, arguments.minutes, arguments.results)
