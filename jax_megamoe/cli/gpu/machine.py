"""What a GPU can do at most, and the versions that times depend on."""

import platform
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_megamoe.cli.gpu.result import Ceilings
from jax_megamoe.compile import BuildError, describe_toolchain

PACKAGES = ("jax-megamoe", "jax", "jaxlib", "jax-cuda13-plugin", "sgl-deep-gemm", "tokamax")
REFUSED = (BuildError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What a layer raises that cannot run here; too little memory is a RuntimeError."""

Timer = Callable[[Callable[[], Any]], float]
"""Median microseconds of a call of a function."""


def line_of(error: BaseException) -> str:
    """The first line of an error, which says what is missing, with the last where it ends in a
    colon, as Triton's place in a kernel does."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    return (f"{first} {lines[-1]}" if first.endswith(":") and len(lines) > 1 else first)[:200]


def ceilings(timer: Timer, *, small: bool) -> Ceilings:
    """The copy rate, and the rates of a large product.

    Args:
        timer: how it is timed.
        small: for a machine without a GPU.
    """
    size = 1 << (20 if small else 30)
    # Words: XLA moves single bytes at less than half the rate.
    source = jnp.zeros(size // 4, jnp.uint32)
    copy = jax.jit(lambda array: array ^ jnp.uint32(1))
    rate = 2 * size / timer(lambda: copy(source)) * 1e6
    side = 256 if small else 8192
    products = (_product_rate(timer, side, each) for each in (jnp.bfloat16, jnp.float8_e4m3fn))
    return Ceilings(rate, *products)


def _product_rate(timer: Timer, side: int, dtype: Any) -> float:
    """FLOP/s of a product of square matrices; 0 where XLA has none of the dtype here."""
    keys = jax.random.split(jax.random.key(0))
    left, right = (jax.random.normal(key, (side, side), jnp.float32).astype(dtype) for key in keys)
    product = jax.jit(
        lambda a, b: lax.dot_general(
            a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        ).astype(jnp.bfloat16)
    )
    try:
        return 2 * side**3 / timer(lambda: product(left, right)) * 1e6
    except REFUSED:
        return 0.0


def versions() -> dict[str, str]:
    """Of what the times depend on: packages, kernel sources, compilers, the driver."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    for each in describe_toolchain():
        if each.found and each.part.startswith(("kernel source", "compiler")):
            found[each.part] = each.found.split(" in ", maxsplit=1)[0]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
        found["driver"] = done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        pass
    return found
