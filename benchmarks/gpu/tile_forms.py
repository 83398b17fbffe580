"""In which form of Humming's tiles a layer of few rows is fastest, on one GPU.

    PYTHONPATH=.:tests:tests/gpu:benchmarks/gpu python benchmarks/gpu/tile_forms.py \
        [--shapes qwen3_30b] [--tokens 1 8] [--weights mxfp4]

Each product has its tiles as `tiles.choose` says (`wide`), these with the last wave cut along K
(`cut`), or tiles of half the columns (`narrow`); all pairs of forms for both products. Times are of
the program that grouped.py times; the pairs take turns, and each has the median of its turns.
`tiles` is how many tiles the first and the second product have, `steps` how many blocks of K, and
`places` how many run at once. Results go to $OUT/tile_forms.json after every row. `tiles.measured`
goes by them.
"""

import argparse
import faulthandler
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import grouped
import grouped_layers
import jax
import numpy as np
from checks import OUT

from jax_megamoe.plan.grouped.call import GroupedLayer
from jax_megamoe.plan.grouped.product import Tiles
from jax_megamoe.plan.grouped.tiles import narrow

TOKENS = (1, 2, 4, 8)
FORMS = ("wide", "cut", "narrow")
PAIRS = tuple(itertools.product(FORMS, FORMS))
TURNS = 7
SECONDS_OF_A_TURN = 0.012
SECONDS = 400


@dataclass(frozen=True, kw_only=True)
class Formed(GroupedLayer):
    """A layer whose products have tiles in some form each."""

    forms: tuple[str, str] = ("wide", "wide")

    def tiles(self, w2: bool) -> Tiles:
        chosen, form = super().tiles(w2), self.forms[w2]
        if form == "cut":
            return replace(chosen, stream_k=True, ordered=True)
        if form == "narrow":
            return narrow(chosen)
        return chosen


def in_form(layer: GroupedLayer, pair: tuple[str, str]) -> Formed:
    """The layer with tiles in a pair of forms."""
    same = {each.name: getattr(layer, each.name) for each in fields(layer)}
    return Formed(**same | dict(stream_k=False), forms=pair)


def in_turn(programs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median microseconds of a layer of each program, all of which take turns."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for run in programs.values():
        jax.block_until_ready(run())
    for _ in range(TURNS):
        for name, run in programs.items():
            calls, start = 0, time.perf_counter()
            while calls < 2 or time.perf_counter() - start < SECONDS_OF_A_TURN:
                jax.block_until_ready([run() for _ in range(4)])
                calls += 4
            times[name].append((time.perf_counter() - start) / calls / grouped.LAYERS)
    return {name: 1e6 * statistics.median(each) for name, each in times.items()}


def row(shape: str, layer: GroupedLayer, stored: Any) -> dict[str, Any]:
    """A layer with every pair of forms."""
    operands = grouped_layers.tokens(layer) | grouped_layers.parameters(layer, stored)
    found = in_turn(
        {" ".join(pair): grouped.layers(in_form(layer, pair), operands) for pair in PAIRS}
    )
    wide = in_form(layer, ("wide", "wide"))
    both = [(layer.product(w2), wide.tiles(w2)) for w2 in (False, True)]
    ids = np.asarray(operands["topk_ids"])
    blocks = [
        -(-np.count_nonzero(ids == each) // layer.block_m) for each in range(layer.num_experts)
    ]
    return dict(
        shape=shape,
        recipe=f"{layer.weights} x {layer.activations}",
        num_tokens=layer.num_tokens,
        tiles=[int(sum(blocks)) * p.n // t.block[1] for p, t in both],
        steps=[p.k // t.block[2] for p, t in both],
        places=[layer.num_sms * t.ctas for _, t in both],
        microseconds=found,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Forms of tiles on one GPU.")
    parser.add_argument("--shapes", nargs="+", default=[*grouped.SHAPES, "gpt_oss_120b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--weights", default="mxfp4")
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    found: list[dict[str, Any]] = []
    for shape in arguments.shapes:
        sizes = grouped.MODELS[shape].sizes
        each, stored = grouped.prepared(sizes, (arguments.weights, "fp8_block"))
        layers = [replace(each, num_tokens=count) for count in arguments.tokens]
        grouped.compiled([in_form(layer, pair) for layer in layers for pair in PAIRS])
        for layer in layers:
            found.append(row(shape, layer, stored))
            print(json.dumps(found[-1]), flush=True)
            command = f"benchmarks/gpu/tile_forms.py {' '.join(sys.argv[1:])}".strip()
            result = {
                "command": command,
                "device": jax.devices()[0].device_kind,
                "jax": jax.__version__,
            }
            (OUT / "tile_forms.json").write_text(json.dumps(result | {"rows": found}, indent=1))


if __name__ == "__main__":
    main()
