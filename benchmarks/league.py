"""Writes what follows from the recorded times of GPUs; nothing here is measured.

    PYTHONPATH=.:benchmarks python benchmarks/league.py

- benchmarks/league.md: every implementation and peer beside the others, by model and tokens;
- docs/images/league.png: the same as a picture;
- jax_megamoe/launch/measured.json: what `mega_moe` goes by where no implementation is named.

New times enter by a run of benchmarks/gpu/league_cells.py, whose league_h200_<models>.json belong
into benchmarks/results, or of `bench gpu --json benchmarks/results/bench_gpu_<name>.json`.
"""

from collections.abc import Sequence
from pathlib import Path

import recorded

from jax_megamoe.cli.gpu.contenders import TORCH_PEERS
from jax_megamoe.cli.gpu.models import MODELS
from jax_megamoe.cli.gpu.picture import save_picture
from jax_megamoe.cli.gpu.result import OURS, Ceilings, Timing, measured_rows
from jax_megamoe.launch.measured import dump

ROOT = Path(__file__).parents[1]
PAGE, PICTURE = ROOT / "benchmarks/league.md", ROOT / "docs/images/league.png"
TABLE = ROOT / "jax_megamoe/launch/measured.json"

TOKENS = (1, 8, 64, 256, 1024, 4096)
COLUMNS = (
    ("deep_gemm", "fp8_block"),
    ("deep_gemm", "mxfp4_block"),
    ("grouped", "fp8_block"),
    ("grouped", "mxfp4_block"),
    ("grouped", "mxfp4_bf16"),
    ("grouped", "bf16"),
    ("xla", "fp8_block"),
    ("xla", "bf16"),
    ("bare DeepGEMM", "fp8_block"),
    ("bare FlashInfer", "mxfp4_block"),
    ("humming", "fp8_block"),
    ("humming", "mxfp4_block"),
    ("humming", "mxfp4_bf16"),
    ("triton_kernels", "mxfp4_bf16"),
    ("tokamax", "bf16"),
    ("ragged_dot", "bf16"),
)
"""Implementation and recipe."""

NOT_RUN = "not run"
ONE_RUN = "†"
"""Marks a cell of the league's own run."""


def table(
    model: str, num_ranks: int, timings: Sequence[Timing], ceilings: Ceilings
) -> tuple[list[str], list[str]]:
    """The table of a model, and a line for each number of tokens at which we lose."""
    found = {
        (each.series, each.num_tokens): each
        for each in timings
        if each.model == model and each.num_ranks == num_ranks
    }
    lines = [
        f"| tokens | {' | '.join('<br>'.join(column) for column in COLUMNS)} |",
        f"|---:|{'---:|' * len(COLUMNS)}",
    ]
    lost = []
    for count in TOKENS:
        row = [found.get((column, count)) for column in COLUMNS]
        ran = [each for each in row if each is not None]
        best = min(ran, key=_time, default=None)
        ours = min((e for e in ran if e.implementation in OURS), key=_time, default=None)
        bold = [each for each in (best, ours) if each is not None]
        cells = [_cell(each, ceilings, any(each is other for other in bold)) for each in row]
        lines.append(f"| {count} | {' | '.join(cells)} |")
        if best is not None and ours is not None and best is not ours:
            slower = _time(ours) / _time(best)
            lost.append(
                f"| {MODELS[model].title} | {num_ranks} | {count} | {' '.join(ours.series)}, "
                f"{_time(ours):.0f} | {' '.join(best.series)}, {_time(best):.0f} | {slower:.2f} |"
            )
    return lines, lost


def _time(timing: Timing) -> float:
    assert timing.microseconds is not None
    return timing.microseconds


def _cell(timing: Timing | None, ceilings: Ceilings, bold: bool) -> str:
    if timing is None:
        return NOT_RUN
    text = f"{timing.microseconds:.0f}"
    text = f"**{text}**" if bold else text
    mark = ONE_RUN if recorded.in_league(timing) else ""
    return f"{text}{mark} ({ceilings.share(timing):.2f})"


