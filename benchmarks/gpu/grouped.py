"""`implementation="grouped"` on one GPU: whole jitted layers, beside the products alone and `xla`.

    PYTHONPATH=.:tests:tests/gpu:benchmarks/gpu python benchmarks/gpu/grouped.py \
        [--quick] [--shapes qwen3_30b] [--weights bf16]

Needs Humming's or sgl's headers and a compiler, as tests/gpu/check_grouped.py. A layer's time is
that of a program of LAYERS layers, each with every id one further, so that weights come from
memory; `products` is the same with the two products alone, on tables that one call made, so that
the difference is what sorting, quantising, activation and sum cost. Results go to $OUT after every
row, as JSON.

    PYTHONPATH=.:tests:tests/gpu:benchmarks/gpu python benchmarks/gpu/grouped.py --gpt-oss 36

Layers of GPT-OSS-120B's size with biases, each with arrays of its own, 61 GB, in one scan: us a
layer, the bytes of the experts that it reads, and what these take at the copy rate of the same run.
"""

import argparse
import faulthandler
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import driver
import grouped_layers
import jax
import jax.numpy as jnp
import numpy as np
from checks import OUT
from jax import lax
from jaxtyping import Array

import jax_megamoe as mm
from jax_megamoe.cli.gpu.models import MODELS
from jax_megamoe.cli.gpu.routings import PROGRAMS, ROUTINGS, UNROLLED, in_turn
from jax_megamoe.compile import compile_many
from jax_megamoe.launch import grouped, launcher
from jax_megamoe.plan.grouped.call import GroupedLayer
from jax_megamoe.plan.grouped.layer import plan_grouped
from jax_megamoe.plan.grouped.rules import planned_arch, source_of
from jax_megamoe.runtime.devices import device_spec

LAYERS = ROUTINGS
TOKENS = (1, 8, 64, 256, 1024, 4096)
QUICK_TOKENS = (1, 8, 64)
SECONDS = 500
SHAPES = {name: MODELS[name].sizes for name in ("qwen3_30b", "dsv3_ep8share", "v4_flash")}
RECIPES = (
    ("mxfp4", "fp8_block"),
    ("mxfp4", "bf16"),
    ("mxfp4", "mxfp8"),
    ("fp8_block", "fp8_block"),
    ("bf16", "bf16"),
)
GPT_OSS = MODELS["gpt_oss_120b"].sizes
GPT_OSS_LAYERS = 36


@dataclass
class Row:
    """One layer; microseconds. `apart`: launches that do not overlap; `plain`: no stream-K, which
    BF16 weights never have."""

    shape: str
    recipe: str
    num_tokens: int
    layer: float
    products: float
    apart: float
    plain: float
    experts: int
    gigabytes_per_second: float


def microseconds(function: Callable[[], Any], calls: int, repeats: int = 7) -> float:
    """Median time of one of `calls` layers of a call, by the host's clock over several in a row."""
    jax.block_until_ready(function())
    start = time.perf_counter()
    jax.block_until_ready(function())
    enough = max(1, int(0.1 / (time.perf_counter() - start)))
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        results = [function() for _ in range(enough)]
        jax.block_until_ready(results[-1])
        times.append((time.perf_counter() - start) / enough / calls)
    return 1e6 * float(np.median(times))


def layers(each: GroupedLayer, operands: dict[str, Array]) -> Callable[[], Any]:
    """LAYERS layers as one program, the nth with every id n further."""
    alone = {name: array for name, array in operands.items() if name not in ("x", "topk_ids")}

    def layer(x: Array, ids: Array, operands: dict[str, Array]) -> Array:
        return grouped.launch_layer(each, operands | {"x": x, "topk_ids": ids})["y"]

    program = in_turn(layer, unrolled=True)
    return partial(program, operands["x"], turns_of(each, operands), alone)


def turns_of(each: GroupedLayer, operands: dict[str, Array]) -> tuple[Array, ...]:
    """The ids of each layer of a program."""
    ids = operands["topk_ids"]
    return tuple(jnp.where(ids >= 0, (ids + n) % each.num_logical, -1) for n in range(LAYERS))


