"""What the demo found for a format, and what errors it allows."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Bounds(NamedTuple):
    """Largest relative errors (Euclidean norm of the difference over the wanted's) allowed.

    Attributes:
        exact: against the float32 layer on the checkpoint's own weights: all the rounding there is.
        einsum: against `einsum_moe` on the same quantised weights: it rounds the same and sums in
            another order.
    """

    exact: float
    einsum: float


BOUNDS = {
    "mxfp4": Bounds(0.25, 1e-3),
    "mxfp8": Bounds(0.078, 1e-3),
    "nvfp4": Bounds(0.27, 4e-3),
    "bf16": Bounds(0.005, 1e-3),
    "fp8_block": Bounds(0.076, 1e-3),
}
"""By format: somewhat above tests/tolerances.py, which says where the sizes come from. Sizes of the
layer are the user's here: few values vary more, and the longer a sum, the more often its order tips
a rounding."""


@dataclass(frozen=True)
class FormatResult:
    """What one format gave.

    Attributes:
        form: its name.
        parameter_bytes: bytes of the layer's parameters, scales included.
        error_exact: relative error against the float32 layer on the checkpoint's weights.
        error_einsum: relative error against `einsum_moe` on the same quantised weights.
        tokens_per_second: tokens of all ranks over the median time of a call.
        counts: [E], tokens that each expert got.
    """

    form: str
    parameter_bytes: int
    error_exact: float
    error_einsum: float
    tokens_per_second: float
    counts: np.ndarray

    @property
    def within_bounds(self) -> bool:
        """Whether both errors are allowed; NaN is not."""
        bounds = BOUNDS[self.form]
        return self.error_exact <= bounds.exact and self.error_einsum <= bounds.einsum
