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
    # A BF16 step is 2^-8, of one value in some 4 * 128 of a token.
    "bf16": Agreement(norm=2e-4, token=1e-3),
    # An E4M3 step is 2^-3.
    "mxfp8": Agreement(norm=5e-4, token=6e-3),
    "mxfp4": Agreement(norm=5e-4, token=6e-3),
    "fp8_block": Agreement(norm=5e-4, token=6e-3),
    # An E2M1 step is up to 1/2; and `xla` scales the sum where `reference` scales the weights,
    # which rounds twice more.
    "nvfp4": Agreement(norm=2e-3, token=2.5e-2),
}
"""Any implementation against `reference`, and `reference` against the NumPy oracle."""


class Accuracy(NamedTuple):
    """Relative error of the layer, a range: too good is as wrong as too bad.

    Attributes:
        activations: from rounding tokens and hidden values, the weights taken as they are.
        layer: with the weights' own rounding, against the float matrices.
    """

    activations: tuple[float, float]
    layer: tuple[float, float]


ACCURACY = {
    # Rounding to BF16 (relative rms 0.0017): gate and up, hidden value, output of each expert.
    "bf16": Accuracy((0.003, 0.005), (0.003, 0.005)),
    # E4M3 has 3 mantissa bits (rms 0.026): tokens move gate and up, then the hidden values round;
    # 0.026 * sqrt(3) = 0.045. The weights' rounding is as large again.
    "mxfp8": Accuracy((0.040, 0.055), (0.058, 0.078)),
    "fp8_block": Accuracy((0.038, 0.052), (0.056, 0.076)),
    # As mxfp8; E2M1 weights under a power of two (rms 0.12) in all three matrices.
    "mxfp4": Accuracy((0.040, 0.055), (0.18, 0.25)),
    # E2M1 under a finer scale (rms 0.095) for tokens and hidden values: 0.095 * sqrt(3) = 0.165.
    "nvfp4": Accuracy((0.145, 0.185), (0.20, 0.27)),
}
"""The layer against exact arithmetic, plain SwiGLU on normal tokens and weights."""

GAIN = 0.01
"""The slope of y against exact y is 1 within this, in every format: rounding to nearest does not
shrink or stretch on average; a block scale that is applied once too often or dropped does."""
