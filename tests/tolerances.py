"""The one table of how far results may be from each other, and why.

Errors are relative, of whole outputs (`norm`) or of the worst token (`token`), in the Euclidean
norm.
"""

from typing import NamedTuple


class Agreement(NamedTuple):
    """How far two implementations of the same rounding rules may be apart.

    They sum in another order, so a value next to a rounding boundary may fall on its other side.
    One flipped code of the second matmul's input moves its token by the code's step over the root
    of the values that the token sums over; how often that happens gives the norm.
    """

    norm: float
    token: float


AGREEMENT = {
    # A BF16 step is 2^-8, of one value in some 4 * 128 of a token. CPUs with AMX sum in another
    # order for each number of rows: some values of a token flip, the largest among them.
    "bf16": Agreement(norm=5e-4, token=2.5e-3),
    # An E4M3 step is 2^-3.
    "mxfp8": Agreement(norm=5e-4, token=6e-3),
    "mxfp4": Agreement(norm=5e-4, token=6e-3),
    "fp8_block": Agreement(norm=5e-4, token=6e-3),
    "mxfp4_block": Agreement(norm=5e-4, token=6e-3),
    "mxfp4_bf16": Agreement(norm=5e-4, token=2.5e-3),
    # As fp8_block; but `xla` scales the sum where `reference` scales the weights.
    "nvfp4_block": Agreement(norm=1e-3, token=8e-3),
    # An E2M1 step is up to 1/2; and `xla` scales the sum where `reference` scales the weights,
    # which rounds twice more.
    "nvfp4": Agreement(norm=2e-3, token=2.5e-2),
}
"""Any implementation against `reference`, and `reference` against the NumPy oracle."""


BF16_ROUNDING = 2.0**-8
"""The largest relative error of one rounding to BF16: half the last of 8 significant bits."""

SECOND_BIASES = (5 / 3) ** 0.5 * BF16_ROUNDING
"""Folded biases against a layer's own, in the norm. Five roundings differ: of each expert's output
with its bias and, folded, without it; of their sum without biases; of both layers' outputs. An
error is uniform within half the last bit: rms 1 / sqrt(3) of `BF16_ROUNDING` of a value that is a
power of two, less of others. The squares of four experts' outputs, which are uncorrelated, sum to
that of the layer's. So five errors of the output's norm: 0.0050."""

KERNEL_AGREEMENT = {
    # Hopper's tensor cores drop the low bits of an FP8 sum (some 14 are kept), so more codes of the
    # second matmul's input fall on their other side. In tiles of 64 rows the kernel ends such a sum
    # after 128 of K: 0.4 to 0.5 % on an H200. In tiles of 128 rows it goes on over all of K
    # (template argument kReuseAccumAsFinal): 1.0 to 1.6 %, and up to 0.4 % less gain.
    "fp8_block, tiles of 64": Agreement(norm=1e-2, token=2.5e-2),
    "fp8_block": Agreement(norm=2.5e-2, token=5e-2),
    # FlashInfer's end such a sum after 128 of K in tiles of every height.
    # One token of some thousand whose experts nearly cancel was 3 % off.
    "mxfp4_block": Agreement(norm=1e-2, token=4e-2),
    "nvfp4_block": Agreement(norm=1e-2, token=2.5e-2),
}
"""A kernel on its GPU against `reference`, by recipe and, where that matters, tile height."""


def kernel_agreement(recipe: str, block_m: int) -> Agreement:
    """How far a kernel's output in tiles of `block_m` rows may be from `reference`."""
    tiled = f"{recipe}, tiles of {block_m}"
    return KERNEL_AGREEMENT[tiled if tiled in KERNEL_AGREEMENT else recipe]