def page(timings: Sequence[Timing], ceilings: Ceilings) -> str:
    """league.md."""
    copy, bf16, fp8 = (
        ceilings.copy_bytes_per_second / 1e12,
        ceilings.bf16_flops / 1e12,
        ceilings.fp8_flops / 1e12,
    )
    lines = [
        "# League table",
        "",
        "    PYTHONPATH=.:benchmarks python benchmarks/league.py",
        "",
        f"Times of one MoE layer on {recorded.DEVICE}, from the records below; *{NOT_RUN}* means "
        "that no record has the cell. Microseconds, medians; in brackets the share of the ceiling: "
        "the time to read the experts that the tokens use once at the copy rate "
        f"({copy:.2f} TB/s, read plus written), or to multiply ({bf16:.0f} TFLOP/s in bf16, "
        f"{fp8:.0f} in fp8, cuBLASLt), whichever is longer. Tokens are those of one rank.",
        "",
        "The best of a row and our best are bold: two bold cells mean that we lose. `bare` is "
        "staging and the same kernel launched by the driver, in a CUDA graph: a floor for "
        "`deep_gemm`, no layer that JAX can call. `grouped` and `deep_gemm` are layers of one "
        "jitted program, each with another routing, so that weights come from memory: where the "
        "list of records says *unrolled*, they follow one another as peers' layers do in a CUDA "
        "graph; else they are those of a scan, which computes ids between them. "
        "`xla` and `ragged_dot` are layers of a loop, or calls of a jitted layer in older records. "
        "Files were not made in the same minutes: compare cells of "
        "two files with care. GPT-OSS's layer has its biases and its own SwiGLU.",
        "",
    ]
    if any(recorded.in_league(each) for each in timings):
        lines += [
            f"Cells with {ONE_RUN} are of benchmarks/gpu/league_cells.py: all columns of a file on "
            "one GPU within minutes, each program 16 layers with another routing each, peers that "
            "need torch in a CUDA graph of as many, `xla` and `ragged_dot` in a loop. "
            "`mxfp4_bf16` and what XLA compiles are files of their own, of the same day. "
            "`grouped` of `mxfp4_bf16` was timed with wide tiles at one token, where it plans "
            "Humming's own smaller ones since 2026-12-01: those were not timed.",
            "",
        ]
    lost: list[str] = []
    for ranks in sorted({each.num_ranks for each in timings}):
        for model in MODELS:
            if ranks > 1 and not any((e.num_ranks, e.model) == (ranks, model) for e in timings):
                continue
            if not any((e.num_ranks, e.model) == (ranks, model) for e in timings):
                lines += [f"## {MODELS[model].title}", "", f"No cell is recorded: {NOT_RUN}.", ""]
                continue
            rows, more = table(model, ranks, timings, ceilings)
            lost += more
            over = f", over {ranks} GPUs" if ranks > 1 else ""
            note = "`ragged_dot` stands between two all_to_alls here.\n" if ranks > 1 else ""
            lines += [f"## {MODELS[model].title}{over}", "", *([note] if note else []), *rows, ""]
    lines += [
        "## `grouped` beside Humming's own layers",
        "",
        "Ours over theirs, of cells of one file. Both have the same products; most tiles are the "
        "same, and fewer of our waves are cut. Ours sum in an order that repeats; theirs do not "
        "where a wave is cut. Around the products we launch three or four kernels, they four or "
        "five, of which those that sort and sum are written for this comparison, because Humming's "
        "wheel has none.",
        "",
        *beside_humming(timings),
        "",
        "## Where we lose",
        "",
        "| model | GPUs | tokens | ours, us | best, us | ours / best |",
        "|---|---:|---:|---|---|---:|",
        *lost,
        "",
        "## Records",
        "",
        *(
            f"- [{name}](results/{name}){': ' if said else ''}{said}"
            for name, said in recorded.environments().items()
        ),
    ]
    return "\n".join([*lines, ""])


def beside_humming(timings: Sequence[Timing]) -> list[str]:
    """The rows of a table: a model's recipe, and the ratio at each number of tokens."""
    found = {(e.model, *e.series, e.num_tokens): e for e in timings if e.num_ranks == 1}
    counts, rule = " | ".join(map(str, TOKENS)), "---:|" * len(TOKENS)
    lines = [f"| layer | recipe | {counts} |", f"|---|---|{rule}"]
    for implementation, recipe in COLUMNS:
        if implementation != "humming":
            continue
        for name, model in MODELS.items():
            pairs = [
                (found.get((name, "grouped", recipe, n)), found.get((name, "humming", recipe, n)))
                for n in TOKENS
            ]
            cells = [
                f"{ours.microseconds / theirs.microseconds:.2f}"
                if ours and theirs and ours.source == theirs.source
                else NOT_RUN
                for ours, theirs in pairs
            ]
            lines.append(f"| {model.title} | {recipe} | {' | '.join(cells)} |")
    return lines


def measured(timings: Sequence[Timing]) -> str:
    """measured.json: of each layer, those of our implementations that were timed."""
    sources = sorted({each.source for each in timings if each.implementation in OURS})
    made = f"python benchmarks/league.py, from benchmarks/results/{{{','.join(sources)}}}"
    return dump(measured_rows(recorded.DEVICE, timings), made)


def main() -> None:
    """Writes all three."""
    timings, ceilings = recorded.timings(), recorded.ceilings()
    PAGE.write_text(page(timings, ceilings))
    TABLE.write_text(measured(timings))
    drawn = [
        each
        for each in timings
        if each.num_ranks == 1
        and each.implementation in ("deep_gemm", "grouped", "ragged_dot", *TORCH_PEERS)
        and each.series in COLUMNS
    ]
    PICTURE.parent.mkdir(exist_ok=True)
    save_picture(
        PICTURE,
        drawn,
        ceilings,
        models=["qwen3_30b", "dsv3_ep8share", "v4_flash"],
        caption=f"One MoE layer on one {recorded.DEVICE}, from benchmarks/results; lower is faster",
    )


if __name__ == "__main__":
    main()
