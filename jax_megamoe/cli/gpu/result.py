"""Times of layers: as JSON, as a table, beside an earlier run, and against what a GPU can do."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from jax_megamoe import _checks, _files
from jax_megamoe.cli.gpu.models import MODELS
from jax_megamoe.cli.measurements import Measurements
from jax_megamoe.launch.measured import Measured

OURS = ("deep_gemm", "grouped", "xla", "reference")
"""Our implementations; the others of a result are peers."""


@dataclass(frozen=True)
class Timing:
    """One layer at one number of tokens.

    Attributes:
        model: name of its sizes.
        recipe: name of the recipe, or ``"weights x activations"`` where none has that name.
        implementation: ours by its name, or the peer's.
        num_tokens: of a rank.
        microseconds: median of a call; None: it did not run.
        weight_bytes: of the experts that the call uses; 0: not known.
        flops: of its matmuls; 0: not known.
        why: what kept it from running.
        num_ranks: expert-parallel ranks.
        source: the file that recorded it.
    """

    model: str
    recipe: str
    implementation: str
    num_tokens: int
    microseconds: float | None
    weight_bytes: float = 0.0
    flops: float = 0.0
    why: str = ""
    num_ranks: int = 1
    source: str = ""

    @property
    def series(self) -> tuple[str, str]:
        """Implementation and recipe."""
        return self.implementation, self.recipe


@dataclass(frozen=True)
class Ceilings:
    """What the GPU did at most in the same run.

    Attributes:
        copy_bytes_per_second: read plus written, of a large copy.
        bf16_flops: of a large bfloat16 product, in FLOP/s; 0: not measured.
        fp8_flops: likewise E4M3.
    """

    copy_bytes_per_second: float
    bf16_flops: float = 0.0
    fp8_flops: float = 0.0

    def flop_rate(self, recipe: str) -> float:
        """The rate of the tensor cores that a recipe's products are bounded by."""
        in_bf16 = recipe.endswith("bf16") or not self.fp8_flops
        return self.bf16_flops if in_bf16 else self.fp8_flops

    def microseconds(self, timing: Timing) -> float:
        """Least time: to read the weights once, and to multiply; 0 where neither is known."""
        read = timing.weight_bytes / self.copy_bytes_per_second
        rate = self.flop_rate(timing.recipe)
        return 1e6 * max(read, timing.flops / rate if rate else 0.0)

    def share(self, timing: Timing) -> float:
        """How much of the ceiling a timing reaches: 1 is all of it."""
        taken = timing.microseconds
        return self.microseconds(timing) / taken if taken else 0.0


@dataclass(frozen=True)
class GpuResult:
    """A run of `bench gpu`.

    Attributes:
        command: arguments of `python -m jax_megamoe`.
        device: kind of the GPU.
        versions: of what the times depend on; how programs are made is one (`routings.PROGRAMS`).
        ceilings: measured in the same run.
        timings: every layer, measured or not.
    """

    command: str
    device: str
    versions: dict[str, str]
    ceilings: Ceilings
    timings: tuple[Timing, ...] = field(default=())

    def write(self, path: Path) -> None:
        """Writes the result as JSON."""
        _files.write(path, json.dumps(asdict(self), indent=1) + "\n")

    def report(self) -> Measurements:
        """The result as a table: a line for each layer and implementation, a column for tokens."""
        counts = sorted({each.num_tokens for each in self.timings})
        lines: dict[tuple[str, str, str], dict[int, Timing]] = {}
        for each in self.timings:
            key = (each.model, each.implementation, each.recipe)
            lines.setdefault(key, {})[each.num_tokens] = each
        best = {
            (model, count): min(
                (
                    found[count].microseconds or float("inf")
                    for (other, *_), found in lines.items()
                    if other == model and count in found
                ),
                default=0.0,
            )
            for model, *_ in lines
            for count in counts
        }
        rows = [
            (
                f"{model} {implementation} {recipe}",
                *(self._cell(found.get(count), best[model, count]) for count in counts),
            )
            for (model, implementation, recipe), found in lines.items()
            if any(each.microseconds is not None for each in found.values())
        ]
        rates = [
            ("copy", self.ceilings.copy_bytes_per_second, "TB/s"),
            ("bf16", self.ceilings.bf16_flops, "TFLOP/s"),
            ("fp8", self.ceilings.fp8_flops, "TFLOP/s"),
        ]
        limits = ", ".join(f"{name} {rate / 1e12:.4g} {unit}" for name, rate, unit in rates if rate)
        return Measurements(
            title="Layers on a GPU",
            heading=f"{self.device}: {limits}",
            notes=(
                "Microseconds of a layer by tokens, the best of a model with a star; in brackets "
                "the share of its ceiling: the time to read its experts at the copy rate or to "
                "multiply, whichever is longer. Layers of one program, each with another routing, "
                "so that weights come from memory. Medians."
            ),
            columns=("layer", *map(str, counts)),
            rows=tuple(rows),
        )

    def _cell(self, timing: Timing | None, best: float) -> str:
        if timing is None or timing.microseconds is None:
            return "-"
        mark = "*" if timing.microseconds == best else ""
        share = self.ceilings.share(timing)
        return f"{mark}{timing.microseconds:.0f}" + (f" ({share:.2f})" if share else "")

    def measured(self) -> list[Measured]:
        """The times of our implementations, by which a call chooses, see `launch.measured`."""
        return measured_rows(self.device, self.timings)

    def missing(self) -> list[str]:
        """A line for each implementation that ran nothing of a model, and why."""
        ran = {(e.model, *e.series) for e in self.timings if e.microseconds is not None}
        lines = {
            f"{e.model} {e.implementation} {e.recipe}: {e.why}"
            for e in self.timings
            if (e.model, *e.series) not in ran
        }
        return sorted(lines)


