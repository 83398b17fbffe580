"""`xla` with Pallas kernels beside `lax.ragged_dot`: layers of Qwen3-30B's sizes on one GPU.

    PYTHONPATH=.:tests:tests/gpu:benchmarks/gpu python benchmarks/gpu/portable.py
        [--model qwen3_30b] [--recipes bf16] [--tokens 1 8 64 512 4096] [--loop] [--sweep]

Needs a GPU of compute capability 8.0 or newer; no kernel source, no compiler. A layer is timed as
`bench gpu` times it, 16 layers of other routings in a program. --loop times the loop over experts
too, --sweep both products alone in many tiles, to choose `tiles_of`. Results go to
$OUT/portable.json after every row.
"""

import argparse
import faulthandler
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from checks import OUT
from jax import lax
from jaxtyping import Array

from jax_megamoe.cli.gpu import contenders
from jax_megamoe.cli.gpu.measure import ROUTINGS, rotated, routing, timed, tokens
from jax_megamoe.cli.gpu.models import MODELS, TINY, Model
from jax_megamoe.op import pallas_products
from jax_megamoe.op.pallas_products import RowBlocks, Tiles, product, row_blocks, tiles_of

TOKENS = (1, 8, 64, 512, 4096)
SECONDS = 240
COMPILERS = 8
"""Programs that are compiled at a time."""
LARGEST_SHARED_BYTES = 227 * 1024

quickly = partial(timed, enough=0.03, repeats=3)


