"""Every program of a run, compiled before the first is timed, several at a time."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from jax_megamoe.cli.gpu import contenders
from jax_megamoe.cli.gpu.machine import REFUSED, line_of
from jax_megamoe.cli.gpu.models import Model
from jax_megamoe.cli.gpu.routings import ROUTINGS, drawn, in_turn, tokens


@dataclass(frozen=True)
class Entry:
    """One layer of a model: of ours or a peer's, in a recipe.

    Attributes:
        name: the model's.
        model: its sizes.
        implementation: ours by its name, or the peer's.
        recipe: name of the recipe.
    """

    name: str
    model: Model
    implementation: str
    recipe: str


@dataclass(frozen=True)
class Built:
    """The programs of an entry.

    Attributes:
        make: f(key) -> parameters.
        runs: by number of tokens f(x, ids of all turns, factors, parameters), or why there is none.
        weight_bytes: of one expert.
    """

    make: Any
    runs: dict[int, Any]
    weight_bytes: float


LATE = "no time was left"


def compile_all(
    entries: Sequence[Entry],
    counts: Sequence[int],
    late: Callable[[], bool] = lambda: False,
    jobs: int | None = None,
) -> dict[Entry, Built | str]:
    """The programs of each entry, or why it has none.

    Tracing a layer of ours compiles its kernels, which runs compilers in processes of their own;
    XLA, too, works outside Python's lock.

    Args:
        entries: of this process.
        counts: numbers of tokens.
        late: whether nothing more may be started.
        jobs: programs at a time; None: the processors of the machine.
    """
    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        models = dict.fromkeys(each.model for each in entries)
        draws = [pool.submit(drawn, model, count) for model in models for count in counts]
        found = {each: pool.submit(_made, each, max(counts), late) for each in entries}
        # The largest calls first: they take longest to compile.
        runs = {
            (each, count): pool.submit(_run, future, each, count, late)
            for count in sorted(counts, reverse=True)
            for each, future in found.items()
        }
        built: dict[Entry, Built | str] = {}
        for each, future in found.items():
            made = future.result()
            if not isinstance(made, str):
                programs = {count: runs[each, count].result() for count in counts}
                made = Built(made[1], programs, made[3])
            built[each] = made
        for each in draws:
            each.result()
    return built


def _made(entry: Entry, most: int, late: Callable[[], bool]) -> tuple[Any, Any, Any, float] | str:
    """The layer, the program that makes its parameters, their shapes, bytes of an expert."""
    if late():
        return LATE
    prepare = contenders.OURS.get(entry.implementation) or contenders.PEERS[entry.implementation]
    try:
        prepared = prepare(entry.model, entry.recipe, most)
        key = jax.eval_shape(lambda: jax.random.key(0))
        shapes = jax.eval_shape(prepared.make, key)
        made = jax.jit(prepared.make).lower(key).compile()
    except REFUSED as error:
        return line_of(error)
    return prepared.layer, made, shapes, prepared.weight_bytes(shapes)


def _run(future: "Future[Any]", entry: Entry, count: int, late: Callable[[], bool]) -> Any:
    """The program of a number of tokens, or why there is none."""
    made = future.result()
    if isinstance(made, str) or late():
        return made if isinstance(made, str) else LATE
    layer, _, shapes, _ = made
    try:
        x, ids, factors = jax.eval_shape(partial(tokens, entry.model, count))
        program = in_turn(layer, unrolled=entry.implementation in contenders.OWN_KERNELS)
        return program.lower(x, (ids,) * ROUTINGS, factors, shapes).compile()
    except REFUSED as error:
        return line_of(error)
