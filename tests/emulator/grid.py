"""The calls of the whole table: README's cells, each over ranks, and a family's special sizes.

`grid` calls every accepted activation with every precision of a shared expert on 1, 2, 4 and 8
ranks. All combinations of the other factors would be some 60,000 calls; so each call draws them,
and draws those whose pairs the family has met least (a pairwise design). `special` are the calls
that change what the grid holds fixed, `large` has a real model's matrices.
"""

import dataclasses
import functools
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax_megamoe as mm
from emulator.cells import GROUPED, Cell, accepted

RANKS = (1, 2, 4, 8)
MOST = 150
"""max_num_tokens of the grid's calls."""
FEWEST = 16
"""Calls of the grid for a family with few README cells, which then come several times."""

ROUTINGS: dict[str, dict[str, Any]] = {
    "all": {},
    "holes": dict(unrouted=0.2),
    "idle experts": dict(idle_experts=(0, 3)),
    "an idle rank": dict(idle_ranks=(0,)),
    "replicas": dict(replicas=8),
    "padding": dict(mask=True),
    "everything": dict(unrouted=0.2, idle_experts=(1,), idle_ranks=(1,), replicas=8, mask=True),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "tokens": (0, 1, 7, 33, 130, MOST),
    "routing": tuple(ROUTINGS),
    "experts": ((8, 2), (16, 3)),  # with the tokens they give the tile heights
    "stats": (False, True),
    "order": ((0.0, 0), (0.5, 0), (0.95, 77)),  # delay and grid id
}
"""What a call draws, besides its seed."""

_TRIES = 40


