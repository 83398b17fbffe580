"""The arguments of `bench gpu`, and what it prints and writes."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from jax_megamoe import _checks, _files
from jax_megamoe.cli.gpu.contenders import IMPLEMENTATIONS
from jax_megamoe.cli.gpu.machine import Timer
from jax_megamoe.cli.gpu.measure import Request, measure, needs_gpu, timed
from jax_megamoe.cli.gpu.models import MODELS, TINY, Model
from jax_megamoe.cli.gpu.picture import save_picture
from jax_megamoe.cli.gpu.result import GpuResult, compared, read_result
from jax_megamoe.cli.gpu.routings import ROUTINGS
from jax_megamoe.formats import RECIPES
from jax_megamoe.launch.measured import dump

SUMMARY = "every implementation and peer that can run, on this machine's GPU, for known models"
HOW = (
    f"A time is that of {ROUTINGS} layers in one program, each with another routing. Those of "
    "deep_gemm and grouped are unrolled in it, as peers that need torch have theirs in a CUDA "
    "graph; what XLA compiles has a loop."
)

_TOKENS = (1, 8, 64, 256, 1024, 4096)
_TINY_TOKENS = (1, 8, 64)
_SIZES = {
    "experts": "num_experts",
    "top_k": "top_k",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.add_argument(
        "--models", nargs="+", choices=list(MODELS), metavar="MODEL",
        help=f"of {', '.join(MODELS)} (qwen3_30b)",
    )  # fmt: skip
    for option, field in _SIZES.items():
        name = f"--{option.replace('_', '-')}"
        parser.add_argument(name, type=int, help=f"{field} of a layer of your own; all four")
    parser.add_argument(
        "--recipes", nargs="+", choices=list(RECIPES), metavar="RECIPE",
        help=f"of {', '.join(RECIPES)} (those that the GPU has a fused kernel for)",
    )  # fmt: skip
    parser.add_argument("--tokens", type=int, nargs="+", help=f"({' '.join(map(str, _TOKENS))})")
    parser.add_argument(
        "--implementations", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS),
        metavar="NAME", help=f"of {', '.join(IMPLEMENTATIONS)} (all)",
    )  # fmt: skip
    parser.add_argument(
        "--no-peers",
        action="store_true",
        help="leave out what others have: ragged_dot, and if they are installed tokamax, "
        "triton_kernels and Humming",
    )
    parser.add_argument(
        "--seconds", type=float, help="time nothing more after so many, compiling included"
    )
    parser.add_argument(
        "--device", choices=("gpu", "cpu"), default="gpu",
        help="cpu: try the command at a small size; the times say nothing of a GPU",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--picture", type=Path, help="draw it into this PNG file")
    parser.add_argument("--output", type=Path, help="write the table to this Markdown file")
    parser.add_argument(
        "--table", type=Path, metavar="JSON",
        help="write the times by which calls choose, for the variable JAX_MEGAMOE_MEASURED",
    )  # fmt: skip
    parser.add_argument(
        "--compare", type=Path, metavar="JSON", help="an earlier result to set beside"
    )


def run(arguments: argparse.Namespace, argv: Sequence[str], *, timer: Timer = timed) -> int:
    """Measures, prints the table, and writes what was asked for.

    Args:
        arguments: parsed.
        argv: the command line, without the program.
        timer: how layers are timed.

    Raises:
        NotImplementedError: there is no GPU.
        ValueError: sizes that no layer has, a result to compare with that is none.
        OSError: a file that cannot be read or written.
        ImportError: a picture without matplotlib.
    """
    use_device(arguments.device)
    old = read_result(arguments.compare) if arguments.compare else None
    default = _TINY_TOKENS if arguments.device == "cpu" else _TOKENS
    counts = [_checks.integer("tokens", each, minimum=1) for each in arguments.tokens or default]
    request = Request(
        models=_models(arguments),
        recipes=tuple(dict.fromkeys(arguments.recipes)) if arguments.recipes else None,
        token_counts=tuple(sorted(set(counts))),
        implementations=tuple(dict.fromkeys(arguments.implementations)),
        peers=not arguments.no_peers,
        command=" ".join(argv),
        seconds=arguments.seconds,
    )
    for path in (arguments.json, arguments.picture, arguments.output, arguments.table):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    result = watched(request, arguments.json, timer=timer)
    show(result, old)
    if arguments.output:
        _files.write(arguments.output, result.report().markdown(result.command))
    if arguments.table:
        made = f"python -m jax_megamoe {result.command}"
        _files.write(arguments.table, dump(result.measured(), made))
    if arguments.picture:
        caption = f"One layer on {result.device}; lower is faster"
        save_picture(arguments.picture, result.timings, result.ceilings, caption=caption)
    return 0


def use_device(name: str) -> None:
    """Has JAX use a GPU, or the CPU.

    Args:
        name: ``"gpu"`` or ``"cpu"``.

    Raises:
        NotImplementedError: there is no GPU.
    """
    if name == "cpu":
        jax.config.update("jax_platforms", "cpu")
        return
    # Peers in other processes need memory too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    needs_gpu(jax.devices()[0])


def watched(request: Request, path: Path | None = None, *, timer: Timer = timed) -> GpuResult:
    """The result of a request, written to a file after every layer, with progress on stderr.

    Args:
        request: what to time.
        path: of the JSON; None: none.
        timer: how layers are timed.
    """
    console = Console(stderr=True)
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)

        def progress(text: str, done: float) -> None:
            if console.is_terminal:
                bar.update(task, completed=done, description=text)
            else:
                print(f"{100 * done:3.0f} % {text}", file=sys.stderr, flush=True)

        def save(result: GpuResult) -> None:
            if path is not None:
                result.write(path)

        return measure(request, timer=timer, progress=progress, save=save)


def show(result: GpuResult, old: GpuResult | None) -> None:
    """Prints the table, what did not run and why, and the comparison with an earlier run."""
    console = Console()
    report = result.report()
    console.print(report.table())
    console.print(report.notes, style="dim")
    for line in result.missing():
        console.print(f"not run: {line}", style="dim", markup=False)
    if old is not None:
        both = compared(result, old)
        console.print(both.table())
        console.print(both.notes, style="dim")


def _models(arguments: argparse.Namespace) -> dict[str, Model]:
    """The named models, a layer of one's own, or the default."""
    sizes = {field: getattr(arguments, option) for option, field in _SIZES.items()}
    given = {field: size for field, size in sizes.items() if size is not None}
    if given and len(given) < len(sizes):
        options = ", ".join(f"--{option.replace('_', '-')}" for option in _SIZES)
        raise ValueError(_checks.message("sizes", f"all of {options}", f"only {sorted(given)}"))
    found = {name: MODELS[name] for name in arguments.models or ()}
    if given:
        found["custom"] = Model("your layer", **given)
    if found:
        return found
    return {"tiny": TINY} if arguments.device == "cpu" else {"qwen3_30b": MODELS["qwen3_30b"]}
