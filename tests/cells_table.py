"""The table of cells: what each source's kernels run of each format, and what shows that they do.

    PYTHONPATH=.:tests:tests/plan python tests/cells_table.py

Writes benchmarks/results/cells.md and the table between the marks in README.md. A cell is a
format, an activation and the precision of a fused shared expert. It says ``run on H200`` where a
result in benchmarks/results has it, ``executed by the emulator`` with the calls and their largest
error where tests/emulator/run_cells.py has one and none is wrong, ``launch checked`` with the
number of golden records whose launch a call of `mega_moe` would make and the planners make equal,
and else why it is refused.
"""

import functools
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import humming_records
from golden_launches import LAUNCHES, read
from golden_replay import config_of

import jax_megamoe as mm
from jax_megamoe.plan import check_sizes, families
from jax_megamoe.plan.grouped.product import KNOWN_ARCHS
from jax_megamoe.plan.grouped.rules import ROWS, refusal
from jax_megamoe.runtime.devices import KNOWN_DEVICES

ROOT = Path(__file__).parents[1]
PAGE = "benchmarks/results/cells.md"
MARKS = ("<!-- cells: tests/cells_table.py writes this table -->", "<!-- /cells -->")

ACTIVATIONS = {
    "swiglu": mm.Activation("swiglu"),
    "clamped swiglu": mm.Activation("swiglu", clamp=10.0),
    "GPT-OSS's swiglu": mm.Activation("swiglu", clamp=7.0, alpha=1.702, beta=1.0),
    "swiglu of any alpha and beta": mm.Activation("swiglu", alpha=1.5, beta=0.5),
    "situ": mm.Activation("situ"),
    "situ of any alpha and beta": mm.Activation("situ", alpha=2.0, beta=3.0),
}
"""One activation of each kind that kernels tell apart."""

RUN_ON_H200 = {
    ("fp8_block", "swiglu"): "sm90_h200_checks.json",
    ("fp8_block", "clamped swiglu"): "expert_parallel_h200_x2.json",
    ("mxfp4_block", "clamped swiglu"): "flashinfer_h200_checks.json",
    ("nvfp4_block", "clamped swiglu"): "flashinfer_nvfp4_h200_checks.json",
}
"""The result in which a recipe with this activation was compared on the GPU."""

XLA_ON_H200 = set(mm.WEIGHT_FORMATS)
"""Recipes that `xla` was run with on an H200: the default one of every weight format."""

GROUPED_CHECKS = ("grouped_h200_checks.json", "grouped_bf16_h200_checks.json")
"""The results in which layers of `grouped` were compared on an H200, by the names of recipes."""

STORED = {"uint8": "E2M1", "float8_e4m3fn": "E4M3", "bfloat16": "bfloat16"}
SCALED = {
    "none": "",
    "ue8m0": ", a power of two per 32",
    "e4m3": ", E4M3 per 16, float32 per expert",
    "float32": ", float32 per 128 x 128",
}

EXECUTED = "executed by the emulator"
EMULATED = ROOT / "benchmarks" / "results" / "emulated.json"

SIZES = dict(
    num_experts=256, top_k=8, hidden_size=4096, intermediate_size=2048, max_num_tokens=4096
)
NUM_RANKS = 8


class Cell(NamedTuple):
    """A format, a kind of activation, and a fused shared expert's precision ("" for none)."""

    form: str
    activation: str
    shared: str


def kind_of(activation: mm.Activation) -> str:
    """The key in `ACTIVATIONS` of what an activation is."""
    for name, one in ACTIVATIONS.items():
        if activation.name == one.name and (activation.alpha, activation.beta) == (
            one.alpha,
            one.beta,
        ):
            return "clamped swiglu" if name == "swiglu" and activation.clamp is not None else name
    return f"{activation.name} of any alpha and beta"


def cells() -> list[Cell]:
    """Every cell that a config can ask for."""
    return [
        Cell(recipe.name, name, shared)
        for recipe in mm.RECIPES.values()
        for name, activation in ACTIVATIONS.items()
        if activation.name in recipe.functions
        for shared in ("", *recipe.shared_formats)
    ]


def golden_records() -> Counter[tuple[Cell, str]]:
    """How many recorded launches a call would make, by cell and source."""
    found: Counter[tuple[Cell, str]] = Counter()
    for file in LAUNCHES:
        for record in read(file):
            inputs = record["inputs"]
            config = None if "rejected" in record else config_of(inputs)
            if config is None or inputs["kernel"].startswith("pre_dispatch"):
                continue
            shared = (config.shared_format or "") if config.num_shared_experts else ""
            cell = Cell(config.weight_format.name, kind_of(config.activation), shared)
            found[cell, inputs["provider"]] += 1
    return found