EMULATED = {
    # The emulator adds products almost exactly and rounds approximations correctly: what is left is
    # where its sums are rounded, 16 to 64 of K at a time.
    "bf16": Agreement(norm=1e-3, token=4e-3),
    "mxfp4_bf16": Agreement(norm=1e-3, token=3e-3),
    "mxfp8": Agreement(norm=1e-3, token=6e-3),
    "mxfp4": Agreement(norm=1e-3, token=6e-3),
    "nvfp4": Agreement(norm=2e-3, token=2.5e-2),
    # With exact sums, or mma.sync's. The unit of a token's codes is its own largest value, so one
    # flipped code of step 2^-3 may be a tenth of a small token: 0.011 in one of 64, equal else.
    "fp8_block": Agreement(norm=3e-3, token=2.5e-2),
    "mxfp4_block": Agreement(norm=3e-3, token=2.5e-2),
    "nvfp4_block": Agreement(norm=3e-3, token=2.5e-2),
}
"""A kernel executed by the emulator (tests/emulator) against `reference`."""


PALLAS = {name: EMULATED[name] for name in ("bf16", "mxfp8", "mxfp4", "fp8_block")}
"""`xla`'s Pallas kernels on a GPU against `reference`: BF16 products, whose sums a tensor core
rounds where the emulator does."""


EMULATED_FP8_SUMS = Agreement(norm=2.5e-2, token=6e-2)
"""The same on SM90, FP8 sums cut to 14 bits as an H200 cuts them: small layers have few values to
average over. With exact sums the same calls are within `EMULATED`."""

EMULATED_GROUPED_NVFP4 = Agreement(norm=7e-2, token=0.15)
"""The grouped products of NVFP4 tokens, which round gate and up before and after a token's scale:
an error of 2^-9 moves a code of step 1/2 with probability 2^-8, rms 2^-4.5 = 0.044."""


EMULATED_GROUPED_BIASES = Agreement(norm=2e-2, token=6e-2)
"""The grouped products with biases, which are added to a product that BF16 holds already: gate and
up are rounded twice. An error of 2^-9 moves a code of step 2^-3 with probability 2^-6, rms 0.016;
0.011 in MXFP4 on every architecture, 0.009 in FP8, whose sums were exact."""


EMULATED_GROUPED_CUT = Agreement(norm=1e-2, token=2e-2)
"""The grouped products of BF16 inputs cut along K: up to four parts of a sum are rounded to BF16
and added there, an error of 2^-9 each; of gate and up only where no code follows. 0.006 of both."""


class Accuracy(NamedTuple):
    """The layer against exact arithmetic: plain SwiGLU, normal tokens and weights.

    Attributes:
        activations: relative error from rounding tokens and hidden values, the weights taken as
            they are stored; a range, as too good is as wrong as too bad.
        layer: the same with the weights' own rounding, against the float matrices.
        gain: slope of y against exact y, of activations alone.
        layer_gain: with the weights' rounding.
    """

    activations: tuple[float, float]
    layer: tuple[float, float]
    gain: float = 1.0
    layer_gain: float = 1.0


ACCURACY = {
    # Rounding to BF16 (rms 0.0017): gate and up, hidden value, output of each expert. The float
    # matrices are BF16 already.
    "bf16": Accuracy((0.003, 0.005), (0.003, 0.005)),
    # E4M3 has 3 mantissa bits (rms 0.027): the token's in gate and in up, the hidden value's;
    # 0.027 * sqrt(3) = 0.046. Three matrices round alike: * sqrt(2).
    "mxfp8": Accuracy((0.043, 0.051), (0.060, 0.072)),
    "fp8_block": Accuracy((0.040, 0.048), (0.059, 0.071)),
    # As mxfp8, and E2M1 weights under a power of two (rms 0.115) in three matrices: 0.2. Such a
    # cast alone has gain 0.990 on normal values (nearest of few values pulls in): 0.990^3.
    "mxfp4": Accuracy((0.043, 0.051), (0.18, 0.22), layer_gain=0.970),
    "mxfp4_block": Accuracy((0.043, 0.051), (0.18, 0.22), layer_gain=0.970),
    # Activations as bf16, weights as mxfp4.
    "mxfp4_bf16": Accuracy((0.003, 0.005), (0.18, 0.22), layer_gain=0.970),
    # As mxfp8 with weights as of nvfp4, rounded to E4M3 once more.
    "nvfp4_block": Accuracy((0.043, 0.051), (0.15, 0.19), layer_gain=0.976),
    # E2M1 under an E4M3 scale has rms 0.095 and gain 0.9955: the largest of a block saturates where
    # its scale rounds down. Three such casts are activations, three more weights.
    "nvfp4": Accuracy((0.15, 0.18), (0.21, 0.25), gain=0.9866, layer_gain=0.973),
}

