"""The command line: `python -m jax_megamoe COMMAND`.

A command is a function that takes its parser, adds its arguments, and returns what runs it; its
docstring's first line is its help. `COMMANDS` lists them.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console

from jax_megamoe import _files
from jax_megamoe.cli.ahead import as_they_run, asked_layers, compile_ahead, kernels
from jax_megamoe.cli.bench import Shape, bench_cpu
from jax_megamoe.cli.bench_load import LoadShape, bench_load
from jax_megamoe.cli.demo import DemoSettings, run_demo
from jax_megamoe.cli.doctor import print_report
from jax_megamoe.cli.gpu import command as gpu
from jax_megamoe.cli.measurements import Measurements
from jax_megamoe.cli.sources import print_fetched, print_sources
from jax_megamoe.compile import DISTRIBUTIONS, BuildError
from jax_megamoe.config import Activation
from jax_megamoe.formats import RECIPES, WEIGHT_FORMATS
from jax_megamoe.runtime.devices import KNOWN_DEVICES, device_spec, known_device
from jax_megamoe.weights.checkpoint.convert import convert_checkpoint

DESCRIPTION = "Mixture-of-experts layers in JAX on DeepGEMM's fused kernels."

Run = Callable[[argparse.Namespace], int]
"""Runs a parsed command; returns the exit status."""

_REFUSALS = (BuildError, ImportError, NotImplementedError, OSError, TypeError, ValueError)
"""What a command raises for wrong arguments or a machine that lacks something."""


def demo(parser: argparse.ArgumentParser) -> Run:
    """Load a small checkpoint in each format and run it expert-parallel over CPU devices.

    Exits with 1 if an error is larger than the format allows.
    """
    default = DemoSettings()
    _add_sizes(parser, default)
    parser.add_argument("--ranks", type=int, default=default.num_ranks, help="CPU devices")
    _add_formats(parser)
    parser.add_argument("--seed", type=int, default=default.seed, help="of weights and tokens")
    parser.add_argument(
        "--output", type=Path, default=default.output, help="folder of what is written"
    )
    parser.add_argument("--keep", action="store_true", help="keep the checkpoint there")

    def run(arguments: argparse.Namespace) -> int:
        settings = DemoSettings(
            **_sizes(arguments),
            num_ranks=arguments.ranks,
            formats=_formats(arguments),
            seed=arguments.seed,
            output=arguments.output,
            keep=arguments.keep,
        )
        _use_cpu(settings.num_ranks)
        return 0 if run_demo(settings) else 1

    return run


def bench(parser: argparse.ArgumentParser) -> Run:
    """Measure: `gpu`, layers of known models; `cpu`, xla beside einsum; `load`, loading."""
    kinds = parser.add_subparsers(dest="what", required=True)
    gpu.add_arguments(
        kinds.add_parser("gpu", help=gpu.SUMMARY, description=gpu.SUMMARY, epilog=gpu.HOW)
    )
    for name, kind in _BENCHMARKS.items():
        added = kinds.add_parser(name, help=kind.summary, description=kind.summary)
        _add_sizes(added, kind.shape())
        _add_formats(added)
        added.add_argument("--seed", type=int, default=0, help="of the inputs")
        added.add_argument(
            "--repeats", type=int, default=kind.repeats, help="measured calls of each"
        )
        added.add_argument("--output", type=Path, help="also write the table to this Markdown file")

    def run(arguments: argparse.Namespace) -> int:
        if arguments.what == "gpu":
            return gpu.run(arguments, sys.argv[1:])
        _use_cpu(1)
        kind = _BENCHMARKS[arguments.what]
        shape, formats = kind.shape(**_sizes(arguments)), _formats(arguments)
        result = kind.measure(shape, formats, seed=arguments.seed, repeats=arguments.repeats)
        report: Measurements = result.report()
        Console().print(report.table())
        if arguments.output:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            _files.write(arguments.output, report.markdown(" ".join(sys.argv[1:])))
        return 0

    return run


class _Benchmark(NamedTuple):
    """What `bench` measures: the shape's class, the function, repeats by default, and a summary."""

    shape: Callable[..., Any]
    measure: Callable[..., Any]
    repeats: int
    summary: str


_BENCHMARKS = {
    "cpu": _Benchmark(
        Shape, bench_cpu, 9, "xla in each format beside a plain einsum layer, on one device"
    ),
    "load": _Benchmark(
        LoadShape, bench_load, 5, "load_experts beside NumPy, from a file to kernel layout"
    ),
}


