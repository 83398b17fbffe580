"""Which implementation was fastest where it was measured: what `mega_moe` goes by on its own.

measured.json holds the times: `python benchmarks/league.py` writes it from benchmarks/results. Of a
GPU, recipe or number of ranks that is not in it nothing follows, and the fused or grouped kernel
comes before `xla`.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

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


def parse(text: str) -> tuple[Measured, ...]:
    """The rows of a file like measured.json."""
    return tuple(Measured(**row) for row in json.loads(text)["rows"])


@lru_cache(maxsize=1)
def table() -> tuple[Measured, ...]:
    """What measured.json holds."""
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
