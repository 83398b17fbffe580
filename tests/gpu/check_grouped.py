"""The grouped implementation on one GPU: layers of each recipe against exact sums.

    PYTHONPATH=.:tests:tests/gpu python tests/gpu/check_grouped.py [--quick] [--weights bf16]

Needs Humming's headers (JAX_MEGAMOE_HUMMING_ROOT, or `python -m jax_megamoe sources fetch humming`;
sgl's for bf16) and a compiler; on Hopper GPUs. Every layer runs jitted, 20 times for its bits, with
launches that overlap and without, and with and without tiles that are cut along K; `mega_moe` then
runs what it can be asked for, and where there are several GPUs a layer over all of them. Results go
to $OUT/check_grouped.json.
"""

import argparse
import faulthandler
import time
from dataclasses import replace
from functools import partial
from typing import Any

import grouped_layers
import jax
import jax.numpy as jnp
import numpy as np
import tolerances
from checks import Checks, bits, distance
from jaxtyping import Array

import jax_megamoe as mm
from jax_megamoe.compile import compile_many, find_source
from jax_megamoe.launch import grouped
from jax_megamoe.plan.grouped.call import GroupedLayer
from jax_megamoe.plan.grouped.layer import plan_grouped
from jax_megamoe.plan.grouped.rules import planned_arch, source_of
from jax_megamoe.runtime.devices import device_spec
from jax_megamoe.weights.drawn import random_experts

TOKENS = (1, 7, 64, 129, 700)
WEIGHTS = ("mxfp4", "mxfp8", "nvfp4", "fp8_block", "bf16")
VARIED = 64
"""Tokens at which a case also runs in other ways than it is planned."""
REPEATS = 20
SECONDS = 400
SIZES = dict(num_experts=64, num_logical=64, top_k=8, hidden_size=1024, intermediate_size=768)


def cases(quick: bool, weights: list[str]) -> list[GroupedLayer]:
    """Every recipe of these weights at odd numbers of tokens, and what a layer may have."""
    here = device_spec(jax.devices()[0])
    place = dict(arch=planned_arch(here.arch), num_sms=here.num_sms)
    make = partial(grouped_layers.case, **SIZES, **place)
    recipes = grouped_layers.RECIPES[:4] if quick else grouped_layers.RECIPES
    found = [make(*recipe, n) for recipe in recipes for n in TOKENS]
    gpt = dict(biases=True, clamp=7.0, alpha=1.702, beta=1.0)
    found += [make("mxfp4", name, 64, **gpt) for name in ("bf16", "fp8_block", "mxfp8")]
    found.append(make("bf16", "bf16", 64, **gpt))
    # Blocks of 128 rows, and more experts than rows.
    found.append(make("bf16", "bf16", 700, num_experts=8, num_logical=8))
    found.append(make("bf16", "bf16", 2, num_experts=256, num_logical=256))
    # 2944 rows are padded to 3072.
    odd = make("mxfp4", "bf16", 7, **gpt) if quick else make("mxfp4", "fp8_block", 7, **gpt)
    found.append(replace(odd, hidden_size=2944, intermediate_size=2944, num_experts=16,
                         num_logical=16, top_k=4))  # fmt: skip
    found.append(make("mxfp4", "mxfp8", 64, activation="situ", alpha=4.0, beta=25.0))
    # Large matrices of few rows: narrow tiles, and a wave that is cut (see `tiles.measured`).
    large = dict(num_experts=64, num_logical=64, hidden_size=4096, intermediate_size=2048)
    found += [make("mxfp4", "fp8_block", count, **large) for count in (1, 7)]
    return [each for each in found if each.weights in weights]


def variants(each: GroupedLayer) -> list[tuple[str, GroupedLayer]]:
    """A case as it is planned, and otherwise."""
    found = [("", each)]
    if each.num_tokens == VARIED:
        found.append((", no overlap", replace(each, early=False)))
    if each.num_tokens == VARIED and not each.in_slots:
        found.append((", stream-K", replace(each, stream_k=True)))
    return found


