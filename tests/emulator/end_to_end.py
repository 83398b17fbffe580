"""Calls through jit, shard_map and the compiled module to a libcuda that the emulator carries out.

    PYTHONPATH=.:tests:tests/plan python tests/emulator/end_to_end.py [CASE ...]

Prints a JSON object a case: its name and the relative error against `reference`. A process of its
own: the driver is chosen once a process. test_end_to_end.py runs `CASES`, run_cells.py two layers,
a scan and a call after an idle one of every family (`of_families`).
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)

import cases  # noqa: E402
import jax.numpy as jnp  # noqa: E402 (devices are counted first)

import jax_megamoe as mm  # noqa: E402
from emulator.cells import GROUPED, Cell, families, in_its_layout  # noqa: E402
from emulator.driver import EmulatingDriver  # noqa: E402

Arguments = dict[str, Any]


def _call(cell: Cell, implementation: str, **arguments: Any) -> Any:
    config = cell.config()
    place: Arguments = {}
    if cell.ranks > 1:
        place = dict(mesh=cases.ep_mesh(cell.ranks), axis="ep")
    return mm.mega_moe(**arguments, **place, config=config, implementation=implementation)


def _inputs(cell: Cell, seed: int = 2, tokens: int | None = None) -> Arguments:
    config, rows = cell.config(), (tokens or cell.tokens) * cell.ranks
    x, ids, factors = cases.tokens(config, rows, seed)
    weights = in_its_layout(cell, cases.weights(config))
    return dict(x=x, topk_ids=ids, topk_weights=factors, weights=weights)


def _both(cell: Cell, function: Callable[[str], Any]) -> float:
    """The error of a function of the implementation's name."""
    return cases.relative_error(function(cell.implementation), function("reference"))


def one_call(cell: Cell) -> float:
    """mega_moe as a user calls it."""
    inputs = _inputs(cell)
    return _both(cell, lambda name: _call(cell, name, **inputs))


def two_layers(cell: Cell) -> float:
    """Two layers in one jitted function: one buffer, the second reads what the first wrote."""

    def layers(x: jax.Array, layer: Callable[[jax.Array], jax.Array]) -> jax.Array:
        for _ in range(2):
            x = x + layer(x)
        return x

    return _stacked(cell, 2, layers)


def scanned(cell: Cell) -> float:
    """Three layers by `lax.scan`."""

    def layers(x: jax.Array, layer: Callable[[jax.Array], jax.Array]) -> jax.Array:
        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return (x + layer(x)).astype(x.dtype), None

        return jax.lax.scan(step, x, length=3)[0]

    return _stacked(cell, 3, layers)


def _stacked(cell: Cell, number: int, layers: Callable[..., jax.Array]) -> float:
    """The largest error of a layer on its own input; infinite if the stack is not its calls.

    Not that of the stack: one BF16 value that differs after a layer may change a block's scale in
    the next, and so a whole row by some percent.
    """
    inputs = _inputs(cell)
    x = inputs.pop("x")

    def layer(x: jax.Array, name: str = cell.implementation) -> jax.Array:
        return _call(cell, name, x=x, **inputs)

    got, worst = jax.jit(lambda x: layers(x, layer))(x), 0.0
    for _ in range(number):
        y = layer(x)
        worst = max(worst, cases.relative_error(y, layer(x, "reference")))
        x = x + y
    return worst if jnp.array_equal(got, x) else float("inf")


def after_an_idle_call(cell: Cell) -> float:
    """A call that routes nothing between two that do."""
    inputs, errors = _inputs(cell), []
    for ids in (inputs["topk_ids"], jnp.full_like(inputs["topk_ids"], -1), inputs["topk_ids"]):
        arguments = inputs | {"topk_ids": ids}
        errors.append(_both(cell, lambda name, args=arguments: _call(cell, name, **args)))
    return max(errors)


CASES: dict[str, tuple[Callable[[Cell], float], Cell]] = {
    "mxfp8": (one_call, Cell("mxfp8", "sgl")),
    "mxfp4 over 2 ranks": (one_call, Cell("mxfp4", "sgl", ranks=2, tokens=16, max_tokens=32)),
    "mxfp4 over 4 ranks": (one_call, Cell("mxfp4", "sgl", ranks=4, tokens=8, max_tokens=32)),
    "mxfp4 over 8 ranks": (one_call, Cell("mxfp4", "sgl", ranks=8, tokens=4, max_tokens=32)),
    "fp8_block over 2 ranks": (one_call, Cell("fp8_block", "sgl", ranks=2, tokens=16)),
    "two layers over 2 ranks": (two_layers, Cell("mxfp4", "sgl", ranks=2, tokens=16)),
    "a scan of three layers": (scanned, Cell("mxfp4", "sgl")),
    # Of its products' arguments one is a struct.
    "bf16 in slots": (one_call, Cell("bf16", GROUPED, arch=100, tokens=9)),
    "bf16 of 1,040 rows": (one_call, Cell("bf16", GROUPED, arch=90, tokens=130, top_k=8)),
    "reuse after an idle call": (after_an_idle_call, Cell("mxfp4", "sgl", ranks=2, tokens=16)),
}


FUNCTIONS = {
    "two layers on one buffer": two_layers,
    "a scan of three layers": scanned,
    "calls around an idle one": after_an_idle_call,
}


def of_families() -> dict[str, tuple[Callable[[Cell], float], Cell]]:
    """The same of every family, over two ranks, and the grouped products over more."""
    grouped = {
        f"{GROUPED} {form} ranks={ranks}: one call, to the driver": (
            one_call,
            Cell(form, GROUPED, ranks=ranks, tokens=9, arch=90, exact_sums=True),
        )
        for form, ranks in (("mxfp4", 4), ("mxfp4", 8), ("fp8_block", 4), ("bf16", 4))
    }
    for arch, words in ((90, ""), (100, " arch=100")):
        name = f"{GROUPED} bf16 ranks=1{words}: a scan of three layers, to the driver"
        grouped[name] = (scanned, Cell("bf16", GROUPED, tokens=9, arch=arch))
    return grouped | {
        f"{source} {form} ranks=2: {name}, to the driver": (
            function,
            Cell(form, source, ranks=2, tokens=16, exact_sums=True),
        )
        for form, source in families()
        for name, function in FUNCTIONS.items()
    }


def main(names: list[str]) -> None:
    """Runs the cases named, or those of `CASES`."""
    driver = EmulatingDriver(Cell("mxfp8", "sgl").device)
    driver.set(delay=0.5)
    known = CASES | of_families()
    for name in names or CASES:
        function, cell = known[name]
        driver.device = cell.device
        driver.set(exact_sums=cell.exact_sums, diverge=cell.source != "flashinfer")
        jax.clear_caches()
        before = driver.count("launches")
        error = function(cell)
        launches = driver.count("launches") - before
        print(json.dumps({"case": name, "error": error, "launches": launches}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