def products_alone(each: GroupedLayer, operands: dict[str, Array]) -> Callable[[], Array]:
    """The two products LAYERS times on the tables of LAYERS routings, in one program."""
    plan = plan_grouped(replace(each, early=False))
    source = source_of(each.weights)
    products = [step for step in plan.launches if step.kernel.source == source]
    alone = replace(plan, steps=tuple(products))
    shapes = {name: jax.ShapeDtypeStruct(*like) for name, *like in plan.scratch}
    written = {name: shapes[name] for name in ("h", "outputs")}
    call = jax.jit(partial(grouped.launch_layer, replace(each, early=False)))
    made: list[dict[str, Array]] = []
    for ids in turns_of(each, operands):
        out = call(operands | {"topk_ids": ids})
        made.append({name: out[name] for name in shapes if name not in written})

    @jax.jit
    def run(operands: dict[str, Array], made: list[dict[str, Array]]) -> Array:
        total = jnp.zeros((), jnp.bfloat16)
        for tables in made:
            out = launcher.launch(alone, operands | tables, written, command_buffer=True)
            total = total + out["outputs"][0, 0]
        return total

    return lambda: run(operands, made)


def row(shape: str, recipe: tuple[str, str], num_tokens: int, weights: Any) -> Row:
    """Everything about one number of tokens."""
    each, stored = weights
    each = replace(each, num_tokens=num_tokens)
    operands = grouped_layers.tokens(each) | grouped_layers.parameters(each, stored)
    experts = len(
        np.unique(np.asarray(operands["topk_ids"])[np.asarray(operands["topk_ids"]) >= 0])
    )
    timed = {"layer": each, "apart": replace(each, early=False)}
    if not each.in_slots:
        timed["plain"] = replace(each, stream_k=False)
    found: dict[str, float] = {}
    for name, variant in timed.items():
        found[name] = microseconds(layers(variant, operands), LAYERS)
    found.setdefault("plain", found["layer"])
    found["products"] = microseconds(products_alone(each, operands), LAYERS)
    routed = sum(a.nbytes for n, a in stored.routed.arrays().items() if "_weight" in n)
    read = routed * experts / each.num_experts
    rate = read / found["products"] / 1e3
    return Row(
        shape, " x ".join(recipe), num_tokens, experts=experts, gigabytes_per_second=rate, **found
    )


def prepared(shape: dict[str, int], recipe: tuple[str, str], **changes: Any) -> Any:
    """A layer of a shape and recipe and its weights."""
    here = device_spec(jax.devices()[0])
    place = dict(arch=planned_arch(here.arch), num_sms=here.num_sms)
    fields = dict(shape, num_logical=shape["num_experts"], **place, **changes)
    each = grouped_layers.case(*recipe, 1, **fields)
    stored = grouped_layers.stored_weights(each)
    moved = grouped_layers.grouped_weights(
        each, stored, False if recipe[1] == "fp8_block" else None
    )
    return grouped_layers.described(each, moved), jax.block_until_ready(moved)


def variants_of(layers: list[GroupedLayer]) -> list[GroupedLayer]:
    """Each layer in the forms that are timed."""
    return [
        variant
        for each in layers
        for variant in (each, replace(each, early=False), replace(each, stream_k=False))
    ]


def compiled(variants: list[GroupedLayer]) -> None:
    """All kernels of some layers, several at a time."""
    plans = [plan_grouped(variant) for variant in variants]
    specs = [step.kernel for plan in plans for step in plan.launches]
    start = time.monotonic()
    bad = [outcome for outcome in compile_many(specs) if outcome.error is not None]
    print(
        f"{len(set(specs))} kernels in {time.monotonic() - start:.0f} s, {len(bad)} failed",
        flush=True,
    )