def hopper_source(recipe: mm.Recipe) -> str | None:
    """The source of a recipe whose kernels are all for Hopper; None for the other recipes."""
    found = families.of_recipe(recipe)
    on_hopper = {family.architecture for family in found} == {"sm90"}
    return found[0].source if on_hopper else None


@functools.cache
def emulated() -> dict[tuple[Cell, str], list[dict[str, Any]]]:
    """What the emulator executed, by cell and source."""
    calls: dict[tuple[Cell, str], list[dict[str, Any]]] = {}
    for record in json.loads(EMULATED.read_text()) if EMULATED.exists() else []:
        cell = Cell(record["form"], record["activation"], record["shared"])
        calls.setdefault((cell, record["source"]), []).append(record)
    return calls


def _executed(records: list[dict[str, Any]]) -> str:
    """What the emulator showed of a cell."""
    if any("wrong" in record for record in records):
        return "wrong in the emulator"
    plural = "call" if len(records) == 1 else "calls"
    return f"{EXECUTED} ({len(records)} {plural}, error {_largest_error(records):.0e})"


def _largest_error(records: list[dict[str, Any]]) -> float:
    return max(record["error"] for record in records)


def status(cell: Cell, source: str, records: Counter[tuple[Cell, str]]) -> str:
    """What is known of a cell with a source's kernel."""
    sm90 = hopper_source(mm.RECIPES[cell.form]) is not None
    config = mm.MoEConfig(
        **SIZES,
        weight_format=cell.form,
        activation=ACTIVATIONS[cell.activation],
        num_shared_experts=1 if cell.shared else 0,
        shared_format=cell.shared or None,
    )
    try:
        check_sizes(config, KNOWN_DEVICES["h200" if sm90 else "b200"], NUM_RANKS, source)
    except (NotImplementedError, ValueError) as error:
        return f"refused: {error}"
    number = records[cell, source]
    shown = [_executed(emulated()[cell, source])] if (cell, source) in emulated() else []
    if (cell.form, cell.activation) in RUN_ON_H200:
        shown.insert(0, "run on H200")
    if number:
        shown.append(f"launch checked ({number} records)")
    return "; ".join(shown or ["not run, no record"])


def table() -> dict[Cell, dict[str, str]]:
    """The status of every cell with every source."""
    records = golden_records()
    return {
        cell: {source: status(cell, source, records) for source in families.sources()}
        for cell in cells()
    }


def page(statuses: dict[Cell, dict[str, str]]) -> str:
    """benchmarks/results/cells.md."""
    results = [f"{' with '.join(cell)}: [{file}]({file})" for cell, file in RUN_ON_H200.items()]
    lines = [
        "# What the kernels run, and what shows it",
        "",
        "`PYTHONPATH=.:tests:tests/plan python tests/cells_table.py` wrote this, and README's "
        "table.",
        "",
        "- *run on H200*: outputs compared on the GPU: " + "; ".join(results) + ".",
        "- *executed by the emulator (n calls, error e)*: the kernel's PTX was carried out on a "
        "CPU and the output compared with `reference`: [emulated.md](emulated.md), "
        "[what that means](../../docs/emulator.md).",
        "- *launch checked (n records)*: the launch that a call makes equals n recorded from "
        "DeepGEMM's own host code: kernel, template arguments, grid, shared memory, tensor maps, "
        "parameters ([tests/golden](../../tests/golden/README.md)). No SM100 kernel has run on a "
        "GPU.",
        "- *refused*: what `check_supported` says, for "
        f"`{json.dumps(SIZES)}` on {NUM_RANKS} ranks of B200 (fp8_block: H200).",
        "",
        f"| format | activation | shared expert | {' | '.join(families.sources())} |",
        "|---" * (3 + len(families.sources())) + "|",
    ]
    for cell, by_source in statuses.items():
        shared = cell.shared or "none"
        said = " | ".join(by_source[source] for source in families.sources())
        lines.append(f"| {cell.form} | {cell.activation} | {shared} | {said} |")
    return "\n".join([*lines, ""])


