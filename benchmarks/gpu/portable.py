"""`xla` with Pallas kernels beside `lax.ragged_dot`: layers of Qwen3-30B's sizes on one GPU.

    PYTHONPATH=.:tests:tests/gpu:benchmarks/gpu python benchmarks/gpu/portable.py
        [--model qwen3_30b] [--recipes bf16 mxfp4] [--tokens 1 8 64 512 4096] [--loop] [--sweep]

Needs a GPU of compute capability 8.0 or newer; no kernel source, no compiler. A layer is timed as
`bench gpu` times what XLA compiles, 16 layers of other routings in a loop. --loop times the loop
over experts too, --sweep both products alone in many tiles, to choose `tiles_of`. Results go to
$OUT/portable.json after every row.
"""

import argparse
import faulthandler
import itertools
import json
import os
import time
from collections.abc import Iterator
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
from jax_megamoe.cli.gpu.measure import timed
from jax_megamoe.cli.gpu.models import MODELS, TINY, Model
from jax_megamoe.cli.gpu.routings import ROUTINGS, drawn, in_turn, routing, turns
from jax_megamoe.formats import RECIPES
from jax_megamoe.numerics.tokens import quantize_tokens
from jax_megamoe.op import pallas_experts, pallas_products
from jax_megamoe.op.pallas_products import (
    Matrix,
    RowBlocks,
    Rows,
    Tiles,
    product,
    row_blocks,
    tiles_of,
)
from jax_megamoe.weights.drawn import random_experts

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
        parameters = jax.block_until_ready(jax.jit(made.make)(jax.random.key(0)))
        inputs = {count: in_turns(model, count) for count in counts}
        # Traced here, where the switch says how; compiled side by side.
        run = in_turn(made.layer, unrolled=False)
        lowered = {count: run.lower(*inputs[count], parameters) for count in counts}
        with ThreadPoolExecutor(COMPILERS) as pool:
            programs = dict(zip(counts, pool.map(_compiled, lowered.values()), strict=True))
        for count, program in programs.items():
            if isinstance(program, Exception):
                result.add(what=name, recipe=recipe, tokens=count, error=repr(program)[:500])
                continue
            call = partial(program, *inputs[count], parameters)
            us = quickly(call) / ROUTINGS
            experts = len(np.unique(np.asarray(inputs[count][1][0])))
            gb = experts * made.weight_bytes(parameters) / us / 1e3
            tflops = model.flops(count) / us / 1e6
            result.add(
                what=name, recipe=recipe, tokens=count, us=us, GB_per_s=gb, TFLOP_per_s=tflops
            )
        jax.clear_caches()
    os.environ[pallas_products.SWITCH] = "1"


def in_turns(model: Model, count: int) -> tuple[Array, tuple[Array, ...], Array]:
    """Tokens, the ids of every turn and their weights."""
    x, ids, factors = drawn(model, count)
    return x, turns(ids, model.num_experts), factors


def _compiled(lowered: Any) -> Any:
    """The program, or what the compiler raised."""
    try:
        return lowered.compile()
    except Exception as error:
        return error