def _pairs(drawn: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Every two values that a draw has together."""
    return list(itertools.combinations(sorted(drawn.items()), 2))


def _least_met(met: Counter[Any], rng: random.Random, fixed: dict[str, Any]) -> dict[str, Any]:
    """The draw with the most pairs that were not met yet; of equals the first."""

    def draw() -> dict[str, Any]:
        return fixed | {name: rng.choice(values) for name, values in FACTORS.items()}

    best = max((draw() for _ in range(_TRIES)), key=lambda d: sum(not met[p] for p in _pairs(d)))
    met.update(_pairs(best))
    return best


def grid(form: str, source: str) -> Iterator[Cell]:
    """Every README cell of a family on 1, 2, 4 and 8 ranks, what else differs drawn."""
    rng, met = random.Random(f"{form} {source}"), Counter[Any]()
    own = [cell for cell in accepted() if (cell.form, cell.source) == (form, source)]
    times = -(-FEWEST // (len(own) * len(RANKS)))
    for seed, (plain, ranks) in enumerate([*itertools.product(own, RANKS)] * times, 1):
        drawn = _least_met(met, rng, dict(ranks=ranks, activation=plain.activation))
        delay, grid_id = drawn["order"]
        experts, top_k = drawn["experts"]
        routing = dict(ROUTINGS[drawn["routing"]])
        if ranks == 1:
            routing.pop("idle_ranks", None)
        cell = dataclasses.replace(
            plain, ranks=ranks, tokens=drawn["tokens"], max_tokens=MOST, experts=experts,
            top_k=top_k, stats=drawn["stats"], delay=delay, grid_id=grid_id, seed=seed, **routing,
        )  # fmt: skip
        if not cell.refusal():
            yield cell


def special(form: str, source: str) -> Iterator[Cell]:
    """A family's calls that change what the grid holds fixed."""
    cell = functools.partial(Cell, form, source)
    shared = next(iter(mm.RECIPES[form].shared_formats), "")
    found = [
        # Tile heights grow with the tokens of an expert.
        *(cell(experts=2, tokens=tokens) for tokens in (64, 300)),
        cell(ranks=2, experts=2, tokens=300),
        cell(unrouted=1.0),
        cell(experts=6, top_k=3, hidden=1024, intermediate=512, num_sms=8),
        cell(intermediate=384),
        cell(fast_math=False),
        cell(reserved_sms=2, num_sms=8, smid_offset=2),
        cell(max_tokens=7000, tokens=100),
    ]
    if shared:
        found.append(cell(shared=shared, num_shared=2, ranks=2, tokens=32, mask=True, stats=True))
    yield from (each for each in found if not each.refusal())


def large(form: str, source: str) -> Cell:
    """Hidden size 7168 and intermediate size 2048, few experts."""
    return Cell(form, source, experts=4, hidden=7168, intermediate=2048, tokens=8, num_sms=8)


GROUPED_ARCHS = {
    "mxfp4": (80, 90, 120),
    "mxfp8": (80, 90, 100),
    "nvfp4": (80, 90, 120),
    "fp8_block": (89, 90, 120),
    "mxfp4_block": (90,),
    "mxfp4_bf16": (80, 90, 120),
    "bf16": (90, 100),
}
"""Of the grouped products' recipes: generations whose tensor-core instructions differ."""


def grouped() -> Iterator[Cell]:
    """Calls of the grouped products: every recipe, and what a layer may have."""
    for form, archs in GROUPED_ARCHS.items():
        cell = functools.partial(Cell, form, GROUPED)
        yield from (cell(arch=arch) for arch in archs)
        first = archs[0]
        yield cell(arch=90, ranks=2, tokens=33, unrouted=0.2, idle_experts=(1,), stats=True)
        yield cell(arch=first, tokens=7, mask=True, stats=True, replicas=8)
        yield cell(arch=90, tokens=300, experts=2, delay=0.7, seed=3)
        yield cell(arch=first, tokens=130, experts=16, top_k=3, delay=0.9, seed=5)
        # More rows than a block has threads: several blocks sort them.
        yield cell(arch=first, tokens=300, top_k=8, unrouted=0.2, stats=True, delay=0.7, seed=9)
    gpt_oss = dict(activation="gpt_oss", biases=True)
    for form, arch in (
        *(("mxfp4", 80), ("mxfp4", 90), ("fp8_block", 90), ("mxfp4_block", 90)),
        ("bf16", 90),
    ):
        yield Cell(form, GROUPED, arch=arch, **gpt_oss)
    yield Cell("mxfp4", GROUPED, arch=90, activation="situ")
    yield Cell("mxfp4", GROUPED, arch=80, tokens=1)
    yield Cell("mxfp4", GROUPED, arch=90, fast_math=False)
    # Of more ranks XLA's threads wait for one another between a callback and an all_to_all:
    # end_to_end.py, which has no callbacks, runs those.
    yield from (Cell("bf16", GROUPED, arch=90, tokens=n) for n in (1, 7, 64))
    yield Cell("bf16", GROUPED, arch=90, tokens=64, experts=4, intermediate=384, num_sms=8)
    yield from blackwell_slots()
    yield from forms_of_tiles()
    yield from few_rows()
    yield Cell("mxfp4", GROUPED, arch=90, ranks=2, tokens=9, top_k=3, idle_ranks=(1,))
    yield Cell("mxfp4", GROUPED, arch=90, experts=4, hidden=7168, intermediate=2048, tokens=8)


def forms_of_tiles() -> Iterator[Cell]:
    """Calls whose products have narrow tiles, or a wave that is cut (`tiles.measured`)."""
    cell = functools.partial(Cell, "mxfp4_block", GROUPED, arch=90)
    yield cell(tokens=1, experts=4, hidden=2048, intermediate=1024, num_sms=16)
    yield cell(tokens=8, experts=16, hidden=4096)


def few_rows() -> Iterator[Cell]:
    """Calls on Hopper whose products of BF16 inputs have few tiles: deep ones that are cut along K,
    then uncut ones of which two and three run on a multiprocessor."""
    for form in ("mxfp4_bf16", "mxfp8"):
        cell = functools.partial(Cell, form, GROUPED, arch=90, top_k=4)
        yield cell(tokens=1, hidden=2048, num_sms=96, delay=0.7)
        yield cell(tokens=1, intermediate=2304, num_sms=96, biases=True, activation="gpt_oss")
        yield cell(tokens=1, intermediate=2304, num_sms=48)
        yield cell(tokens=4, hidden=2048, num_sms=64, delay=0.7, seed=3)
        yield cell(tokens=1, num_sms=8)


def blackwell_slots() -> Iterator[Cell]:
    """Calls of the products of BF16 weights on SM100: their heights, pairs and blocks alone."""
    cell = functools.partial(Cell, "bf16", GROUPED, arch=100)
    yield from (cell(tokens=n) for n in (1, 7, 64))
    yield cell(tokens=7, mask=True, stats=True, replicas=8)
    yield cell(tokens=64, experts=4, unrouted=0.2, idle_experts=(2,), biases=True, delay=0.7)
    yield cell(tokens=130, experts=2, delay=0.9, seed=5)
    yield cell(tokens=300, experts=2, delay=0.7, seed=3)
    yield cell(tokens=64, unrouted=1.0)
    yield cell(activation="gpt_oss", biases=True)
    # Five blocks of the second matrix, then an odd number of SMs.
    yield cell(tokens=64, experts=4, hidden=640, intermediate=384, num_sms=8, delay=0.5)
    yield cell(tokens=300, experts=2, num_sms=5, unrouted=0.2)
    yield cell(tokens=130, top_k=8, mask=True, stats=True, replicas=8)
    yield cell(ranks=2, tokens=33, unrouted=0.2, idle_experts=(1,), stats=True)
    yield cell(tokens=8, experts=4, hidden=7168, intermediate=2048, num_sms=8)


def plain(families: list[tuple[str, str]]) -> Iterator[Cell]:
    """README's cells of these families, in the smallest call."""
    return (cell for cell in accepted() if (cell.form, cell.source) in families)


def mixed(families: list[tuple[str, str]]) -> Iterator[Cell]:
    """All other calls, one of each family in turn."""
    others = []
    for family in families:
        specials = iter([large(*family), *special(*family)])
        own: list[Cell] = []
        for number, cell in enumerate(grid(*family)):
            own += [cell] if number % 2 else [cell, *itertools.islice(specials, 1)]
        others.append([*own, *specials])
    for row in itertools.zip_longest(*others):
        yield from filter(None, row)