def summary(statuses: dict[Cell, dict[str, str]]) -> str:
    """README's table: a row a format."""
    lines = [
        "| format | weights | `xla` | `grouped` | `deep_gemm` on Hopper (SM90) | on Blackwell "
        "(SM100), sgl's kernels | on Blackwell, vllm's kernels |",
        "|---|---|---|---|---|---|---|",
    ]
    for form in mm.RECIPES.values():
        own = {cell: by_source for cell, by_source in statuses.items() if cell.form == form.name}
        portable = "tested on CPU, run on H200" if form.name in XLA_ON_H200 else "tested on CPU"
        source = hopper_source(form)
        if source is not None:
            columns = [_summary(own, source), "no kernel", "no kernel"]
        else:
            columns = ["no kernel", *(_summary(own, each) for each in ("sgl", "vllm"))]
        weights = STORED[form.weights.weight.storage] + SCALED[form.weights.weight.scale]
        shown = [weights, portable, _grouped(form), *columns]
        lines.append(f"| `{form.name}` | {' | '.join(shown)} |")
    return "\n".join(lines)


def _grouped(recipe: mm.Recipe) -> str:
    """What `grouped` runs of a recipe: on which GPUs, and what shows it."""
    pair = recipe.weights.name, recipe.activations.name
    archs = [arch for arch in KNOWN_ARCHS if not refusal(*pair, arch)]
    if not archs:
        return "no kernel"
    said = ["run on H200"] if " x ".join(pair) in grouped_on_h200() else []
    records = [
        record
        for (cell, source), calls in emulated().items()
        for record in calls
        if (cell.form, source) == (recipe.name, "humming")
    ]
    executed = {int(found[1]) for r in records if (found := re.search(r"arch=(\d+)", r["cell"]))}
    if any("wrong" in record for record in records):
        said.append("wrong in the emulator")
    elif executed:
        error = f"error up to {_largest_error(records):.0e}"
        said.append(f"{EXECUTED} for {_capabilities(executed)} ({error})")
    inputs = ROWS[pair[1]][1]
    recorded = {arch for arch in archs if (arch, pair[0], inputs) in humming_launches()}
    others = set(archs) - executed
    for word, found in (("launch checked", others & recorded), ("not run", others - recorded)):
        said += [f"{word} for {_capabilities(found)}"] if found else []
    return "<br>".join(said)


def _capabilities(archs: Iterable[int]) -> str:
    return ", ".join(f"{arch // 10}.{arch % 10}" for arch in sorted(archs))


@functools.cache
def humming_launches() -> frozenset[tuple[int, str, str]]:
    """Architecture, weights and inputs of the products whose launches are recorded."""
    plans, _ = humming_records.read()
    return frozenset((plan["sm"], plan["format"], plan["activation"]) for plan in plans)


@functools.cache
def grouped_on_h200() -> frozenset[str]:
    """Weights x activations of which every number of tokens agreed on the GPU."""
    agreed: dict[str, bool] = {}
    for name in GROUPED_CHECKS:
        for check in json.loads((EMULATED.parent / name).read_text())["checks"]:
            if found := re.fullmatch(r"(\w+ x \w+), \d+ tokens", check["what"]):
                agreed[found[1]] = agreed.get(found[1], True) and check["passed"]
    return frozenset(pair for pair, passed in agreed.items() if passed)


def _summary(statuses: dict[Cell, dict[str, str]], source: str) -> str:
    """What a source's kernels run of one format: activations, then shared experts, by status."""
    said = []
    for word in ("run on H200", EXECUTED, "launch checked", "not run"):
        own = []
        for cell, by_source in statuses.items():
            first, *others = by_source[source].split("; ")
            # A GPU and the emulator may both have run a cell; else the strongest word is enough.
            if first.startswith(word) or (word == EXECUTED and others and word in others[0]):
                own.append(cell)
        if not own:
            continue
        names = ", ".join(dict.fromkeys(cell.activation for cell in own))
        shared = " or ".join(sorted({cell.shared for cell in own} - {""}))
        error = ""
        if word == EXECUTED:
            records = [record for cell in own for record in emulated()[cell, source]]
            error = f" (error up to {_largest_error(records):.0e})"
        with_shared = f"; shared expert in {shared}" if shared else ""
        said.append(f"{word}{error}: {names}{with_shared}")
    return "<br>".join(said) or "no kernel"


def readme(text: str, rows: str) -> str:
    """README with the table between its marks."""
    first, last = MARKS
    before, _, rest = text.partition(first)
    _, _, after = rest.partition(last)
    return f"{before}{first}\n{rows}\n{last}{after}"


def main() -> None:
    """Writes both."""
    statuses = table()
    (ROOT / PAGE).write_text(page(statuses))
    path = ROOT / "README.md"
    path.write_text(readme(path.read_text(), summary(statuses)))


if __name__ == "__main__":
    main()
