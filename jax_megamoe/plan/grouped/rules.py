"""Which recipes the grouped products run on which GPUs, on weights of which layout."""

from collections.abc import Mapping

from jax_megamoe.formats import GROUPED_BF16, GROUPED_FP8, INTERLEAVE_8
from jax_megamoe.plan.grouped import deep_gemm_bf16_sm90, deep_gemm_bf16_sm100, humming, slots
from jax_megamoe.plan.grouped.product import KNOWN_ARCHS, WEIGHTS

MAX_EXPERTS = 512
"""Experts of one rank that a block which sorts has room for."""

ROWS = {
    "bf16": ("kBf16", "bf16"),
    "mxfp8": ("kMxfp8", "bf16"),
    "nvfp4": ("kNvfp4", "bf16"),
    "fp8_block": ("kFp8Block", "fp8_f32_128"),
}
"""By activation format: the kernels' name of it, and what the product reads. MX and NV values are
decoded to BF16, which holds them exactly: mma.sync and wgmma have no block scales."""


SLOT_PRODUCTS: Mapping[int, slots.SlotProduct] = {
    90: deep_gemm_bf16_sm90,
    100: deep_gemm_bf16_sm100,
}
"""Products of BF16 weights, by architecture."""

_BOTH_FP8 = (89, 90, 100, 120)


def planned_arch(arch: int) -> int:
    """The architecture, of those in `KNOWN_ARCHS`, whose kernels a device of `arch` runs; 0: none.

    Mma.sync and what it needs are the same within a generation, except that 8.9 has FP8.
    """
    if arch in KNOWN_ARCHS:
        return arch
    return {8: 80, 9: 90, 10: 100, 12: 120}.get(arch // 10, 0)


def refusal(weights: str, activations: str, arch: int) -> str:
    """What is expected instead of a recipe on an architecture; empty where it runs."""
    rules = (
        (arch in KNOWN_ARCHS, "compute capability 8.0 or newer"),
        (weights in WEIGHTS or weights == "bf16", f"weights in one of {[*WEIGHTS, 'bf16']}"),
        (weights != "bf16" or activations == "bf16", "bf16 activations beside bf16 weights"),
        (
            weights != "bf16" or arch in SLOT_PRODUCTS,
            f"compute capability {_named(*SLOT_PRODUCTS)} for bf16 weights",
        ),
        (
            weights != "fp8_block" or activations == "fp8_block",
            "fp8_block activations: their weights' scales are no BF16 numbers",
        ),
        (
            activations != "fp8_block" or weights in ("mxfp4", "fp8_block"),
            "mxfp4 or fp8_block weights beside fp8_block activations",
        ),
        (
            activations != "fp8_block" or arch in _BOTH_FP8,
            "compute capability 8.9 or newer for fp8_block activations",
        ),
        (
            activations != "fp8_block" or weights != "mxfp4" or arch == 90,
            "compute capability 9.0 for mxfp4 weights beside fp8_block activations",
        ),
    )
    return next((expected for holds, expected in rules if not holds), "")


def _named(*archs: int) -> str:
    return " or ".join(f"{arch // 10}.{arch % 10}" for arch in archs)


def layout_of(weights: str, activations: str) -> str:
    """The layout of weights beside rows of an activation format. BF16 stays as the mega kernels
    read it."""
    if weights == "bf16":
        return INTERLEAVE_8
    return GROUPED_FP8 if ROWS[activations][1] != "bf16" else GROUPED_BF16


def source_of(weights: str) -> str:
    """The kernel source of the products of a weight format."""
    return slots.SOURCE if weights == "bf16" else humming.SOURCE