def name_of(each: GroupedLayer) -> str:
    extras = f", {each.activation}" * (each.activation != "swiglu") + ", biases" * each.biases
    sizes = f", H {each.hidden_size}" * (each.hidden_size != SIZES["hidden_size"])
    return f"{each.weights} x {each.activations}, {each.num_tokens} tokens{extras}{sizes}"


def run(checks: Checks, each: GroupedLayer) -> None:
    """One case: its error, its bits, and that nothing else is written."""
    stored = grouped_layers.stored_weights(each)
    call = grouped_layers.tokens(each)
    want = grouped_layers.expected(each, stored, call, max(TOKENS))
    by_rows = (
        (None, True) if (each.weights, each.activations) == ("mxfp4", "fp8_block") else (None,)
    )
    for by_row in by_rows:
        weights = grouped_layers.grouped_weights(each, stored, by_row)
        operands = call | grouped_layers.parameters(each, weights)
        for what, variant in variants(grouped_layers.described(each, weights)):
            name = name_of(each) + ", second scale by row" * bool(by_row) + what
            try:
                one(checks, name, variant, operands, want)
            except Exception as error:  # the others still tell something
                checks.check(False, name, f"{type(error).__name__}: {str(error)[:500]}")


def one(
    checks: Checks, name: str, each: GroupedLayer, operands: dict[str, Array], want: np.ndarray
) -> None:
    call = jax.jit(partial(grouped.launch_layer, each))
    out = call(operands)
    y = np.asarray(out["y"].astype(jnp.float32))
    found = distance(y, want)
    limit = grouped_layers.ERROR[each.activations]
    detail = f"error {found.norm:.4f}, worst token {found.token:.4f}, gain {found.gain:.4f}"
    finite = bool(np.isfinite(y).all())
    near = found.norm < limit and found.token < 5 * limit and abs(found.gain - 1) < limit
    checks.check(near and finite, name, detail)
    first = bits(out["y"])
    again = [bits(call(operands)["y"]) for _ in range(REPEATS)]
    same = sum(bool((first == each).all()) for each in again)
    checks.check(same == REPEATS, f"{name}, bits of repeats", f"{same} of {REPEATS} equal")
    if each.cuts:
        checks.check(not np.asarray(out["locks"]).any(), f"{name}, locks", "left clear")


def through_mega_moe(checks: Checks, forms: list[str]) -> None:
    """`implementation="grouped"` as a user calls it, against `xla` on the same parameters."""
    for form in forms:
        config = mm.MoEConfig(
            num_experts=32,
            num_logical_experts=30,
            top_k=4,
            hidden_size=512,
            intermediate_size=256,
            max_num_tokens=256,
            weight_format=form,
        )
        weights = random_experts(config, jax.random.key(0))
        each = grouped_layers.case(form, "bf16", 129, num_experts=30, num_logical=30)
        tokens = grouped_layers.tokens(replace(each, hidden_size=512))
        arguments = (tokens["x"], tokens["topk_ids"], tokens["topk_weights"])
        mask = np.arange(129) % 4 == 1
        layout = grouped.layout_of(config, device_spec(jax.devices()[0]).arch)
        moved = mm.to_layout(weights, layout)
        call = partial(mm.mega_moe, config=config, padding_mask=mask, return_stats=True)
        y, counts = jax.jit(partial(call, implementation="grouped"))(*arguments, moved)
        want, wanted_counts = jax.jit(partial(call, implementation="xla"))(*arguments, moved)
        found = distance(y.astype(jnp.float32), want.astype(jnp.float32))
        near = found.norm < 0.05 if form == "nvfp4" else found.norm < 0.02
        checks.check(near, f"mega_moe, {form}", f"error {found.norm:.4f} against xla")
        checks.check(not bits(y)[mask].any(), f"mega_moe, {form}, padded rows are 0")
        checks.check(bool((counts == wanted_counts).all()), f"mega_moe, {form}, counts")
        other = jax.jit(partial(call, implementation="xla"))(*arguments, weights)[0]
        found = distance(want.astype(jnp.float32), other.astype(jnp.float32))
        # Kernels of fp8_block and nvfp4 round elsewhere, and so does `xla` on their layouts. It has
        # Pallas kernels for the others' own layouts, which sum in another order.
        apart = {"nvfp4": 0.1, "fp8_block": 0.03}
        limit = apart.get(form, tolerances.AGREEMENT[form].norm)
        checks.check(found.norm < limit, f"xla reads grouped weights, {form}", f"{found.norm:.1e}")
        batched = jax.vmap(
            partial(mm.mega_moe, config=config, implementation="grouped"),
            in_axes=(0, 0, 0, None),
        )
        halves = [a[:128].reshape(2, 64, *a.shape[1:]) for a in arguments]
        both = jax.jit(batched)(*halves, moved).reshape(128, -1)
        alone = jax.jit(partial(mm.mega_moe, config=config, implementation="grouped"))(
            *(a[:128] for a in arguments), moved
        )
        checks.same_bits(both, alone, f"mega_moe, {form}, vmap")


