"""Which implementation was fastest where it was measured: what `mega_moe` goes by on its own.

measured.json holds the times: `python benchmarks/league.py` writes it from benchmarks/results. Of a
GPU, recipe or number of ranks that is not in it nothing follows, and the fused or grouped kernel
comes before `xla`. `bench gpu --table` writes such a file for another GPU.
"""

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from jax_megamoe import _checks

VARIABLE = "JAX_MEGAMOE_MEASURED"
"""Names a file that takes the place of measured.json."""

NEAR = 4.0
"""A time counts for numbers of tokens from a quarter to four times the measured one."""


@dataclass(frozen=True)
class Measured:
    """Whole layers of one size, all timed on one kind of GPU.

    Attributes:
        device: as JAX names its kind, for example ``"NVIDIA H200"``.
        num_ranks: expert-parallel ranks.
        recipe: name of the recipe.
        model: name of the layer's sizes.
        num_tokens: of a rank.
        microseconds: of a call, by implementation.
    """

    device: str
    num_ranks: int
    recipe: str
    model: str
    num_tokens: int
    microseconds: dict[str, float]


def parse(text: str, where: str = "measured.json") -> tuple[Measured, ...]:
    """The rows of a file like measured.json.

    Raises:
        ValueError: the text is not such a file.
    """
    try:
        return tuple(Measured(**row) for row in json.loads(text)["rows"])
    except (KeyError, TypeError, ValueError) as error:
        expected = "a file that bench gpu --table wrote"
        got = _checks.described(error)
        raise ValueError(_checks.message(where, expected, got)) from error


def dump(rows: Iterable[Measured], made: str) -> str:
    """The text of such a file; `made` says how the times were got."""
    lines = ",\n".join(f"  {json.dumps(asdict(row))}" for row in rows)
    return f'{{\n "made": {json.dumps(made)},\n "rows": [\n{lines}\n ]\n}}\n'


def table() -> tuple[Measured, ...]:
    """What measured.json holds, or the file that ``$JAX_MEGAMOE_MEASURED`` names.

    Raises:
        ValueError: the named file is not such a table.
        OSError: it cannot be read.
    """
    return _read(os.environ.get(VARIABLE, ""))


@lru_cache(maxsize=4)
def _read(path: str) -> tuple[Measured, ...]:
    if path:
        return parse(Path(path).read_text(), f"{VARIABLE}, {path}")
    return parse(files("jax_megamoe.launch").joinpath("measured.json").read_text())


def fastest(
    rows: Sequence[Measured],
    device: str,
    recipe: str,
    num_ranks: int,
    num_tokens: int,
    able: Sequence[str],
) -> str | None:
    """The implementation of `able` that took the least time, or None where that is not known.

    The nearest number of tokens counts at which two or more of them were timed on layers of the
    same sizes; over several sizes the geometric mean.

    Args:
        rows: the measured layers.
        device: kind of the device.
        recipe: name of the recipe.
        num_ranks: expert-parallel ranks.
        num_tokens: of a rank.
        able: implementations that can run the call.
    """
    found: dict[int, list[dict[str, float]]] = {}
    for row in rows:
        if (row.device, row.recipe, row.num_ranks) != (device, recipe, num_ranks):
            continue
        times = {name: row.microseconds[name] for name in able if name in row.microseconds}
        if len(times) > 1:
            found.setdefault(row.num_tokens, []).append(times)
    if not found or num_tokens < 1:
        return None

    def distance(measured: int) -> float:
        return abs(math.log(measured / num_tokens))

    nearest = min(found, key=distance)
    if distance(nearest) > math.log(NEAR) + 1e-9:
        return None
    timed = found[nearest]
    common = [name for name in able if all(name in times for times in timed)]
    if len(common) < 2:
        timed, common = timed[:1], list(timed[0])
    return min(common, key=lambda name: sum(math.log(times[name]) for times in timed))


def fastest_throughout(
    rows: Sequence[Measured],
    device: str,
    recipe: str,
    num_ranks: int,
    most_tokens: int,
    able: Sequence[str],
) -> str | None:
    """The implementation that was the fastest at every measured number of tokens up to the most of
    a call, for what is chosen once for all calls; None where there is none.

    Args:
        rows, device, recipe, num_ranks, able: see `fastest`.
        most_tokens: of a rank in one call.
    """
    key = device, recipe, num_ranks
    counts = {row.num_tokens for row in rows if (row.device, row.recipe, row.num_ranks) == key}
    found = {
        fastest(rows, device, recipe, num_ranks, count, able)
        for count in counts
        if count <= max(most_tokens, min(counts))
    }
    return found.pop() if len(found) == 1 else None