def doctor(parser: argparse.ArgumentParser) -> Run:
    """Say what this machine has, what is missing, and which formats run on it by what."""
    _add_sizes(parser, Shape(64, 8, 2048, 1024, 4096))
    parser.add_argument("--ranks", type=int, default=1, help="expert-parallel ranks (1)")

    def run(arguments: argparse.Namespace) -> int:
        sizes = _sizes(arguments)
        sizes["max_num_tokens"] = sizes.pop("num_tokens")
        print_report(Console(), sizes, arguments.ranks)
        return 0

    return run


def sources(parser: argparse.ArgumentParser) -> Run:
    """Where kernels come from: `list` what is found and what it runs, `fetch` the headers."""
    kinds = parser.add_subparsers(dest="what", required=True)
    for what, summary in _SOURCES.items():
        added = kinds.add_parser(what, help=summary, description=summary)
        if what == "fetch":
            added.add_argument("source", choices=list(DISTRIBUTIONS))
            added.add_argument("--version", help="of the distribution; by default the pinned one")

    def run(arguments: argparse.Namespace) -> int:
        if arguments.what == "list":
            print_sources(Console())
        else:
            print_fetched(Console(), arguments.source, arguments.version)
        return 0

    return run


_SOURCES = {
    "list": "where each source was found, or what brings it, and what it can run",
    "fetch": "download a pinned wheel with pip and keep its headers in the cache folder",
}


def compile(parser: argparse.ArgumentParser) -> Run:
    """Compile kernels into the cache before anything runs, for a layer and token counts."""
    _add_sizes(parser, Shape(64, 8, 2048, 1024, 4096), but=("tokens",))
    parser.add_argument(
        "--config", type=Path, metavar="JSON",
        help="a model's config.json: its sizes, activation, biases, and the format it is stored in",
    )  # fmt: skip
    parser.add_argument(
        "--formats", nargs="+", choices=list(RECIPES), metavar="FORMAT",
        help=f"of {', '.join(RECIPES)} (fp8_block, or the config's)",
    )  # fmt: skip
    parser.add_argument(
        "--implementation", choices=("deep_gemm", "grouped"), default="deep_gemm",
        help="whose kernels (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=int, nargs="+", required=True, help="rows of a rank's call"
    )
    parser.add_argument("--max-tokens", type=int, default=4096, help="max_num_tokens (%(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="expert-parallel ranks (1)")
    parser.add_argument("--shared-experts", type=int, default=0, help="fused, in experts (0)")
    parser.add_argument("--activation", default="swiglu", choices=("swiglu", "situ"))
    for name in ("clamp", "alpha", "beta"):
        parser.add_argument(f"--{name}", type=float, help="of the activation")
    parser.add_argument(
        "--kernel-source", choices=("sgl", "vllm", "flashinfer"), help="where kernels come from"
    )
    parser.add_argument("--reserved-sms", type=int, default=0, help="left to other kernels (0)")
    parser.add_argument(
        "--device",
        choices=list(KNOWN_DEVICES),
        metavar="DEVICE",
        help=f"of {', '.join(KNOWN_DEVICES)}; this machine's by default",
    )

    def run(arguments: argparse.Namespace) -> int:
        reserved = arguments.reserved_sms
        if arguments.device is None:
            device = device_spec(jax.local_devices()[0], reserved)
        else:
            device = known_device(arguments.device, reserved)
        fields: dict[str, Any] = dict(
            num_shared_experts=arguments.shared_experts,
            kernel_source=arguments.kernel_source,
            reserved_sms=reserved,
        )
        recipes = tuple(dict.fromkeys(arguments.formats)) if arguments.formats else None
        if arguments.config is None:
            fields |= _sizes(arguments)
            fields.pop("num_tokens")
            how = {name: getattr(arguments, name) for name in ("clamp", "alpha", "beta")}
            fields["activation"] = Activation(arguments.activation, **how)
        layers = asked_layers(arguments.config, recipes, device, arguments.max_tokens, **fields)
        layers = as_they_run(layers, device, arguments.ranks, sys.stdout.write)
        specs = kernels(layers, device, arguments.tokens, arguments.ranks, arguments.implementation)
        return 0 if compile_ahead(specs, Console()) else 1

    return run


def convert(parser: argparse.ArgumentParser) -> Run:
    """Write a checkpoint's experts once in kernel layout, for load_converted."""
    parser.add_argument("checkpoint", type=Path, help="folder with safetensors files, or one file")
    parser.add_argument(
        "--prefix",
        required=True,
        help="of the experts' names; * stands for a number: model.layers.*.mlp.experts",
    )
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="the file; with a * in the prefix, a folder of files PREFIX.safetensors",
    )
    parser.add_argument(
        "--format",
        dest="weight_format",
        choices=list(WEIGHT_FORMATS),
        metavar="FORMAT",
        help=f"of {', '.join(WEIGHT_FORMATS)}; as stored, but FP8 in 128x128 blocks to mxfp8",
    )
    for option, (field, text) in _CONVERTED.items():
        parser.add_argument(f"--{option}", dest=field, type=int, metavar="N", help=text)
    parser.add_argument("--kernel-source", choices=("sgl", "vllm"), help="the order of NVFP4 rows")
    parser.add_argument(
        "--gate-up-order", choices=("halves", "alternating"), help="rows of gate and up in one"
    )
    parser.add_argument("--no-progress", action="store_true", help="show no bars")

    def run(arguments: argparse.Namespace) -> int:
        _use_cpu()
        names = ["weight_format", "kernel_source", *(field for field, _ in _CONVERTED.values())]
        fields = {name: getattr(arguments, name) for name in names}
        done = convert_checkpoint(
            arguments.checkpoint,
            arguments.output,
            prefix=arguments.prefix,
            gate_up_order=arguments.gate_up_order,
            progress=not arguments.no_progress,
            **{name: value for name, value in fields.items() if value is not None},
        )
        for layer in done:
            spec = layer.spec
            sys.stdout.write(
                f"{layer.path}: {spec.weight_format.name}, {spec.num_experts} experts of "
                f"{spec.hidden_size} x {spec.intermediate_size}, "
                f"{layer.path.stat().st_size / 1e6:.1f} MB\n"
            )
        return 0

    return run