def candidates(num_rows: int, num_experts: int, decoded: bool) -> Iterator[Tiles]:
    """Tiles to try: the chosen one first."""
    chosen = tiles_of(num_rows, num_experts, decoded=decoded)
    yield chosen
    shapes = [(64, 128, 4), (128, 128, 4), (128, 128, 8)]
    shapes += [(64, 128, 8)] if decoded else [(64, 64, 4), (128, 64, 4), (128, 64, 8)]
    heights = [h for h in (chosen.rows // 2, chosen.rows, chosen.rows * 2) if 16 <= h <= 128]
    for rows, (columns, depth, warps) in itertools.product(heights, shapes):
        for stages in (2, 3, 4) if decoded else (3, 4):
            tiles = Tiles(rows, columns, depth, warps, stages)
            size = (2 * rows + (1 if decoded else 2) * columns) * depth * stages
            if size <= LARGEST_SHARED_BYTES and tiles != chosen:
                yield tiles


def many_products(
    rows: Rows, matrix: Matrix, orders: Array, blocks: RowBlocks, **options: Any
) -> Array:
    """A product with `ROUTINGS` routings, one after the other."""

    def step(total: Array, each: tuple[Array, RowBlocks]) -> tuple[Array, None]:
        y = product(rows, matrix, *each, **options)
        return total + y[0, :128].astype(jnp.float32), None

    return lax.scan(step, jnp.zeros(128, jnp.float32), (orders, blocks))[0]


def sweep(result: Result, model: Model, recipe: str, counts: list[int]) -> None:
    """Both products alone in every tile."""
    known, keys = RECIPES[recipe], jax.random.split(jax.random.key(0), 3)
    routed = random_experts(model.config(recipe, max(counts)), keys[0]).routed
    w13 = Matrix(routed.w13_weight, routed.w13_weight_scale)
    w2 = Matrix(routed.w2_weight, routed.w2_weight_scale)
    for count in counts:
        slots = count * model.top_k
        ids = routing(model, count, keys[1], (ROUTINGS,))[0].reshape(ROUTINGS, -1)
        x = jax.random.normal(keys[2], (count, model.hidden_size), jnp.bfloat16)
        act = jax.random.normal(keys[2], (slots, model.intermediate_size), jnp.float32)
        first = jax.jit(lambda x: pallas_experts.rows_of(quantize_tokens(x, known), w13))(x)
        second = jax.jit(lambda act: pallas_experts.second_rows(act, known, w2))(act)
        products = ((first, w13, model.top_k), (second, w2, None))
        one_count(result, model, recipe, ids, products)


def one_count(
    result: Result, model: Model, recipe: str, ids: Array, products: tuple[Any, ...]
) -> None:
    """The products of one number of tokens, (rows, matrix, top_k) each."""
    experts, slots = model.num_experts, ids.shape[1]
    decoded, count = products[0][1].scale is not None, slots // model.top_k
    orders = jnp.argsort(ids, axis=1).astype(jnp.int32)
    read = float(np.mean([len(np.unique(each)) for each in np.asarray(ids)])) / experts
    jobs = [(tiles, n) for tiles in candidates(slots, experts, decoded) for n in (0, 1)]

    def build(job: tuple[Tiles, int]) -> Any:
        tiles, nth = job
        rows, matrix, top_k = products[nth]
        blocks = jax.vmap(partial(row_blocks, num_experts=experts, rows=tiles.rows))(ids)
        call = partial(many_products, tiles=tiles, top_k=top_k, interleaved=nth == 0)
        operands = (rows, matrix, orders, blocks)
        return _compiled(jax.jit(call).lower(*operands)), operands

    with ThreadPoolExecutor(COMPILERS) as pool:
        built = list(pool.map(build, jobs))
    found: dict[tuple[Tiles, int], float] = {}
    for (tiles, nth), (program, operands) in zip(jobs, built, strict=True):
        if isinstance(program, Exception):
            print(count, nth + 1, tiles, repr(program)[:200], flush=True)
            continue
        us = quickly(partial(program, *operands), enough=0.01) / ROUTINGS
        found[tiles, nth] = us
        matrix = products[nth][1]
        gb = read * sum(array.nbytes for array in jax.tree.leaves(matrix)) / us / 1e3
        rate = 2.0 * slots * matrix.weight.shape[1] * matrix.depth / us / 1e6
        result.add(
            what=f"product {nth + 1}", recipe=recipe, tokens=count, tiles=list(tiles), us=us,
            GB_per_s=gb, TFLOP_per_s=rate,
        )  # fmt: skip
    chosen = tiles_of(slots, experts, decoded=decoded)
    for nth in (0, 1):
        times = {tiles: us for (tiles, n), us in found.items() if n == nth}
        if not times:
            continue
        best = min(times, key=lambda tiles, times=times: times[tiles])
        result.add(
            what=f"best of product {nth + 1}", recipe=recipe, tokens=count, tiles=list(best),
            us=times[best], chosen=list(chosen), chosen_us=times.get(chosen, float("nan")),
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
        for recipe in arguments.recipes:
            sweep(result, model, recipe, arguments.tokens)
    else:
        layers(result, model, arguments.recipes, arguments.tokens, arguments.loop)


if __name__ == "__main__":
    main()