def gpt_oss(found: list[dict[str, Any]], token_counts: tuple[int, ...], num_layers: int) -> None:
    """Layers of GPT-OSS-120B's size with biases, each with its own arrays, in one scan."""
    driver.use_device()
    copy_rate = driver.copy_rate()
    each, one = prepared(
        GPT_OSS, ("mxfp4", "fp8_block"), biases=True, clamp=7.0, alpha=1.702, beta=1.0
    )
    compiled([replace(each, num_tokens=n) for n in token_counts])
    repeat = jax.jit(lambda a: jnp.broadcast_to(a[None], (num_layers, *a.shape)))
    stacked = jax.block_until_ready(jax.tree.map(repeat, one))
    print(f"{stacked.num_bytes / 1e9:.1f} GB, copy rate {copy_rate / 1e9:.0f} GB/s", flush=True)
    for num_tokens in token_counts:
        layer = replace(each, num_tokens=num_tokens)
        call = grouped_layers.tokens(layer)
        jitted = jax.jit(partial(own_weights, layer))
        y = np.asarray(jitted(stacked, call), np.float32)
        taken = microseconds(lambda f=jitted, c=call: f(stacked, c), num_layers)
        ids = np.asarray(call["topk_ids"])
        experts = len(np.unique(ids[ids >= 0]))
        read = one.num_bytes * experts / each.num_experts
        limit = read / copy_rate * 1e6
        print(
            f"gpt_oss_120b {num_tokens} tokens: {taken:.1f} us a layer, {experts} experts, "
            f"{read / 1e6:.0f} MB, {limit:.1f} us at the copy rate: {limit / taken:.2f} of it",
            flush=True,
        )
        found.append(
            dict(
                shape="gpt_oss_120b",
                layers=num_layers,
                num_tokens=num_tokens,
                layer=taken,
                experts=experts,
                bytes=read,
                copy_bytes_per_second=copy_rate,
                of_copy=limit / taken,
                finite=bool(np.isfinite(y).all()),
            )
        )
        save(found, {})


def own_weights(layer: GroupedLayer, weights: mm.ExpertWeights, call: dict[str, Array]) -> Array:
    """Layers on stacked weights; each adds a little to the next's tokens."""

    def step(x: Array, one: mm.ExpertWeights) -> tuple[Array, None]:
        operands = call | {"x": x} | grouped_layers.parameters(layer, one)
        y = grouped.launch_layer(layer, operands)["y"]
        return x + y / jnp.bfloat16(8), None

    return lax.scan(step, call["x"], weights)[0]


def save(found: list[dict[str, Any]], said: dict[str, str]) -> None:
    """Writes the rows, and what else is to be known of them."""
    device = jax.devices()[0].device_kind
    result = {"device": device, "jax": jax.__version__, **said, "rows": found}
    (OUT / "grouped.json").write_text(json.dumps(result, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description="implementation=grouped on one GPU.")
    parser.add_argument("--quick", action="store_true", help="one shape, three numbers of tokens")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--weights", nargs="+", default=[weights for weights, _ in RECIPES])
    parser.add_argument("--gpt-oss", type=int, default=0, metavar="LAYERS", help="36: the model's")
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    found: list[dict[str, Any]] = []
    counts = QUICK_TOKENS if arguments.quick else TOKENS
    if arguments.gpt_oss:
        gpt_oss(found, (1, 8, 64, 256), arguments.gpt_oss)
        return
    for shape in ["qwen3_30b"] if arguments.quick else arguments.shapes:
        for recipe in (each for each in RECIPES if each[0] in arguments.weights):
            weights = prepared(SHAPES[shape], recipe)
            compiled(variants_of([replace(weights[0], num_tokens=n) for n in counts]))
            for num_tokens in counts:
                try:
                    one = row(shape, recipe, num_tokens, weights)
                except Exception as error:  # the other rows still count
                    print(shape, recipe, num_tokens, repr(error)[:500], flush=True)
                    continue
                found.append(asdict(one))
                print(
                    f"{shape} {one.recipe} {num_tokens} tokens: layer {one.layer:.1f} us, products "
                    f"{one.products:.1f}, apart {one.apart:.1f}, no stream-K {one.plain:.1f}, "
                    f"{one.gigabytes_per_second:.0f} GB/s",
                    flush=True,
                )
                save(found, {PROGRAMS: UNROLLED})


if __name__ == "__main__":
    main()