def measured_rows(device: str, timings: Iterable[Timing]) -> list[Measured]:
    """One row for each layer that implementations of ours were timed on, sorted."""
    found: dict[tuple[int, str, str, int], dict[str, float]] = {}
    for each in timings:
        if each.implementation in OURS and each.microseconds is not None:
            key = (each.num_ranks, each.recipe, each.model, each.num_tokens)
            found.setdefault(key, {})[each.implementation] = round(each.microseconds, 1)
    return [
        Measured(device, *key, microseconds=dict(sorted(times.items())))
        for key, times in sorted(found.items())
    ]


def read_result(path: Path) -> GpuResult:
    """A result that `GpuResult.write` wrote.

    Raises:
        ValueError: the file is not such a result.
        OSError: it cannot be read.
    """
    found: Any = _files.read_json(path)
    names = {each.name for each in fields(GpuResult)}
    if not isinstance(found, dict) or set(found) != names:
        got = sorted(found) if isinstance(found, dict) else type(found).__name__
        raise ValueError(_checks.message(str(path), f"a JSON object of {sorted(names)}", got))
    timings = tuple(Timing(**row) for row in found.pop("timings"))
    return GpuResult(**found | {"ceilings": Ceilings(**found["ceilings"]), "timings": timings})


def compared(new: GpuResult, old: GpuResult) -> Measurements:
    """Both runs side by side, for the layers that both measured."""
    before = {_key(each): each.microseconds for each in old.timings if each.microseconds}
    rows = [
        (
            " ".join((each.model, *each.series)),
            f"{each.num_tokens}",
            f"{before[_key(each)]:.1f}",
            f"{each.microseconds:.1f}",
            f"{each.microseconds / before[_key(each)]:.3f}",
        )
        for each in new.timings
        if each.microseconds and _key(each) in before
    ]
    changed = [
        f"{name} {old.versions.get(name, 'none')} -> {new.versions.get(name, 'none')}"
        for name in sorted(new.versions.keys() | old.versions.keys())
        if new.versions.get(name) != old.versions.get(name)
    ]
    return Measurements(
        title="Two runs",
        heading=f"{old.device}, then {new.device}: {'; '.join(changed) or 'equal versions'}",
        notes="Microseconds; `new / old` below 1 is faster than before.",
        columns=("layer", "tokens", "old", "new", "new / old"),
        rows=tuple(rows),
    )


def _key(timing: Timing) -> tuple[Any, ...]:
    return timing.model, *timing.series, timing.num_tokens, timing.num_ranks


def title_of(model: str) -> str:
    """A model's title, or its name where it has none."""
    return MODELS[model].title if model in MODELS else model


def series_of(timings: Iterable[Timing]) -> list[tuple[str, str]]:
    """Implementation and recipe of what ran, in order of appearance."""
    ran: Sequence[Timing] = [each for each in timings if each.microseconds is not None]
    return list(dict.fromkeys(each.series for each in ran))
