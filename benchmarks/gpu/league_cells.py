"""The cells of benchmarks/league.md on one H200, those that are compared first; JSON after each.

    PYTHONPATH=.:benchmarks python benchmarks/gpu/league_cells.py --seconds 420 --models qwen3_30b

What `bench gpu` times, of the columns of the page alone: install triton_kernels, Humming and
tokamax beside this package for theirs; what is missing says so. Bare launches come from
flashinfer.py and sm90.py. Results go to $OUT/league_h200_<models>.json. Over several GPUs, a
process each: CUDA_VISIBLE_DEVICES=0 with some models, 1 with the others.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

import league

from jax_megamoe.cli.gpu import command
from jax_megamoe.cli.gpu.measure import Request
from jax_megamoe.cli.gpu.models import MODELS, TINY


def main() -> None:
    """Times, writes, prints the table."""
    parser = argparse.ArgumentParser(description="The league's cells on this machine's GPU.")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(league.TOKENS))
    columns = [" ".join(each) for each in league.COLUMNS if not each[0].startswith("bare")]
    parser.add_argument(
        "--columns", nargs="+", choices=columns, default=columns, metavar="COLUMN",
        help=f"of {', '.join(columns)}",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=420.0, help="nothing starts after them")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="cpu: a dry run")
    arguments = parser.parse_args()
    command.use_device(arguments.device)
    is_dry = arguments.device == "cpu"
    request = Request(
        models={"tiny": TINY} if is_dry else {name: MODELS[name] for name in arguments.models},
        token_counts=tuple(sorted(set(arguments.tokens))),
        series=tuple(each for each in league.COLUMNS if " ".join(each) in arguments.columns),
        seconds=arguments.seconds,
        command=shlex.join(["benchmarks/gpu/league_cells.py", *sys.argv[1:]]),
    )
    folder = Path(os.environ.get("OUT", "."))
    name = "tiny" if is_dry else "_".join(arguments.models)
    command.show(command.watched(request, folder / f"league_h200_{name}.json"), None)


if __name__ == "__main__":
    main()