_CONVERTED = {
    "experts": ("num_experts", "physical experts, replicas included (as many as stored)"),
    "hidden": ("hidden_size", "filled up with zeros to this (the next multiple of 128)"),
    "intermediate": ("intermediate_size", "likewise"),
    "shared-experts": ("num_shared_experts", "width of a shared expert to fuse, in experts (0)"),
}
"""Field of the layer's config and help, by option of `convert`."""


COMMANDS: tuple[Callable[[argparse.ArgumentParser], Run], ...] = (
    demo,
    bench,
    compile,
    convert,
    doctor,
    sources,
)
"""Every command, under its function's name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line, by default the process's; returns the exit status.

    0: done; 1: done, and something is wrong; 2: refused, with the reason on stderr.
    """
    parser = argparse.ArgumentParser(prog="python -m jax_megamoe", description=DESCRIPTION)
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    runs: dict[str, Run] = {}
    for command in COMMANDS:
        name, text = command.__name__, command.__doc__ or ""
        summary = text.splitlines()[0]
        added = commands.add_parser(name, help=summary, description=summary)
        runs[name] = command(added)
    arguments = parser.parse_args(argv)
    try:
        return runs[arguments.command](arguments)
    except _REFUSALS as error:
        if arguments.traceback:
            raise
        sys.stderr.write(f"python -m jax_megamoe {arguments.command}: error: {error}\n")
        return 2


_SIZES = {
    "experts": "num_experts",
    "top_k": "top_k",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "tokens": "num_tokens",
}
"""Field of a size by its option."""


def _add_sizes(
    parser: argparse.ArgumentParser,
    default: DemoSettings | Shape | LoadShape,
    *,
    but: Sequence[str] = (),
) -> None:
    """Adds an option for each size that `default` has, but for those named."""
    for option, field in _SIZES.items():
        if not hasattr(default, field) or option in but:
            continue
        parser.add_argument(
            f"--{option.replace('_', '-')}",
            type=int,
            default=getattr(default, field),
            help=f"{field} (%(default)s)",
        )


def _sizes(arguments: argparse.Namespace) -> dict[str, Any]:
    given = vars(arguments)
    return {field: given[option] for option, field in _SIZES.items() if option in given}


def _add_formats(
    parser: argparse.ArgumentParser,
    default: Sequence[str] = tuple(WEIGHT_FORMATS),
    names: Sequence[str] = tuple(WEIGHT_FORMATS),
) -> None:
    parser.add_argument(
        "--formats",
        nargs="+",
        default=list(default),
        choices=names,
        metavar="FORMAT",
        help=f"of {', '.join(names)} ({'all' if len(default) == len(names) else default[0]})",
    )


def _formats(arguments: argparse.Namespace) -> tuple[str, ...]:
    return tuple(dict.fromkeys(arguments.formats))


def _use_cpu(num_devices: int | None = None) -> None:
    """Has JAX make this many CPU devices (None: as it would) and no others; before any is used."""
    jax.config.update("jax_platforms", "cpu")
    if num_devices is not None:
        jax.config.update("jax_num_cpu_devices", num_devices)