GAIN = 0.01
"""Slopes are within this of the table's. A block scale that is dropped, applied twice, or rounded
without its values being quantised again shows here."""

ROUTING = 2e-6
"""Weights of a router, of the largest: some 16 float32 steps (2^-23) of exp, sums and quotients."""


class Gradient(NamedTuple):
    """Relative errors allowed of the gradients of x and of topk_weights."""

    x: float
    topk_weights: float


GRADIENTS = {
    # Straight-through slopes are those at rounded values: the activation's slope moves with gate
    # and up, and the gradients of gate and up are multiplied by each other's rounded values. So
    # they are as far off as the forward pass (ACCURACY.activations), the top-k weights' gradient
    # being the expert's output itself.
    "bf16": Gradient(0.005, 0.005),
    "mxfp4_bf16": Gradient(0.005, 0.005),
    "mxfp8": Gradient(0.055, 0.05),
    "mxfp4": Gradient(0.055, 0.05),
    "fp8_block": Gradient(0.055, 0.05),
    "mxfp4_block": Gradient(0.055, 0.05),
    "nvfp4_block": Gradient(0.055, 0.05),
    # The top-k weights' includes the second cast, x's only the first.
    "nvfp4": Gradient(0.14, 0.22),
}
"""mega_moe against plain float32 einsums with the dequantised weights, plain SwiGLU."""

GRADIENT_AGREEMENT = {
    # As AGREEMENT, and for x a last rounding to BF16, which a sum in another order may flip.
    "bf16": Gradient(2e-4, 2e-4),
    "mxfp4_bf16": Gradient(2e-4, 2e-4),
    "mxfp8": Gradient(5e-4, 5e-4),
    "mxfp4": Gradient(5e-4, 5e-4),
    "fp8_block": Gradient(5e-4, 5e-4),
    "mxfp4_block": Gradient(5e-4, 5e-4),
    "nvfp4_block": Gradient(1e-3, 1e-3),
    # `xla` rounds the cotangent of each expert's output to BF16 after the top-k weight: 2^-9.
    "nvfp4": Gradient(5e-3, 2e-3),
}
"""`xla` against `reference`, which JAX differentiates."""

GRADIENTS_OVER_RANKS = Gradient(1e-4, 1e-5)
"""Several ranks against one: sums in another order, and the last rounding to BF16."""

DIFFERENCES = 2e-3
"""Central differences of float32 sums with steps of 0.01: rounding 1e-4, curvature as much."""


class Printed(NamedTuple):
    """How far a printed number may be from the kept one, as `numpy.testing` takes it."""

    rtol: float
    atol: float


NOTEBOOKS = Printed(rtol=2e-2, atol=2e-2)
"""Numbers that a notebook prints against those in the file: errors in % with two decimals, which
vary as much where another machine sums in another order (see `AGREEMENT`), and counts."""

LOGITS = 0.02
"""Relative error of a two-layer decoder's logits in bfloat16 against transformers': both round
every sum of attention and experts to bfloat16, in another order."""

ATTENTION = 0.015
"""Relative error of the example's attention kernel against XLA's products: both round weights to
bfloat16, the kernel before they are divided by their sum, XLA the scores too."""

EMULATED_SM90_SHARE = 2e-4
"""Largest share of the SM90 mega kernel's output that may differ from an H200's on the emulator:
3 of 67,584 values did, where the GPU's approximations (2 ulp) fell on the other side of a rounding.
"""
