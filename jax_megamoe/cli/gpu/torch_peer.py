"""`python -m jax_megamoe.cli.gpu.torch_peer NAME`: times a peer that needs torch.

`PeerProcess` starts it and speaks to it by lines of JSON. It draws tokens and routings with JAX on
the CPU, so that a peer gets what ours get, and times 16 layers, each with another routing, in one
CUDA graph.
"""

import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import jax
import numpy as np

from jax_megamoe.cli.gpu.machine import line_of
from jax_megamoe.cli.gpu.models import Model
from jax_megamoe.cli.gpu.routings import ROUTINGS, tokens, turns

MODULES = {
    "triton_kernels": "jax_megamoe.cli.gpu.torch_triton_kernels",
    "humming": "jax_megamoe.cli.gpu.torch_humming",
}
MOST_OFF = 0.1
"""Largest relative error of a layer that is timed: FP8 tokens and second inputs cost 0.045."""

Routing = tuple[Any, Any]
"""ids int32 [T, K] and weights float32 [T, K], on the GPU."""

Layer = Callable[[Any, Routing], Any]
"""f(x bfloat16 [T, H], routing) -> y bfloat16 [T, H], all on the GPU."""


class Peer(Protocol):
    """What a module of `MODULES` has."""

    def versions(self) -> dict[str, str]:
        """Of what its times depend on."""
        ...

    def compile(self, cells: Sequence[tuple[Model, str]], token_counts: Sequence[int]) -> None:
        """Has every kernel of the layers compiled; one that does not compile is left."""
        ...

    def prepare(self, model: Model, recipe: str) -> Callable[[int], Layer]:
        """Makes parameters; f(num_tokens) is the layer for calls of so many tokens."""
        ...

    def reference(self, x: Any, routing: Routing) -> Any:
        """float32 [T, H], of the parameters that were prepared last."""
        ...


def microseconds(layer: Callable[[int], Any], *, enough: float = 0.05, repeats: int = 5) -> float:
    """Median microseconds of a layer: `ROUTINGS` of them in a CUDA graph, by device events.

    Args:
        layer: f(turn), which launches the layer on the current stream.
        enough: seconds of a repeat.
        repeats: how many.
    """
    import torch  # noqa: PLC0415 (may be missing)  # pyright: ignore[reportMissingImports]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for turn in range(ROUTINGS):
            layer(turn)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for turn in range(ROUTINGS):
            layer(turn)

    def milliseconds(calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls

    milliseconds(1)
    calls = max(1, int(1e3 * enough / milliseconds(1)))
    return 1e3 * statistics.median(milliseconds(calls) for _ in range(repeats)) / ROUTINGS


@lru_cache(maxsize=8)
def drawn(model: Model, num_tokens: int) -> tuple[Any, list[Routing]]:
    """x and the routings of all turns as torch tensors on the GPU, equal to those of ours."""
    import torch  # noqa: PLC0415 (may be missing)  # pyright: ignore[reportMissingImports]

    x, ids, factors = tokens(model, num_tokens)
    there = torch.from_numpy(np.array(x, np.float32)).cuda().bfloat16()
    weights = torch.from_numpy(np.array(factors)).cuda()
    each_turn = map(np.array, turns(ids, model.num_experts))
    return there, [(torch.from_numpy(each).cuda(), weights) for each in each_turn]


def timed(peer: Peer, layer: Layer, model: Model, num_tokens: int) -> float:
    """Median microseconds of a layer whose first result is right.

    Raises:
        ArithmeticError: it is not.
    """
    x, routings = drawn(model, num_tokens)
    some = min(num_tokens, 4)
    got = layer(x, routings[0])[:some].float()
    want = peer.reference(x[:some], (routings[0][0][:some], routings[0][1][:some]))
    off = float((got - want).norm() / want.norm())
    if not off <= MOST_OFF:
        raise ArithmeticError(f"its result is off by {off:.3f}")
    return microseconds(lambda turn: layer(x, routings[turn]))


def serve(
    peer: Peer,
    lines: Iterable[str],
    say: Callable[[dict[str, Any]], None],
    clock: Callable[[Peer, Layer, Model, int], float] = timed,
) -> None:
    """Compiles what the first line asks for, then times a layer for each further line."""
    asked = iter(lines)
    first = json.loads(next(asked))
    models = {name: Model.of(each) for name, each in first["models"].items()}
    counts = first["token_counts"]
    start = time.monotonic()
    peer.compile([(models[name], recipe) for name, recipe in first["cells"]], counts)
    print(f"compiled in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    say(dict(versions=peer.versions()))
    for line in asked:
        cell = json.loads(line)
        model, why, prepared = models[cell["model"]], "", None
        try:
            prepared = peer.prepare(model, cell["recipe"])
        except Exception as error:  # whatever a peer raises is why it has no time
            why = line_of(error)
        for count in counts:
            taken = None
            if prepared is not None:
                try:
                    taken, why = clock(peer, prepared(count), model, count), ""
                except Exception as error:
                    why = line_of(error)
            say(dict(microseconds=taken, why=why))


def main(name: str) -> None:
    """Serves standard input and output."""
    jax.config.update("jax_platforms", "cpu")
    # What compilers and packages print goes to standard error, not among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(line: dict[str, Any]) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    try:
        peer = importlib.import_module(MODULES[name]).PEER()
    except Exception as error:  # a package is missing, or does not fit another
        say(dict(failed=line_of(error)))
        return
    serve(peer, sys.stdin, say)


if __name__ == "__main__":
    main(sys.argv[1])
