"""`xla` with Pallas kernels on one GPU, or over all there are: layers against `reference`.

    PYTHONPATH=.:tests:tests/gpu python tests/gpu/check_pallas.py [--quick]

Needs a GPU of compute capability 8.0 or newer; no kernel source, no compiler. Every layer is
jitted, its program must hold the kernels, and it runs 10 times for its bits. Results go to
$OUT/check_pallas.json.
"""

import argparse
import faulthandler
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tolerances
from checks import Checks, bits
from jaxtyping import Array

import jax_megamoe as mm
from jax_megamoe.cli.gpu.routings import drawn
from jax_megamoe.op import pallas_products
from jax_megamoe.op.pallas_experts import FORMATS
from jax_megamoe.weights.drawn import random_experts

TOKENS = (1, 7, 64, 129, 700)
REPEATS = 10
SECONDS = 150
TARGET = "__gpu$xla.gpu.triton"
GPT_OSS = mm.Activation("swiglu", clamp=7.0, alpha=1.702, beta=1.0)

Inputs = tuple[Array, Array, Array]


def config_of(recipe: str, **changes: Any) -> mm.MoEConfig:
    known = mm.RECIPES[recipe]
    sizes = dict(num_experts=32, top_k=4, hidden_size=1024, intermediate_size=512)
    fields = dict(sizes, max_num_tokens=max(TOKENS), weight_format=known.weights)
    return mm.MoEConfig(**fields | dict(activation_format=known.activations) | changes)


def routings(config: mm.MoEConfig) -> dict[str, Inputs]:
    """max(TOKENS) tokens by the kind of routing."""
    x, ids, factors = drawn(config, max(TOKENS))
    holes = jax.random.uniform(jax.random.key(3), ids.shape) < 0.3
    one = jnp.full_like(ids, -1).at[:, 0].set(5)
    return {
        "random": (x, ids, factors),
        "a third goes nowhere": (x, jnp.where(holes, -1, ids), factors),
        "one expert": (x, one, factors),
        "two experts": (x, jnp.where(ids >= 0, ids % 2 * 31, -1), factors),
        "nothing": (x, jnp.full_like(ids, -1), factors),
    }


def layer(checks: Checks, config: mm.MoEConfig, what: str, counts: tuple[int, ...]) -> None:
    """A layer at some numbers of tokens; at 64 with every routing."""
    weights = random_experts(config, jax.random.key(0), has_biases="biases" in what)
    run = partial(mm.mega_moe, config=config)
    reference = jax.jit(partial(run, implementation="reference"))
    found = routings(config)
    # Tokens do not see each other, so one call of `reference` serves every number of them.
    wanted = {
        name: np.asarray(reference(*inputs, weights), np.float32) for name, inputs in found.items()
    }
    limit = tolerances.PALLAS[config.recipe.name]
    for count in counts:
        call = jax.jit(partial(run, implementation="xla"))
        first = tuple(array[:count] for array in found["random"])
        try:
            lowered = call.lower(*first, weights)
            lowered.compile()
        except Exception as error:  # the others still tell something
            checks.check(False, f"{what}, {count} tokens", f"{type(error).__name__}: {error}"[:900])
            continue
        kernels = lowered.as_text().count(TARGET)
        expected = 2 if count else 0
        checks.check(kernels == expected, f"{what}, {count} tokens: kernels", f"{kernels} of them")
        for name in found if count in (64, 700) else ["random"]:
            inputs = tuple(array[:count] for array in found[name])
            y = call(*inputs, weights)
            title = f"{what}, {count} tokens, {name}"
            want = wanted[name][:count]
            if not count or not want.any():
                checks.check(not np.asarray(y, np.float32).any(), title, "zeros")
                continue
            checks.agree(np.asarray(y, np.float32), want, title, limit)
            same = sum(
                bool((bits(call(*inputs, weights)) == bits(y)).all()) for _ in range(REPEATS)
            )
            checks.check(same == REPEATS, f"{title}, bits of repeats", f"{same} of {REPEATS} equal")


def over_ranks(checks: Checks, recipe: str) -> None:
    """A layer over all GPUs as on one."""
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("ep",))
    config = config_of(recipe)
    weights = random_experts(config, jax.random.key(0))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ep"))
    spread = jax.device_put(weights, split)
    run = partial(mm.mega_moe, config=config, implementation="xla")
    for name, whole in routings(config).items():
        inputs = tuple(array[:64] for array in whole)
        alone = np.asarray(jax.jit(run)(*inputs, weights), np.float32)
        parts = [jax.device_put(array, split) for array in inputs]
        many = jax.jit(partial(run, mesh=mesh, axis="ep"))(*parts, spread)
        what = f"{recipe} over {len(devices)} GPUs, {name}"
        if alone.any():
            checks.agree(np.asarray(many, np.float32), alone, what, tolerances.PALLAS[recipe])
        else:
            checks.check(not np.asarray(many, np.float32).any(), what, "zeros")


def main() -> None:
    parser = argparse.ArgumentParser(description="xla's Pallas kernels on one GPU.")
    parser.add_argument("--quick", action="store_true", help="two numbers of tokens")
    quick: bool = parser.parse_args().quick
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    checks = Checks("check_pallas")
    device: Any = jax.devices()[0]
    checks.check(pallas_products.available(), "available", f"on {device.device_kind}")
    layer(checks, config_of("bf16"), "bf16", (0, 7, 64) if quick else (0, *TOKENS))
    layer(checks, config_of("bf16", activation=GPT_OSS), "bf16, biases", (64,))
    layer(checks, config_of("bf16", num_shared_experts=1), "bf16, shared expert", (64,))
    for recipe in FORMATS:
        if recipe != "bf16":
            layer(checks, config_of(recipe), recipe, (64,) if quick else (7, 64, 700))
    if not quick:
        for recipe in ("mxfp4", "fp8_block"):
            layer(checks, config_of(recipe, activation=GPT_OSS), f"{recipe}, biases", (64,))
    if jax.device_count() > 1:
        for recipe in ("bf16", "mxfp4"):
            over_ranks(checks, recipe)
    checks.finish(device=device.device_kind, jax=jax.__version__)


if __name__ == "__main__":
    main()
