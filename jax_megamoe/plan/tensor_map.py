"""A tensor map (TMA descriptor) before the addresses are known.

Field names follow `cuTensorMapEncodeTiled`; the numbers are the driver's enumerations.
"""

from dataclasses import dataclass

from jax_megamoe.plan.operand import Operand

UINT8, INT32, FLOAT32, BFLOAT16 = 0, 3, 7, 9
PACKED_U4_ALIGN8, PACKED_U4_ALIGN16 = 13, 14
SWIZZLE_NONE, SWIZZLE_32B, SWIZZLE_64B, SWIZZLE_128B = 0, 1, 2, 3
L2_PROMOTION_NONE, L2_PROMOTION_256B = 0, 3


@dataclass(frozen=True)
class TensorMapSpec:
    """The arguments of `cuTensorMapEncodeTiled`, the base as an operand and an offset.

    Attributes:
        base: where the tensor starts.
        dtype: CUtensorMapDataType.
        dims: sizes in elements, innermost first.
        strides: bytes between neighbours in every dimension but the innermost.
        box: elements a copy moves, per dimension.
        swizzle: CUtensorMapSwizzle.
    """

    base: Operand
    dtype: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    interleave: int = 0
    l2_promotion: int = L2_PROMOTION_256B
    oob_fill: int = 0
