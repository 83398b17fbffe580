"""How long a kernel waits for other ranks.

DeepGEMM's headers stop a kernel (a trap: the process's CUDA context is lost, and its next JAX call
raises) after kNumTimeoutCycles cycles of a wait, 300 s at 2 GHz. The constant cannot be set from
outside. But the headers read `clock64` for these waits alone, so a macro of that name, in the text
that includes them, can make time pass faster.
"""

import math
import os

from jax_megamoe._checks import message
from jax_megamoe.compile.sources import KernelSource

TIMEOUT_VARIABLE = "JAX_MEGAMOE_KERNEL_TIMEOUT"
HEADER_SECONDS = 300
"""The headers' own limit, at 2 GHz."""

_NAMESPACE = "deep_gemm"  # of the headers with that limit; FlashInfer's have 10 and 30 s


def clock_rate(source: KernelSource) -> int:
    """Ticks that a kernel of `source` counts for one cycle, so that it waits no longer than
    ``$JAX_MEGAMOE_KERNEL_TIMEOUT`` seconds; 1 without it.

    Raises:
        ValueError: the variable is no number of seconds from 1 to 300.
    """
    text = os.environ.get(TIMEOUT_VARIABLE)
    if not text or source.namespace != _NAMESPACE:
        return 1
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= HEADER_SECONDS:
        expected = f"a number of seconds from 1 to {HEADER_SECONDS}"
        raise ValueError(message(TIMEOUT_VARIABLE, expected, repr(text)))
    return math.ceil(HEADER_SECONDS / seconds)


def faster_clock(rate: int) -> str:
    """C++ text, before a header is included, that makes its `clock64` count `rate` times faster."""
    if rate == 1:
        return ""
    return f"""\
static __device__ __forceinline__ long long jax_megamoe_clock() {{ return {rate} * clock64(); }}
#define clock64 jax_megamoe_clock
"""