def over_ranks(checks: Checks, forms: list[str]) -> None:
    """The same layer over all GPUs as on one, its rows exchanged by all-to-alls."""
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("ep",))
    for form in forms:
        config = mm.MoEConfig(
            num_experts=32,
            top_k=4,
            hidden_size=1024,
            intermediate_size=512,
            max_num_tokens=256,
            weight_format=form,
        )
        layout = grouped.layout_of(config, device_spec(devices[0]).arch)
        weights = mm.to_layout(random_experts(config, jax.random.key(0)), layout)
        each = grouped_layers.case(form, "bf16", 128, num_experts=32, num_logical=32)
        tokens = grouped_layers.tokens(replace(each, hidden_size=1024))
        even = (tokens["x"], tokens["topk_ids"], tokens["topk_weights"])
        skewed = (even[0], jnp.where(even[1] >= 0, even[1] % 3, -1), even[2])
        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ep"))
        spread = jax.device_put(weights, split)
        run = partial(mm.mega_moe, config=config, implementation="grouped")
        for load, arguments in (("even", even), ("skewed", skewed)):
            alone = np.asarray(jax.jit(run)(*arguments, weights).astype(jnp.float32))
            parts = [jax.device_put(a, split) for a in arguments]
            many = jax.jit(partial(run, mesh=mesh, axis="ep"))(*parts, spread)
            found = distance(many.astype(jnp.float32), alone)
            what = f"{len(devices)} GPUs, {form}, {load}"
            checks.check(found.norm < 5e-3, what, f"error {found.norm:.5f} against one")


def main() -> None:
    parser = argparse.ArgumentParser(description="The grouped implementation on one GPU.")
    parser.add_argument("--quick", action="store_true", help="four recipes")
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=WEIGHTS)
    arguments = parser.parse_args()
    quick: bool = arguments.quick
    forms: list[str] = arguments.weights
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    checks = Checks("check_grouped")
    found = cases(quick, forms)
    start = time.monotonic()
    plans = [plan_grouped(v) for each in found for v in all_variants(each)]
    specs = [step.kernel for plan in plans for step in plan.launches]
    outcomes = compile_many(specs)
    bad = [outcome for outcome in outcomes if outcome.error is not None]
    for outcome in bad[:3]:
        print(str(outcome.error)[:2000], flush=True)
    seconds = time.monotonic() - start
    checks.check(not bad, "kernels compile", f"{len(outcomes)} in {seconds:.0f} s, {len(bad)} not")
    for each in found:
        run(checks, each)
    through_mega_moe(checks, forms)
    if jax.device_count() > 1:
        over_ranks(checks, [form for form in ("mxfp4", "fp8_block", "bf16") if form in forms])
    device: Any = jax.devices()[0]
    sources = sorted({source_of(form) for form in forms})
    versions = {source: find_source(source).version for source in sources}
    checks.finish(device=device.device_kind, **versions)


def all_variants(each: GroupedLayer) -> list[GroupedLayer]:
    """Those that `run` runs, before their weights are made."""
    kinds = [("none", "none")]
    if each.weights == "nvfp4":
        kinds = [("tensor", "tensor")]
    if (each.weights, each.activations) == ("mxfp4", "fp8_block"):
        kinds = [("tensor", "tensor"), ("channel", "channel")]
    return [v for kind in kinds for _, v in variants(replace(each, second_scales=kind))]


if __name__ == "__main__":
    main()
