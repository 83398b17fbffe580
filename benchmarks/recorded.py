"""The times that benchmarks/results holds, in the form of `bench gpu`."""

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from jax_megamoe.cli.gpu.models import MODELS
from jax_megamoe.cli.gpu.result import Ceilings, GpuResult, Timing, read_result
from jax_megamoe.cli.gpu.routings import PROGRAMS

RESULTS = Path(__file__).parent / "results"
DEVICE = "NVIDIA H200"
CODES_AND_SCALES = {"mxfp4_block": 17 / 32, "fp8_block": 1 + 4 / 128**2, "bf16": 2.0}
"""Bytes of a weight, its scale's part included."""


def read(name: str, folder: Path | None = None) -> Any:
    """The JSON of a file in a folder; None: of `RESULTS`."""
    return json.loads(((folder or RESULTS) / name).read_text())


def _bf16(row: dict[str, Any]) -> dict[str, float]:
    """Bytes and FLOP of the same layer on bfloat16 matrices."""
    per_weight = CODES_AND_SCALES["bf16"] / CODES_AND_SCALES["fp8_block"]
    return dict(weight_bytes=row["weight_bytes"] * per_weight, flops=row["flops"])


def hopper_fp8() -> Iterator[Timing]:
    """fp8_block with the bare launch and ragged_dot beside it, without `xla`, which was a loop over
    experts then."""
    for name in ("sm90_h200.json", "sm90_h200_long.json"):
        for row in read(name)["rows"]:
            place = (row["shape"], "fp8_block")
            work = dict(weight_bytes=row["weight_bytes"], flops=row["flops"])
            times = {"deep_gemm": row["scan"], "bare DeepGEMM": row["bare"]}
            for what, taken in times.items():
                yield Timing(*place, what, row["num_tokens"], taken, **work, source=name)
            if isinstance(row["ragged"], float):
                peer = (row["shape"], "bf16", "ragged_dot", row["num_tokens"], row["ragged"])
                yield Timing(*peer, **_bf16(row), source=name)


def hopper_mxfp4() -> Iterator[Timing]:
    """mxfp4_block with the bare launch beside it."""
    name = "flashinfer_h200.json"
    for row in read(name)["rows"]:
        work = dict(weight_bytes=row["weight_bytes"], flops=row["flops"], source=name)
        place = (row["shape"], "mxfp4_block")
        yield Timing(*place, "deep_gemm", row["tokens"], row["scan"], **work)
        yield Timing(*place, "bare FlashInfer", row["tokens"], row["bare"], **work)


GROUPED_RECIPES = {
    "mxfp4 x fp8_block": "mxfp4_block",
    "mxfp4 x bf16": "mxfp4_bf16",
    "mxfp4 x mxfp8": "mxfp4",
    "fp8_block x fp8_block": "fp8_block",
}


def grouped() -> Iterator[Timing]:
    """The grouped kernels, not cut along K, as they ran by default then."""
    name = "grouped_h200.json"
    for row in read(name)["rows"]:
        model = MODELS[row["shape"]]
        recipe = GROUPED_RECIPES[row["recipe"]]
        per_weight = CODES_AND_SCALES["fp8_block" if recipe == "fp8_block" else "mxfp4_block"]
        yield Timing(
            row["shape"],
            recipe,
            "grouped",
            row["num_tokens"],
            row["plain"],
            weight_bytes=row["experts"] * per_weight * model.weights_of_an_expert,
            flops=model.flops(row["num_tokens"]),
            source=name,
        )


def two_gpus() -> Iterator[Timing]:
    """A layer of DeepSeek-V4-Flash's size over two GPUs."""
    name = "expert_parallel_h200_x2.json"
    for row in (row for row in read(name).values() if isinstance(row, dict)):
        if row.get("shape") != "flash":
            continue
        common = dict(num_ranks=2, source=name)
        work = dict(weight_bytes=row["weight_bytes"], flops=row["flops"])
        place = ("v4_flash", "fp8_block")
        yield Timing(*place, "deep_gemm", row["tokens"], row["us"], **work, **common)
        if "bf16_us" in row:
            peer = ("v4_flash", "bf16", "ragged_dot", row["tokens"], row["bf16_us"])
            yield Timing(*peer, **_bf16(row), **common)


LEAGUE = "league_h200"
"""Names of the files of benchmarks/gpu/league_cells.py start so."""


def runs() -> Iterator[tuple[str, GpuResult]]:
    """Files that `bench gpu` and after them those that the league wrote on this kind of GPU."""
    for pattern in ("bench_gpu_*.json", f"{LEAGUE}*.json"):
        for path in sorted(RESULTS.glob(pattern)):
            found = read_result(path)
            if found.device == DEVICE:
                yield path.name, found


def in_league(timing: Timing) -> bool:
    """Whether a time is of the league's own run."""
    return timing.source.startswith(LEAGUE)


def timings() -> list[Timing]:
    """All of them; of one that was measured twice, the later."""
    found = [*hopper_fp8(), *hopper_mxfp4(), *grouped(), *two_gpus()]
    found += [
        replace(each, source=name)
        for name, result in runs()
        for each in result.timings
        if each.microseconds is not None
    ]
    keyed = {(e.num_ranks, e.model, *e.series, e.num_tokens): e for e in found}
    return list(keyed.values())


def ceilings() -> Ceilings:
    """The highest rates that a run measured: no GPU of the kind does more."""
    first = Ceilings(**read("sm90_h200.json")["ceilings"])
    measured = [first, *(result.ceilings for name, result in runs() if name.startswith(LEAGUE))]
    rates = (max(getattr(each, rate.name) for each in measured) for rate in fields(Ceilings))
    return Ceilings(*rates)


def environments() -> dict[str, str]:
    """Driver and jax of the recorded files, and whether our layers were unrolled."""
    found = {}
    for name in sorted({each.source for each in timings()}):
        held = read(name)
        held = held.get("versions", held)
        said = [f"{key} {held[key]}" for key in ("driver", "jax") if isinstance(held.get(key), str)]
        said += [f"layers {held[PROGRAMS]}"] if PROGRAMS in held else []
        found[name] = ", ".join(said)
    return found
