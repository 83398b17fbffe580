"""Where the time of a grouped layer goes, kernel by kernel, on one GPU.

    PYTHONPATH=.:tests:tests/gpu:benchmarks/gpu python benchmarks/gpu/layer_trace.py \
        [--shapes qwen3_30b] [--tokens 64 4096] [--weights mxfp4] [--stream-k]

By JAX's profiler, over the program that grouped.py times: the median microseconds of each launch of
a layer, in their order, and `until_next`: from the start of a launch to that of the one behind it,
which for the last is that of the next layer's first. A launch may start before the one ahead of it
ends, so that the first figures may add up to more than `layer`, the sum of the second. The profiler
slows small launches down. Results go to $OUT/layer_trace.json.
"""

import argparse
import json
import re
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import grouped
import grouped_layers
import jax
import step_trace
from checks import OUT

from jax_megamoe.plan.grouped.layer import plan_grouped

CALLS = 4
"""Programs under the profiler."""


def names_of(layer: Any) -> list[str]:
    """The launches of a layer by name; of the products `first` and `second`."""
    own = [launch.kernel for launch in plan_grouped(layer).launches]
    numbered = iter(("first product", "second product"))
    return [each.symbol if each.source == "jax_megamoe" else next(numbered) for each in own]


def by_launch(events: Sequence[step_trace.Event], names: Sequence[str]) -> dict[str, Any]:
    """Median microseconds of the launches of every whole layer among events of one stream."""
    ordered = sorted(events, key=lambda each: each.start)
    first = re.compile(rf"\b{names[0]}")
    starts = [n for n, each in enumerate(ordered) if first.search(each.name)]
    found: dict[str, list[float]] = {name: [] for name in names}
    until: dict[str, list[float]] = {name: [] for name in names}
    for at, then in pairwise(starts):
        own = [e for e in ordered[at:then] if step_trace.part_of(e, {}) == "experts"]
        if len(own) != len(names):
            continue
        ends = [*(each.start for each in own[1:]), ordered[then].start]
        for name, each, end in zip(names, own, ends, strict=True):
            found[name].append(each.microseconds)
            until[name].append(end - each.start)
    rows = {
        name: dict(taken=statistics.median(each), until_next=statistics.median(until[name]))
        for name, each in found.items()
        if each
    }
    return dict(launches=rows, layer=sum(row["until_next"] for row in rows.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description="Kernels of a grouped layer on one GPU.")
    parser.add_argument("--shapes", nargs="+", default=list(grouped.SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(grouped.TOKENS))
    parser.add_argument("--weights", default="mxfp4")
    parser.add_argument("--activations", default="fp8_block")
    parser.add_argument("--stream-k", action="store_true", help="last waves cut along K")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for shape in arguments.shapes:
        sizes = grouped.MODELS[shape].sizes
        recipe = arguments.weights, arguments.activations
        each, stored = grouped.prepared(sizes, recipe)
        each = replace(each, stream_k=True if arguments.stream_k else None)
        layers = [replace(each, num_tokens=count) for count in arguments.tokens]
        grouped.compiled(layers)
        for layer in layers:
            operands = grouped_layers.tokens(layer) | grouped_layers.parameters(layer, stored)
            run = grouped.layers(layer, operands)
            jax.block_until_ready(run())
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    for _ in range(CALLS):
                        jax.block_until_ready(run())
                events = step_trace.read(Path(folder), on_gpu=jax.default_backend() == "gpu")
            found = by_launch(events, names_of(layer))
            rows.append(
                dict(shape=shape, recipe=" x ".join(recipe), num_tokens=layer.num_tokens, **found)
                | dict(stream_k=arguments.stream_k)
            )
            print(json.dumps(rows[-1]), flush=True)
            result = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "rows": rows}
            (OUT / "layer_trace.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
