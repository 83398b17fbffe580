"""Writes pages of benchmarks/results from their JSON; nothing here is measured.

    PYTHONPATH=.:benchmarks python benchmarks/pages.py

- decoder_h200.md: whole models, from every decoder_h200*.json that benchmarks/gpu/decoder.py wrote;
- gpt_oss_h200.md: GPT-OSS's layers, from gpt_oss_h200.json, `grouped.py --gpt-oss`'s grouped.json;
- portable_h200.md: `xla`, from a run of the league.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import recorded

from jax_megamoe.cli.gpu.models import MODELS
from jax_megamoe.cli.gpu.result import read_result

Json = dict[str, Any]


def page(title: str, *sections: str) -> str:
    """A page of such sections."""
    return "\n\n".join([f"# {title}", *sections]) + "\n"


def section(commands: Sequence[str], prose: str, table: Sequence[str]) -> str:
    """How times were made, what they are, and the times."""
    made = "\n".join(f"    {each}" for each in commands)
    return "\n\n".join([made, prose, "\n".join(table)])


def lines_of(head: str, rows: Sequence[Sequence[str]], words: int = 0) -> list[str]:
    """A table: its head, and its rows; the first `words` columns are not numbers."""
    columns = head.count("|") - 1
    rule = "---|" * words + "---:|" * (columns - words)
    return [head, f"|{rule}", *(f"| {' | '.join(row)} |" for row in rows)]


DECODER = "PYTHONPATH=.:examples:benchmarks/gpu python benchmarks/gpu/decoder.py"
PARTS = ("experts", "router", "attention", "rest")
BY_OMISSION = "†"
"""Marks the parts of a step that are differences of programs."""


class Model(NamedTuple):
    """What decoder.py recorded of a model."""

    name: str
    record: Json

    @property
    def command(self) -> str:
        """How it was run; where the record does not say, with the options' defaults."""
        return self.record.get("command", f"{DECODER} --models {self.name}")

    @property
    def conditions(self) -> tuple[str, str, int]:
        """Device, jax and positions of a sequence, which all times of a section have."""
        return self.record["device"], self.record["versions"]["jax"], self.record["context"]

    @property
    def steps(self) -> list[Json]:
        """The rows of decode steps; another is a prompt's."""
        return [row for row in self.record["rows"] if "batch" in row]


def decoder_models(folder: Path) -> list[Model]:
    """The models of all records.

    Raises:
        ValueError: a model in two of them.
    """
    found: dict[str, Model] = {}
    for path in sorted(folder.glob("decoder_h200*.json")):
        for name, record in recorded.read(path.name, folder)["models"].items():
            if name in found:
                raise ValueError(f"{path.name}: expected {name} in one record, got it in two")
            found[name] = Model(name, record)
    return list(found.values())


def decoder_row(name: str, row: Json) -> list[str]:
    """The cells of a decode step."""
    found, of = row.get("parts_ms", {}), row["of_limit"]
    plain = row.get("ms_without_graphs")
    cells = [
        name,
        str(row["batch"]),
        f"{row['ms']:.2f}",
        "" if plain is None else f"{plain:.2f}",
        f"{row['tokens_per_second']:.0f}",
        f"{row['limit_ms']['step']:.2f}",
        f"{of['step']:.2f}",
    ]
    if not found:
        why = row.get("parts_missing", "stopped before")
        return [*cells, why, *[""] * (len(PARTS) - 1)]
    mark = "" if row["parts_from"] == "profiler" else BY_OMISSION
    for part in PARTS:
        share = f" ({of[part]:.2f})" if part in of else ""
        cells.append(f"{found[part]:.2f}{mark}{share}" if part in found else "")
    return cells


def decoder(folder: Path = recorded.RESULTS) -> str:
    """decoder_h200.md, from the records in a folder."""
    alike: dict[tuple[str, str, int], list[Model]] = {}
    for each in decoder_models(folder):
        alike.setdefault(each.conditions, []).append(each)
    sections = (decoder_section(conditions, models) for conditions, models in alike.items())
    return page("Decode steps of whole models on an H200", *sections)


