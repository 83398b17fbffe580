"""Which form of Humming's tiles a product of few rows is fastest in, on one GPU.

    PYTHONPATH=.:tests:tests/gpu:benchmarks/gpu python benchmarks/gpu/tile_forms.py \
        [--shapes qwen3_30b] [--tokens 1 8] [--weights mxfp4]

Each product of a layer alone, on tables and rows that a call made: its tiles as `tiles.choose` says
(`wide`), with half their columns (`narrow`), and both with the last wave cut along K (`cut`). Times
are medians of a program of as many products as grouped.py has layers, with as many routings;
`tiles` is how many there are, `steps` how many blocks of K each has, `places` how many run at once.
Results go to $OUT/tile_forms.json after every row. `tiles.choose` goes by them.
"""

import argparse
import faulthandler
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import grouped
import grouped_layers
import jax
import jax.numpy as jnp
import numpy as np
from checks import OUT
from jaxtyping import Array

from jax_megamoe.launch import grouped as launched
from jax_megamoe.launch import launcher
from jax_megamoe.plan.grouped import tiles
from jax_megamoe.plan.grouped.call import GroupedLayer
from jax_megamoe.plan.grouped.layer import plan_grouped
from jax_megamoe.plan.grouped.product import Product, Tiles

TOKENS = (1, 4, 8, 16, 64)
SECONDS = 400
FORMS = {
    "wide": dict(narrow=False, stream_k=False),
    "wide cut": dict(narrow=False, stream_k=True),
    "narrow": dict(narrow=True, stream_k=False),
    "narrow cut": dict(narrow=True, stream_k=True),
}

_planned = tiles.choose


def _form(narrow: bool, stream_k: bool, product: Product, *sizes: int) -> Tiles:
    """The planned tiles in another form."""
    chosen = _planned(product, *sizes)
    if narrow:
        (height, columns, depth), (rows, warp, deep) = chosen.block, chosen.warp
        chosen = replace(chosen, block=(height, columns // 2, depth), warp=(rows, warp // 2, deep))
    return replace(chosen, stream_k=stream_k, ordered=stream_k)


@contextmanager
def form(name: str) -> Iterator[None]:
    """Layers are planned in a form."""
    tiles.choose = partial(_form, *FORMS[name].values())
    try:
        yield
    finally:
        tiles.choose = _planned


def product(layer: GroupedLayer, which: int) -> Callable[..., Array]:
    """f(operands, made): one product on each of the tables that calls made."""
    plan = plan_grouped(layer)
    found = [step for step in plan.launches if step.kernel.symbol == "humming"]
    alone = replace(plan, steps=(found[which],))
    written = ("h", "outputs")[which]
    shapes = {name: jax.ShapeDtypeStruct(*like) for name, *like in plan.scratch if name == written}

    @jax.jit
    def run(operands: dict[str, Array], made: list[dict[str, Array]]) -> Array:
        total = jnp.zeros((), jnp.bfloat16)
        for tables in made:
            out = launcher.launch(alone, operands | tables, shapes, command_buffer=True)
            total = total + out[written][0, 0]
        return total

    return run


def rows(shape: str, layer: GroupedLayer, stored: Any) -> Iterator[dict[str, Any]]:
    """Both products of a layer in every form."""
    operands = grouped_layers.tokens(layer) | grouped_layers.parameters(layer, stored)
    written = ("h", "outputs")
    with form("wide cut"):  # its scratch has locks
        call = jax.jit(partial(launched.launch_layer, layer))
        names = [name for name, *_ in plan_grouped(layer).scratch if name not in written]
        made = []
        for ids in grouped.turns_of(layer, operands):
            out = call(operands | {"topk_ids": ids})
            made.append({name: out[name] for name in names})
    for which in (0, 1):
        found: dict[str, float] = {}
        for name in FORMS:
            with form(name):
                run = product(layer, which)
                taken = grouped.microseconds(partial(run, operands, made), grouped.LAYERS, 5)
            found[name] = taken
        with form("wide"):
            sizes, chosen = layer.product(bool(which)), layer.tiles(bool(which))
        blocks = float(np.mean([int(each["num_slots"][0]) for each in made])) / chosen.block[0]
        yield dict(
            shape=shape,
            recipe=f"{layer.weights} x {layer.activations}",
            num_tokens=layer.num_tokens,
            product=which + 1,
            tiles=blocks * sizes.n / chosen.block[1],
            steps=sizes.k // chosen.block[2],
            places=layer.num_sms * chosen.ctas,
            microseconds=found,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Forms of tiles on one GPU.")
    parser.add_argument("--shapes", nargs="+", default=[*grouped.SHAPES, "gpt_oss_120b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--weights", default="mxfp4")
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    found: list[dict[str, Any]] = []
    for shape in arguments.shapes:
        sizes = grouped.MODELS[shape].sizes
        each, stored = grouped.prepared(sizes, (arguments.weights, "fp8_block"))
        each = replace(each, stream_k=None, early=False)
        layers = [replace(each, num_tokens=count) for count in arguments.tokens]
        for name in FORMS:
            with form(name):
                grouped.compiled(layers)
        for layer in layers:
            for row in rows(shape, layer, stored):
                found.append(row)
                print(json.dumps(row), flush=True)
                result = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
                (OUT / "tile_forms.json").write_text(json.dumps(result | {"rows": found}, indent=1))


if __name__ == "__main__":
    main()
