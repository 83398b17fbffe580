"""The weight formats: how a weight is stored and scaled, and what may be fused with it.

Plain data: dtype names are strings, so that `plan/` can read the table without importing JAX.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from jax_megamoe import _checks

ScaleKind = Literal["none", "ue8m0", "e4m3", "float32"]
Architecture = Literal["sm100", "sm90"]

INTERLEAVE_8 = "interleave8"
"""Gate and up rows alternate by 8: every kernel but sgl's NVFP4."""
SGL_FP4 = "sgl_fp4"
"""Row order of sgl's NVFP4 kernel."""


@dataclass(frozen=True)
class WeightSpec:
    """How one matrix [N, K] of an expert is stored.

    Attributes:
        storage: dtype name of the stored weight; uint8 holds two FP4 values.
        values_per_element: weights in one stored element (2 for FP4, even k in the low nibble).
        scale: what a block scale is: an exponent byte (UE8M0), an E4M3 byte, a float32, or nothing.
        block: values that share one scale, (rows of N, columns of K); (0, 0) without scales.
        has_global_scale: a float32 scale per expert and matrix multiplies the block scales (NVFP4).

    Source of the block sizes: OCP Microscaling Formats v1.0 (MXFP4, MXFP8: 1x32), NVIDIA's NVFP4
    (1x16), DeepSeek-V3 technical report section 3.3 (128x128).
    """

    storage: str
    values_per_element: int
    scale: ScaleKind
    block: tuple[int, int]
    has_global_scale: bool = False

    @property
    def bits(self) -> int:
        """Bits of one weight value, scales not counted."""
        return {"uint8": 8, "float8_e4m3fn": 8, "bfloat16": 16}[
            self.storage
        ] // self.values_per_element

    @property
    def packs_scales(self) -> bool:
        """Whether block scales are bytes, four of them along K in one int32 word."""
        return self.scale in ("ue8m0", "e4m3")


@dataclass(frozen=True, repr=False)
class WeightFormat:
    """A format of the expert weights, and of everything that follows from it.

    Attributes:
        name: the key in `WEIGHT_FORMATS`.
        weight: storage of a routed expert's matrices.
        activation_format: what tokens are quantised to before they are dispatched.
        shared_formats: precisions a fused shared expert may have, the default first; empty: never
            fused.
        activations: names of the activations that the format's kernels have.
        architecture: GPU family whose kernel runs the format.
        weighs_in_combine: the top-k weight multiplies in the combine (NVFP4) rather than before the
            second matmul.
    """

    name: str
    weight: WeightSpec
    activation_format: str
    shared_formats: tuple[str, ...]
    activations: tuple[str, ...]
    architecture: Architecture
    weighs_in_combine: bool = False

    def __repr__(self) -> str:
        return f"<WeightFormat {self.name}>"


MXFP4 = WeightFormat(
    "mxfp4",
    WeightSpec("uint8", 2, "ue8m0", (1, 32)),
    "mxfp8",
    ("mxfp8",),
    ("swiglu", "situ"),
    "sm100",
)
MXFP8 = WeightFormat(
    "mxfp8",
    WeightSpec("float8_e4m3fn", 1, "ue8m0", (1, 32)),
    "mxfp8",
    ("mxfp8",),
    ("swiglu", "situ"),
    "sm100",
)
NVFP4 = WeightFormat(
    "nvfp4",
    WeightSpec("uint8", 2, "e4m3", (1, 16), has_global_scale=True),
    "nvfp4",
    ("mxfp8", "bf16"),
    ("swiglu",),
    "sm100",
    weighs_in_combine=True,
)
BF16 = WeightFormat(
    "bf16", WeightSpec("bfloat16", 1, "none", (0, 0)), "bf16", ("bf16",), ("swiglu",), "sm100"
)
FP8_BLOCK = WeightFormat(
    "fp8_block",
    WeightSpec("float8_e4m3fn", 1, "float32", (128, 128)),
    "fp8_block",
    (),
    ("swiglu",),
    "sm90",
)

WEIGHT_FORMATS: Mapping[str, WeightFormat] = MappingProxyType(
    {f.name: f for f in (MXFP4, MXFP8, NVFP4, BF16, FP8_BLOCK)}
)
"""Every format by name."""


def as_weight_format(value: "str | WeightFormat", argument: str = "weight_format") -> WeightFormat:
    """The format of that name; a `WeightFormat` passes through.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    if isinstance(value, WeightFormat):
        return value
    _checks.one_of(argument, value, WEIGHT_FORMATS)
    return WEIGHT_FORMATS[value]
