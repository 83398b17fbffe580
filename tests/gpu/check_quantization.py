"""What JAX computes on a GPU down to the bit: the same as on the CPU, where records prove it.

    PYTHONPATH=.:tests:tests/gpu:benchmarks/gpu python tests/gpu/check_quantization.py

Weights in every format and layout, staged tokens, the second matmul's inputs; then `xla` against
`reference`, and quotients.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import tolerances
from checks import Checks, distance

import jax_megamoe as mm
from jax_megamoe.numerics import quantization
from jax_megamoe.numerics.elements import divide
from jax_megamoe.op.staged_tokens import stage

SCRIPT = "check_quantization"
ROWS, WIDTH = 512, 2048


def values(kind: str, *shape: int) -> jax.Array:
    """BF16: normal ones, or any finite bits between 2^-40 and 2^40."""
    rng = np.random.default_rng(len(kind))
    if kind == "normal":
        return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)
    bits = rng.integers(0x2B80, 0x5380, shape) | rng.integers(0, 2, shape) << 15
    return jnp.asarray(bits.astype(np.uint16).view(jnp.bfloat16))


def compare(checks: Checks, what: str, call: Callable[..., Any], *arrays: Any) -> None:
    """Checks that a jitted function gives the same bits on the CPU and on the default device."""
    leaves = []
    for device in (jax.devices("cpu")[0], jax.devices()[0]):
        out = jax.jit(call)(*jax.device_put(arrays, device))
        leaves.append([np.asarray(leaf) for leaf in jax.tree.leaves(out)])
    pairs = zip(*leaves, strict=True)
    wrong = sum(int((a.view(np.uint8) != b.view(np.uint8)).sum()) for a, b in pairs)
    size = sum(leaf.nbytes for leaf in leaves[0])
    checks.check(not wrong, what, f"{wrong} of {size} bytes differ" if wrong else f"{size} bytes")


def check_casts(checks: Checks) -> None:
    """Weights, tokens and second inputs."""
    for kind in ("normal", "wide"):
        for name in mm.WEIGHT_FORMATS:
            for source in ("sgl", "vllm") if name == "nvfp4" else (None,):
                cfg = cases.config(
                    name, hidden_size=512, intermediate_size=256, kernel_source=source
                )
                shape = (cfg.num_experts, cfg.intermediate_size, cfg.hidden_size)
                down = (shape[0], shape[2], shape[1])
                parts = (values(kind, *shape), values(kind + "2", *shape), values(kind, *down))
                what = f"{kind} weights as {name}{f' of {source}' if source else ''}"
                compare(checks, what, partial(mm.quantize_experts, cfg), *parts)
            cfg = cases.config(name, hidden_size=WIDTH, max_num_tokens=ROWS)
            _, ids, factors = cases.tokens(cfg, ROWS)
            x = values(kind, ROWS, WIDTH)
            compare(checks, f"{kind} tokens of {name}", partial(stage, config=cfg), x, ids, factors)
        act = values(kind, ROWS, WIDTH).astype(jnp.float32) * jnp.float32(1.37)
        compare(checks, f"{kind} second inputs, mxfp8", quantization.requantize_l2_mxfp8, act)
        compare(checks, f"{kind} second inputs, fp8", quantization.requantize_l2_fp8_block, act)
        scale = jnp.float32(0.0123)
        compare(
            checks, f"{kind} second inputs, nvfp4", quantization.requantize_l2_nvfp4, act, scale
        )
        compare(checks, f"{kind} quotients", divide, act, act[::-1, ::-1])


def check_agreement(checks: Checks) -> None:
    """`xla` against `reference`, every format."""
    for name in mm.WEIGHT_FORMATS:
        cfg = cases.config(name, hidden_size=512, intermediate_size=256, num_experts=16)
        weights, limit = cases.weights(cfg), tolerances.AGREEMENT[name]
        _, ids, factors = cases.tokens(cfg, 64)
        x = values("normal", 64, 512)
        call = partial(mm.mega_moe, config=cfg)
        got, want = (
            jax.jit(partial(call, implementation=how))(x, ids, factors, weights)
            for how in ("xla", "reference")
        )
        found = distance(got, want)
        near = found.norm <= limit.norm and found.token <= limit.token
        detail = f"error {found.norm:.5f}, worst token {found.token:.5f}"
        checks.check(near, f"xla agrees with reference, {name}", detail)


def main() -> None:
    """All checks."""
    checks = Checks(SCRIPT)
    check_casts(checks)
    check_agreement(checks)
    checks.finish(device=jax.devices()[0].device_kind, jax=jax.__version__)


if __name__ == "__main__":
    main()
