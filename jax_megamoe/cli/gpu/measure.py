"""Times layers in one run: all compiled first, routings that take turns, medians, ceilings."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jax_megamoe import _checks
from jax_megamoe.cli.gpu import contenders
from jax_megamoe.cli.gpu.compiled import LATE, Built, Entry, compile_all
from jax_megamoe.cli.gpu.contenders import TORCH_PEERS, Series
from jax_megamoe.cli.gpu.machine import REFUSED, Timer, ceilings, line_of, versions
from jax_megamoe.cli.gpu.models import BYTES_OF_A_WEIGHT, Model
from jax_megamoe.cli.gpu.peer_process import PeerProcess
from jax_megamoe.cli.gpu.result import GpuResult, Timing
from jax_megamoe.cli.gpu.routings import PROGRAMS, ROUTINGS, UNROLLED, drawn, turns
from jax_megamoe.formats import RECIPES
from jax_megamoe.launch.runnable import supported
from jax_megamoe.plan.refusal import Refusal

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Request:
    """What to time.

    Attributes:
        models: layers by name.
        recipes: names of the recipes; None: those with a fused kernel for the device, else bf16.
        token_counts: tokens of a call.
        implementations: of ours.
        peers: whether to time what others have.
        command: arguments of `python -m jax_megamoe`.
        series: implementations and peers, each with a recipe, that alone are timed; None: ours in
            every recipe, and every installed peer.
        seconds: after so many, compiling included, nothing more is timed; None: no limit.
    """

    models: dict[str, Model]
    recipes: tuple[str, ...] | None = None
    token_counts: tuple[int, ...] = (1, 8, 64, 256, 1024, 4096)
    implementations: tuple[str, ...] = contenders.IMPLEMENTATIONS
    peers: bool = True
    command: str = "bench gpu"
    series: tuple[Series, ...] | None = None
    seconds: float | None = None


def timed(function: Callable[[], Any], *, enough: float = 0.05, repeats: int = 5) -> float:
    """Median microseconds of a call by the host's clock, each repeat as many calls in a row as take
    `enough` seconds; of a call that takes six times as long, one after a first."""
    jax.block_until_ready(function())
    start = time.perf_counter()
    jax.block_until_ready(function())
    once = time.perf_counter() - start
    if once > 6 * enough:
        return 1e6 * once
    calls = max(1, int(enough / once))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls - 1):
            function()
        jax.block_until_ready(function())
        times.append((time.perf_counter() - start) / calls)
    return 1e6 * statistics.median(times)


def needs_gpu(device: jax.Device) -> None:
    """Refuses a device that is no GPU.

    Raises:
        NotImplementedError: in one line, what is needed.
    """
    if device.platform != "gpu":
        text = "a GPU that JAX sees: pip install 'jax-megamoe[cuda13]' on a machine with one"
        hint = "--device cpu tries the command without one"
        raise NotImplementedError(_checks.message("device", text, device.device_kind, hint))


def recipes_of(model: Model, num_tokens: int, device: jax.Device) -> tuple[str, ...]:
    """Recipes of which the device has a fused kernel for the model; bf16 where there is none."""
    found = tuple(
        name
        for name, recipe in RECIPES.items()
        if model.activation.name in recipe.functions
        and not isinstance(supported(model.config(name, num_tokens), device), Refusal)
    )
    return found or ("bf16",)


def measure(
    request: Request,
    *,
    timer: Timer = timed,
    progress: Progress = lambda *_: None,
    save: Callable[[GpuResult], None] = lambda _: None,
    processes: Callable[[str], PeerProcess] = PeerProcess,
) -> GpuResult:
    """Times every layer of a request on the default device, the most telling series first.

    Args:
        request: what to time.
        timer: how.
        progress: told what was done, and the share of all that is done.
        save: given the result so far after every layer.
        processes: starts the process of a peer that needs torch.

    Raises:
        ValueError: sizes that no layer has.
    """
    begun, device, counts = time.monotonic(), jax.devices()[0], request.token_counts

    def late() -> bool:
        return request.seconds is not None and time.monotonic() - begun > request.seconds

    progress("copy and matmul rates", 0.0)
    rates = ceilings(timer, small=device.platform == "cpu")
    entries = _entries(request, device)
    of = versions() | {PROGRAMS: UNROLLED}
    result = GpuResult(request.command, device.device_kind, of, rates)
    with ExitStack() as stack:
        used = dict.fromkeys(e.implementation for e in entries if e.implementation in TORCH_PEERS)
        others = {name: stack.enter_context(closing(processes(name))) for name in used}
        for name, process in others.items():
            cells = [(e.name, e.recipe) for e in entries if e.implementation == name]
            process.start(request.models, cells, counts)
        done = 0
        for wave in _waves(_in_turn(entries)):
            progress("compiling", done / len(entries))
            built = compile_all([e for e in wave if e.implementation not in others], counts, late)
            for name in dict.fromkeys(e.implementation for e in wave):
                if name in others:
                    result.versions.update(others[name].wait())
            for entry in wave:
                words = f"{entry.name} {entry.implementation} {entry.recipe}"
                if entry in built:
                    rows = _rows(entry, built.pop(entry), counts, timer, late)
                else:
                    rows = _peer_rows(entry, others[entry.implementation], counts, late)
                for row in rows:
                    result = replace(result, timings=(*result.timings, row))
                    save(result)
                    said = f"{words} {row.num_tokens} tokens: {_said(row)}"
                    progress(said, done / len(entries))
                done += 1
    progress("done", 1.0)
    order = {_place(each): n for n, each in enumerate(entries)}
    result = replace(result, timings=tuple(sorted(result.timings, key=lambda e: order[_place(e)])))
    save(result)
    return result


def _said(row: Timing) -> str:
    return row.why if row.microseconds is None else f"{row.microseconds:.1f} us"


def _place(each: "Timing | Entry") -> tuple[str, str, str]:
    name = each.model if isinstance(each, Timing) else each.name
    return name, each.implementation, each.recipe


def _in_turn(entries: Sequence[Entry]) -> list[Entry]:
    """As they are timed: a series of all models, then the next."""
    rank = {series: n for n, series in enumerate(contenders.FIRST)}
    return sorted(entries, key=lambda e: rank.get((e.implementation, e.recipe), len(rank)))


def _waves(turns: Sequence[Entry]) -> list[list[Entry]]:
    """What is compiled before any of it is timed: kernels of ours and peers in other processes;
    then, each for itself, what XLA compiles, which may take it minutes."""
    found: dict[str, list[Entry]] = {"": []}
    for each in turns:
        by_xla = each.implementation not in (*contenders.OWN_KERNELS, *TORCH_PEERS)
        found.setdefault(each.implementation if by_xla else "", []).append(each)
    return [wave for wave in found.values() if wave]


def _entries(request: Request, device: jax.Device) -> list[Entry]:
    """What is timed, in the order of the table."""
    found: list[Entry] = []
    most = max(request.token_counts)
    for name, model in request.models.items():
        recipes = request.recipes or recipes_of(model, most, device)
        ours = [(each, recipe) for recipe in recipes for each in request.implementations]
        for series in request.series or (*ours, *contenders.peers()):
            implementation, recipe = series
            is_ours = implementation in contenders.OURS
            if is_ours or request.peers:
                model.config(recipe, most)
                found.append(Entry(name, model, implementation, recipe))
    return found


def _rows(
    entry: Entry,
    built: Built | str,
    counts: Sequence[int],
    timer: Timer,
    late: Callable[[], bool],
) -> Iterator[Timing]:
    """The timings of a compiled layer; the parameters are given up at the end."""
    if isinstance(built, str):
        yield from (_row(entry, count, None, built) for count in counts)
        return
    parameters: Any = None
    for count in counts:
        run, taken = built.runs[count], None
        x, ids, factors = drawn(entry.model, count)
        experts = len(np.unique(np.asarray(ids)))
        read, why = experts * built.weight_bytes, ""
        if isinstance(run, str) or late():
            yield _row(entry, count, None, run if isinstance(run, str) else LATE, read)
            continue
        try:
            if parameters is None:
                parameters = jax.block_until_ready(built.make(jax.random.key(0)))
            each = turns(ids, entry.model.num_experts)
            taken = timer(partial(run, x, each, factors, parameters)) / ROUTINGS
        except REFUSED as error:
            why = line_of(error)
        yield _row(entry, count, taken, why, read)


def _peer_rows(
    entry: Entry, process: PeerProcess, counts: Sequence[int], late: Callable[[], bool]
) -> Iterator[Timing]:
    """The timings of a layer in another process."""
    if late():
        yield from (_row(entry, count, None, LATE) for count in counts)
        return
    per_expert = BYTES_OF_A_WEIGHT[entry.recipe] * entry.model.weights_of_an_expert
    for count, taken, why in process.times(entry.name, entry.recipe, counts):
        _, ids, _ = drawn(entry.model, count)
        yield _row(entry, count, taken, why, per_expert * len(np.unique(np.asarray(ids))))


def _row(entry: Entry, count: int, taken: float | None, why: str, read: float = 0.0) -> Timing:
    flops = float(entry.model.flops(count)) if read else 0.0
    place = (entry.name, entry.recipe, entry.implementation, count)
    return Timing(*place, taken, weight_bytes=read, flops=flops, why=why)
