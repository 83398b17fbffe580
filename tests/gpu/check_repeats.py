"""One layer thousands of times on a GPU, alone or beside others: every output has the same bits.

    PYTHONPATH=.:tests:tests/gpu:benchmarks/gpu python tests/gpu/check_repeats.py \
        [--layer v4_flash] [--recipe mxfp4_block] [--implementation deep_gemm] [--beside 2]

--beside starts that many more of these processes, so that the GPU takes turns between them: kernels
that lose a race only then are found here. Results go to $OUT/check_repeats.json.
"""

import argparse
import faulthandler
import subprocess
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import workload
from checks import Checks
from jax import lax
from jaxtyping import Array

import jax_megamoe as mm
from jax_megamoe.launch import grouped
from jax_megamoe.runtime.devices import device_spec

SECONDS = 120
KEPT = 8
"""Calls that differ whose places are told."""


def place(y: Array, want: Array) -> Array:
    """int32 [5]: values that differ, rows, the first of them, columns, the first of them."""
    bits = partial(lax.bitcast_convert_type, new_dtype=jnp.uint16)
    different = bits(y) != bits(want)
    rows, columns = different.any(axis=1), different.any(axis=0)
    found = (different.sum(), rows.sum(), jnp.argmax(rows), columns.sum(), jnp.argmax(columns))
    return jnp.stack([each.astype(jnp.int32) for each in found])


def repeat(checks: Checks, arguments: argparse.Namespace) -> None:
    """The calls, compared on the device, and one check of them all."""
    config = workload.config(arguments.layer, arguments.recipe)
    weights, how = workload.weights(config), arguments.implementation
    if how == "grouped":
        layout = grouped.layout_of(config, device_spec(jax.devices()[0]).arch)
        weights = mm.to_layout(weights, layout)
    call = partial(mm.mega_moe, config=config, implementation=how)
    tokens = workload.tokens(config, arguments.tokens)
    want = jax.jit(call)(*tokens, weights)

    @jax.jit
    def step(state: tuple[Array, Array], tokens: workload.Tokens, weights: mm.ExpertWeights,
             want: Array) -> tuple[Array, Array]:  # fmt: skip
        number, kept = state
        found = place(call(*tokens, weights), want)
        differs = found[0] > 0
        at = jnp.where(differs & (number < KEPT), number, KEPT)
        return number + differs, kept.at[at].set(found, mode="drop")

    state = (jnp.zeros((), jnp.int32), jnp.zeros((KEPT, 5), jnp.int32))
    start = time.monotonic()
    for _ in range(arguments.calls):
        state = step(state, tokens, weights, want)
    number = int(state[0])
    seconds = time.monotonic() - start
    name = f"{arguments.layer} {arguments.recipe}, {how}, {arguments.tokens} tokens"
    detail = f"{number} of {arguments.calls} calls differ, {seconds:.0f} s"
    for values, rows, row, columns, column in np.asarray(state[1])[:number].tolist():
        detail += f"; {values} values, {rows} rows from {row}, {columns} columns from {column}"
    checks.check(not number, f"{name}, {arguments.beside} beside", detail)


def main() -> None:
    parser = argparse.ArgumentParser(description="The same bits from every call.")
    parser.add_argument("--layer", default="v4_flash", choices=[*workload.SHAPES, "gpt_oss"])
    parser.add_argument("--recipe", default="mxfp4_block", choices=[*mm.RECIPES])
    parser.add_argument("--implementation", default="deep_gemm", choices=["deep_gemm", "grouped"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--beside", type=int, default=0, help="more such processes on the GPU")
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    # The last one counts.
    command = [sys.executable, *sys.argv, "--beside", "0"]
    null = subprocess.DEVNULL
    others = [subprocess.Popen(command, stdout=null, stderr=null) for _ in range(arguments.beside)]
    checks = Checks("check_repeats")
    try:
        repeat(checks, arguments)
    finally:
        for other in others:
            other.kill()
            other.wait()
    checks.finish(device=jax.devices()[0].device_kind, jax=jax.__version__)


if __name__ == "__main__":
    main()