def decoder_section(conditions: tuple[str, str, int], models: Sequence[Model]) -> str:
    """Models that ran in the same conditions."""
    device, jax, context = conditions
    prose = (
        f"{device}, jax {jax}. Random weights of the real sizes, a cache of {context:,} positions "
        "a sequence. Milliseconds; in brackets the share of the time that the copy rate of the "
        "same run allows for the bytes of a step. Parts are from the profiler, in the same program "
        "without CUDA graphs, whose step takes longer: `without graphs`."
    )
    rows = [decoder_row(each.name, row) for each in models for row in each.steps]
    if any(BY_OMISSION in cell for row in rows for cell in row):
        prose += (
            f" Parts with {BY_OMISSION} are differences between programs without the experts, "
            "whose part has the router then, and without attention."
        )
    head = (
        "| model | batch | a step, ms | without graphs | tokens/s | limit, ms | of the limit "
        f"| {' | '.join(PARTS)} |"
    )
    commands = list(dict.fromkeys(each.command for each in models))
    return section(commands, prose, lines_of(head, rows, words=1))


GROUPED = "PYTHONPATH=.:tests:tests/gpu:benchmarks/gpu python benchmarks/gpu/grouped.py"


def gpt_oss() -> str:
    """gpt_oss_h200.md."""
    record = recorded.read("gpt_oss_h200.json")
    rows: list[Json] = record["rows"]
    first = rows[0]
    layers, experts = first["layers"], MODELS[first["shape"]].num_experts
    gigabytes = layers * experts * first["bytes"] / first["experts"] / 1e9
    prose = (
        f"{record['device']}, jax {record['jax']}. `grouped`, mxfp4 weights with fp8_block's "
        f"tokens, biases on, {gigabytes:.1f} GB of random weights, each layer its own, all layers "
        "in one scan. `at the copy rate`: the time to read the experts that the tokens use, at the "
        "rate of a copy in the same run (read plus written)."
    )
    cells = [
        [
            str(row["num_tokens"]),
            f"{row['layer']:.1f}",
            str(row["experts"]),
            f"{row['bytes'] / 1e6:.0f}",
            f"{row['bytes'] / row['copy_bytes_per_second'] * 1e6:.1f}",
            f"{row['of_copy']:.2f}",
        ]
        for row in rows
    ]
    head = "| tokens | us a layer | experts | MB | at the copy rate, us | share |"
    times = section([f"{GROUPED} --gpt-oss {layers}"], prose, lines_of(head, cells))
    return page(f"GPT-OSS-120B's {layers} MoE layers on an H200", times)


LEAGUE_CELLS = "PYTHONPATH=.:benchmarks python"


def portable() -> str:
    """portable_h200.md."""
    name = "league_h200_xla.json"
    result = read_result(recorded.RESULTS / name)
    taken = {(each.series, each.num_tokens): each for each in result.timings}
    counts = sorted({each.num_tokens for each in result.timings})
    copied = result.ceilings.copy_bytes_per_second
    cells = []
    for count in counts:
        ours, blocks = (taken[("xla", recipe), count] for recipe in ("bf16", "fp8_block"))
        peer = taken[("ragged_dot", "bf16"), count].microseconds
        share = ours.weight_bytes / copied * 1e6 / ours.microseconds
        times = [f"{ours.microseconds:.0f}", f"{share:.2f}", f"{peer:.0f}"]
        over = f"{peer / ours.microseconds:.1f}"
        cells.append([str(count), *times, over, f"{blocks.microseconds:.0f}"])
    prose = (
        f"{result.device}, jax {result.versions['jax']}, a layer of Qwen3-30B-A3B's sizes, "
        f"microseconds, all of one run ([record]({name})): loops of 16 layers, each with another "
        f"routing. A copy moved {copied / 1e12:.2f} TB/s. `grouped` on the same weights: "
        "[league](../league.md)."
    )
    head = (
        "| tokens | `xla` bf16, us | of the copy rate | `lax.ragged_dot` bf16, us | over `xla` "
        "| `xla` fp8_block, us |"
    )
    command = f"{LEAGUE_CELLS} {result.command}"
    return page("`xla` on an H200", section([command], prose, lines_of(head, cells)))


PAGES: Mapping[str, Callable[[], str]] = {
    "decoder_h200.md": decoder,
    "gpt_oss_h200.md": gpt_oss,
    "portable_h200.md": portable,
}
"""What makes each page of benchmarks/results."""


def main() -> None:
    """Writes all of them."""
    for name, made in PAGES.items():
        (recorded.RESULTS / name).write_text(made())


if __name__ == "__main__":
    main()
