"""Executes `xla`'s Pallas kernels: lowered by JAX, compiled by Triton, run by the emulator.

    pip install --no-deps triton==3.6.0
    PYTHONPATH=.:tests JAX_PLATFORMS=cpu python tests/emulator/run_pallas.py [--architectures 80 90]

Compares both products of a small layer with biases, in every recipe and at two tile heights, with
what Pallas' interpreter makes of the same operands. Not a test: Triton is no dependency of the
tests, and XLA compiles these kernels by a Triton of its own. JAX lowers them without a GPU up to
0.10.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import cases
import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.triton import lowering

from emulator.machine import Launch, Machine, aligned
from jax_megamoe.numerics.tokens import quantize_tokens
from jax_megamoe.op import pallas_experts
from jax_megamoe.op.one_expert import Mlp
from jax_megamoe.op.pallas_products import Matrix, Rows, product

SIZES = dict(num_experts=4, top_k=2, hidden_size=256, intermediate_size=128, max_num_tokens=150)
TOKENS = (20, 150)
"""Blocks of 16 rows, and of 128."""
LIMIT = 1e-5
"""Relative error: sums in another order, and a BF16 of some thousand rounded the other way."""


class Call(NamedTuple):
    """One call of `product`, and what the interpreter made of it."""

    operands: tuple[Any, ...]
    options: dict[str, Any]
    expected: np.ndarray


def calls(form: str, num_tokens: int) -> tuple[list[Call], np.ndarray]:
    """Both products of a layer, and which slots have an expert."""
    found: list[Call] = []

    def interpreted(rows: Rows, matrix: Matrix, *rest: Any, **options: Any) -> jax.Array:
        y = product(rows, matrix, *rest, **options, interpret=True)
        found.append(Call((rows, matrix, *rest), options, np.asarray(y)))
        return y

    cfg = cases.config(form, **SIZES)
    weights = cases.weights(cfg, biased=True)
    x, ids, factors = cases.tokens(cfg, num_tokens)
    local = ids.reshape(-1).at[3].set(cfg.num_experts)
    whole, pallas_experts.product = pallas_experts.product, interpreted
    mlp = Mlp(cfg, cfg.recipe, weights.layout)
    pallas_experts.outputs(quantize_tokens(x, cfg.recipe), local, factors.reshape(-1), weights, mlp)
    pallas_experts.product = whole
    return found, np.asarray(local) < cfg.num_experts


def triton_text(call: Call) -> str:
    """The kernel in Triton's language."""
    texts: list[str] = []
    lower = lowering.lower_jaxpr_to_triton_module

    def kept(*arguments: Any, **options: Any) -> Any:
        made = lower(*arguments, **options)
        texts.append(str(made.module))
        return made

    lowering.lower_jaxpr_to_triton_module = kept
    traced = jax.jit(partial(product, **call.options)).trace(*call.operands)
    traced.lower(lowering_platforms=("cuda",))
    lowering.lower_jaxpr_to_triton_module = lower
    return texts[-1]


def executed(call: Call, architecture: int, folder: Path) -> np.ndarray:
    """The result's bytes, 0xff where nothing was stored."""
    import triton  # noqa: PLC0415 (may be missing)
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415

    tiles, file = call.options["tiles"], folder / "kernel.ttir"
    file.write_text(triton_text(call))
    program = triton.compile(
        str(file),
        target=GPUTarget("cuda", architecture, 32),
        options=dict(num_warps=tiles.warps, num_stages=tiles.stages),
    )
    rows, matrix, order, blocks, *weighed = call.operands
    machine, memory = Machine(), []
    for array in jax.tree.leaves((blocks, order, rows, matrix, *weighed)):
        host = np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)
        memory.append(aligned(host.nbytes))
        memory[-1][:] = host
        machine.region(memory[-1], "an operand", writable=False)
    memory += [aligned(call.expected.nbytes, fill=0xFF), aligned(1024), aligned(1024)]
    for array, name in zip(memory[-3:], ("the result", "scratch", "profile"), strict=True):
        machine.region(array, name)
    text = re.sub(r"\{ (%\w+) \}", r"\1", program.asm["ptx"])  # vectors of one
    launch = Launch(
        text,
        [np.uint64(array.ctypes.data).tobytes() for array in memory],
        (matrix.weight.shape[1] // tiles.columns, blocks.expert.shape[0], 1),
        (32 * tiles.warps, 1, 1),
        shared_bytes=program.metadata.shared,
    )
    machine.launch([launch])
    return memory[-3].reshape(call.expected.shape[0], -1)


def errors(form: str, architecture: int, folder: Path) -> Iterator[tuple[str, float]]:
    """What was executed, and its error; infinite where other rows were stored to."""
    for num_tokens in TOKENS:
        found, real = calls(form, num_tokens)
        for nth, call in enumerate(found):
            raw = executed(call, architecture, folder)
            stored = np.arange(len(real)) < real.sum() if nth == 0 else real
            got, want = (
                np.asarray(jnp.asarray(each[stored]), np.float32)
                for each in (raw.view(call.expected.dtype), call.expected)
            )
            error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
            untouched = bool((raw[~stored] == 0xFF).all())
            rows = call.options["tiles"].rows
            what = f"{form}, sm_{architecture}, product {nth + 1}, blocks of {rows} rows"
            yield what, error if untouched else float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description="xla's Pallas kernels on the emulator.")
    parser.add_argument("--architectures", nargs="+", type=int, default=[80, 90])
    parser.add_argument("--recipes", nargs="+", default=list(pallas_experts.FORMATS))
    arguments = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        for form in arguments.recipes:
            for architecture in arguments.architectures:
                for what, error in errors(form, architecture, Path(folder)):
                    bad += not error <= LIMIT
                    print(f"{what}: error {error:.1e}", flush=True)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