class Result:
    """Rows, kept in $OUT/portable.json."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._start = time.monotonic()

    def add(self, **row: Any) -> None:
        """Prints a row and writes all."""
        self.rows.append(row)
        words = " ".join(
            f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
        )
        print(f"{time.monotonic() - self._start:6.1f} s  {words}", flush=True)
        device: Any = jax.devices()[0]
        result = {"device": device.device_kind, "jax": jax.__version__, "rows": self.rows}
        (OUT / "portable.json").write_text(json.dumps(result, indent=1))


def layers(result: Result, model: Model, recipes: list[str], counts: list[int], loop: bool) -> None:
    """Whole layers by everything that has them, one after the other."""
    entries: list[tuple[str, str, contenders.Prepare, str]] = []
    for recipe in recipes:
        entries.append(("xla", recipe, contenders.OURS["xla"], "1"))
        if loop:
            entries.append(("loop", recipe, contenders.OURS["xla"], "0"))
    entries.append(("ragged_dot", "bf16", contenders.PEERS["ragged_dot"], "1"))
    for name, recipe, prepare, switch in entries:
        os.environ[pallas_products.SWITCH] = switch
        made = prepare(model, recipe, max(counts))
        inputs = {count: tokens(model, count) for count in counts}
        # Traced here, where the switch says how; compiled side by side.
        run = rotated(made.layer, model.num_experts)
        lowered = {count: run.lower(*inputs[count], made.parameters) for count in counts}
        with ThreadPoolExecutor(COMPILERS) as pool:
            programs = dict(zip(counts, pool.map(_compiled, lowered.values()), strict=True))
        for count, program in programs.items():
            if isinstance(program, Exception):
                result.add(what=name, recipe=recipe, tokens=count, error=repr(program)[:500])
                continue
            call = partial(program, *inputs[count], made.parameters)
            us = quickly(call) / ROUTINGS
            experts = len(np.unique(np.asarray(inputs[count][1])))
            gb = experts * made.weight_bytes / us / 1e3
            tflops = model.flops(count) / us / 1e6
            result.add(
                what=name, recipe=recipe, tokens=count, us=us, GB_per_s=gb, TFLOP_per_s=tflops
            )
        jax.clear_caches()
    os.environ[pallas_products.SWITCH] = "1"


def _compiled(lowered: Any) -> Any:
    """The program, or what the compiler raised."""
    try:
        return lowered.compile()
    except Exception as error:
        return error


def candidates(num_rows: int, num_experts: int) -> Iterator[Tiles]:
    """Tiles to try: the chosen one first."""
    chosen = tiles_of(num_rows, num_experts)
    yield chosen
    shapes = [(64, 128, 4), (64, 64, 4), (128, 64, 4), (128, 64, 8), (128, 128, 4), (128, 128, 8)]
    heights = [h for h in (chosen.rows // 2, chosen.rows, chosen.rows * 2) if 16 <= h <= 128]
    for rows in heights:
        for columns, depth, warps in shapes:
            for stages in (3, 4):
                tiles = Tiles(rows, columns, depth, warps, stages)
                size = 2 * (rows + columns) * depth * stages
                if size <= LARGEST_SHARED_BYTES and tiles != chosen:
                    yield tiles


def many_products(
    x: Array, w: Array, orders: Array, blocks: RowBlocks, *, tiles: Tiles, top_k: int | None
) -> Array:
    """A product with `ROUTINGS` routings, one after the other."""

    def step(total: Array, each: tuple[Array, RowBlocks]) -> tuple[Array, None]:
        y = product(x, w, *each, tiles=tiles, top_k=top_k)
        return total + y[0, :128].astype(jnp.float32), None

    return lax.scan(step, jnp.zeros(128, jnp.float32), (orders, blocks))[0]


def sweep(result: Result, model: Model, counts: list[int]) -> None:
    """Both products alone in every tile."""
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = (model.num_experts, model.hidden_size, model.intermediate_size)
    experts, hidden, inter = sizes
    draw = partial(jax.random.normal, dtype=jnp.bfloat16)
    matrices = [
        draw(keys[0], (experts, 2 * inter, hidden)),
        draw(keys[1], (experts, hidden, inter)),
    ]
    for count in counts:
        rows = count * model.top_k
        ids = routing(model, count, keys[2], (ROUTINGS,))[0].reshape(ROUTINGS, -1)
        orders = jnp.argsort(ids, axis=1).astype(jnp.int32)
        read = float(np.mean([len(np.unique(each)) for each in np.asarray(ids)])) / experts
        inputs = (draw(keys[3], (count, hidden)), draw(keys[3], (rows, inter)))
        jobs = [(tiles, nth) for tiles in candidates(rows, experts) for nth in (0, 1)]
        found: dict[tuple[Tiles, int], Any] = {}

        def build(job: tuple[Tiles, int], count: int = count) -> Any:
            tiles, nth = job
            blocks = jax.vmap(partial(row_blocks, num_experts=experts, rows=tiles.rows))(ids)
            call: Callable[..., Array] = partial(
                many_products, tiles=tiles, top_k=None if nth else model.top_k
            )
            operands = (inputs[nth], matrices[nth], orders, blocks)
            return _compiled(jax.jit(call).lower(*operands)), operands

        with ThreadPoolExecutor(COMPILERS) as pool:
            built = list(pool.map(build, jobs))
        for (tiles, nth), (program, operands) in zip(jobs, built, strict=True):
            if isinstance(program, Exception):
                print(count, nth + 1, tiles, repr(program)[:200], flush=True)
                continue
            us = quickly(partial(program, *operands), enough=0.01) / ROUTINGS
            found[tiles, nth] = us
            gb = read * matrices[nth].nbytes / us / 1e3
            flops = 2.0 * rows * matrices[nth][0].size / us / 1e6
            result.add(
                what=f"product {nth + 1}", tokens=count, tiles=list(tiles), us=us, GB_per_s=gb,
                TFLOP_per_s=flops,
            )  # fmt: skip
        for nth in (0, 1):
            times = {tiles: us for (tiles, n), us in found.items() if n == nth}
            if not times:
                continue
            best = min(times, key=lambda tiles: times[tiles])
            chosen = times.get(tiles_of(rows, experts), float("nan"))
            result.add(
                what=f"best of product {nth + 1}", tokens=count, tiles=list(best), us=times[best],
                chosen_us=chosen,
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="xla's Pallas kernels beside lax.ragged_dot.")
    known = {**MODELS, "tiny": TINY}
    parser.add_argument("--model", choices=known, default="qwen3_30b")
    parser.add_argument("--recipes", nargs="+", default=["bf16"])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--loop", action="store_true", help="the loop over experts, too")
    parser.add_argument("--sweep", action="store_true", help="products alone, in many tiles")
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    model, result = known[arguments.model], Result()
    print(f"kernels available: {pallas_products.available()}", flush=True)
    if arguments.sweep:
        sweep(result, model, arguments.tokens)
    else:
        layers(result, model, arguments.recipes, arguments.tokens, arguments.loop)


if __name__ == "__main__":
    main()
