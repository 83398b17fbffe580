"""Where a program's time goes on the device: a jax.profiler trace by the program's named scopes.

Reads what `jax.profiler.trace` writes, trace.json.gz, with the standard library alone. Kernels name
the HLO instruction they run, whose scope stands in the program's text. Kernels that the profiler
names no instruction for (as inside CUDA graphs) go by their own name where that is one of ours or
that of a fusion.
"""

import gzip
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

PARTS = ("experts", "router", "attention", "rest", "unknown")
"""What kernels belong to; `unknown`: neither instruction nor name says."""

NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 1_000_000, "xla_gpu_enable_command_buffer": ""}
"""Compiler options under which kernels are launched one by one, so that each names its
instruction."""

_SCOPES = (
    ("router", re.compile(r"mega_moe_block/router")),
    ("experts", re.compile(r"/experts(/|$)|mega_moe/")),
    ("attention", re.compile(r"/attention(/|$)")),
)
_OURS = re.compile(
    r"humming|mega_moe|moe_gemm|gemm_impl|stage_tokens|group_tokens|place_rows|gather_rows"
    r"|activate_rows|combine_rows",
    re.IGNORECASE,
)
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?metadata=\{[^}]*?op_name=\"([^\"]*)\"")
_DERIVED = ("XLA", "Framework", "Source", "Steps", "TensorFlow", "Launch")
"""Lines of a GPU that sum up its streams."""
_CONTAINERS = re.compile(r"^(while|call|conditional)([.\d]|$)")
"""Instructions whose time is that of others inside them."""


class Event(NamedTuple):
    """One kernel or copy.

    Attributes:
        name: of the kernel.
        instruction: of the HLO program that it runs; "" where the profiler does not say.
        start, microseconds: when, and how long.
    """

    name: str
    instruction: str
    start: float
    microseconds: float


def scopes_of(text: str) -> dict[str, str]:
    """Scope (op_name) by instruction of a compiled program's text, kernels' spelling included."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = _INSTRUCTION.match(line)
        if match:
            found[match[1]] = match[2]
            found.setdefault(re.sub(r"[.\-]", "_", match[1]), match[2])
    return found


def part_of(event: Event, scopes: Mapping[str, str]) -> str:
    """Which of PARTS an event belongs to."""
    scope = scopes.get(event.instruction) or scopes.get(event.name)
    if scope is not None:
        return next((part for part, pattern in _SCOPES if pattern.search(scope)), "rest")
    if _OURS.search(event.name):
        return "experts"
    return "rest" if event.instruction else "unknown"


def parts(events: Iterable[Event], scopes: Mapping[str, str]) -> dict[str, float]:
    """Microseconds by part. A launch may begin while the one before ends: the time that two share
    is the earlier one's, so that the parts add up to the time in which the device was busy."""
    found = dict.fromkeys(PARTS, 0.0)
    for event, taken in _apart(events):
        found[part_of(event, scopes)] += taken
    return found


def _apart(events: Iterable[Event]) -> Iterator[tuple[Event, float]]:
    """Events in order, each with the microseconds in which none before it ran."""
    done = float("-inf")
    for event in sorted(events, key=lambda each: each.start):
        end = event.start + event.microseconds
        yield event, max(0.0, end - max(done, event.start))
        done = max(done, end)


def largest(
    events: Iterable[Event], scopes: Mapping[str, str], count: int = 12
) -> list[tuple[str, str, float]]:
    """Part, name and microseconds of the kernels that took most, all of a name together."""
    sums: dict[tuple[str, str], float] = {}
    for event, taken in _apart(events):
        key = part_of(event, scopes), event.name[:80]
        sums[key] = sums.get(key, 0.0) + taken
    ranked = sorted(sums.items(), key=lambda item: -item[1])[:count]
    return [(*key, taken) for key, taken in ranked]


def read(folder: Path, *, on_gpu: bool) -> list[Event]:
    """Device events of the newest trace below a folder; none where there is no trace.

    Args:
        folder: that `jax.profiler.trace` wrote to.
        on_gpu: the kernels and copies of a GPU's streams, rather than the instructions that the
            host ran.
    """
    files = sorted(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not files:
        return []
    with gzip.open(files[-1], "rt") as file:
        raw = json.load(file)["traceEvents"]
    return list(_of_streams(raw) if on_gpu else _of_host(raw))


def _of_streams(raw: list[dict[str, Any]]) -> Iterator[Event]:
    devices = {
        each["pid"]
        for each in raw
        if each.get("name") == "process_name" and "/device:GPU" in each["args"]["name"]
    }
    lines = {
        (each["pid"], each["tid"]): each["args"]["name"]
        for each in raw
        if each.get("name") == "thread_name" and each["pid"] in devices
    }
    streams = {line for line, name in lines.items() if name.startswith("Stream")}
    if not streams:
        streams = {line for line, name in lines.items() if not name.startswith(_DERIVED)}
    for each in raw:
        if each.get("ph") == "X" and (each["pid"], each.get("tid")) in streams:
            yield _event(each)


def _of_host(raw: list[dict[str, Any]]) -> Iterator[Event]:
    for each in raw:
        if each.get("ph") == "X" and "hlo_op" in each.get("args", {}):
            event = _event(each)
            if not _CONTAINERS.match(event.instruction):
                yield event


def _event(raw: dict[str, Any]) -> Event:
    instruction = str(raw.get("args", {}).get("hlo_op", ""))
    return Event(raw["name"], instruction, float(raw["ts"]), float(raw.get("dur", 0.0)))
