"""Formats of weights and of activations, and the recipes: which meet in one layer.

Plain data: dtype names are strings, so that `plan/` can read the tables without importing JAX.
A kernel family (`plan/families/`) names the recipe that it runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from jax_megamoe import _checks

ScaleKind = Literal["none", "ue8m0", "e4m3", "float32"]

INTERLEAVE_8 = "interleave8"
"""Gate and up rows alternate by 8: every kernel but sgl's NVFP4."""
FLASHINFER_MXFP4 = "flashinfer_mxfp4"
"""FlashInfer's SM90 kernels, MXFP4: rows as in interleave8, codes and scales in one array."""
FLASHINFER_NVFP4 = "flashinfer_nvfp4"
"""The same for NVFP4."""
SGL_FP4 = "sgl_fp4"
"""Row order of sgl's NVFP4 kernel."""
GROUPED_BF16 = "humming_bf16"
"""Humming's grouped products with BF16 activations."""
GROUPED_FP8 = "humming_fp8"
"""Humming's grouped products with FP8 activations."""
GROUPED_LAYOUTS = MappingProxyType(
    {
        GROUPED_BF16: ("mxfp4", "mxfp8", "nvfp4", "fp8_block"),
        GROUPED_FP8: ("mxfp4", "fp8_block"),
    }
)
"""Layouts of the grouped products' weights, and the weight formats that they have."""

GROUPED_ROWS = 256
"""Rows of a matrix are padded to a multiple of this for the grouped products."""


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
    """How the expert weights are stored.

    Attributes:
        name: the key in `WEIGHT_FORMATS`.
        weight: storage of a routed expert's matrices.
    """

    name: str
    weight: WeightSpec

    def __repr__(self) -> str:
        return f"<WeightFormat {self.name}>"


@dataclass(frozen=True, repr=False)
class ActivationFormat:
    """The format of dispatched tokens and of the second matmul's input.

    Attributes:
        name: the key in `ACTIVATION_FORMATS`.
        storage: dtype name of the stored values; uint8 holds two FP4 values.
        values_per_element: values in one stored element.
        scale: what a block scale is.
        block: values along a row that share a scale; 0 without scales.
        has_global_scale: above the block scales a token has a float32 scale of its own, and all
            second inputs have one, w2_input_scale (NVFP4).

    Source: as of `WeightSpec`; `fp8_block` is DeepSeek-V3's 1x128 with a float32 scale.
    """

    name: str
    storage: str
    values_per_element: int
    scale: ScaleKind
    block: int
    has_global_scale: bool = False

    def __repr__(self) -> str:
        return f"<ActivationFormat {self.name}>"


@dataclass(frozen=True)
class Rounding:
    """Where between the formats a kernel rounds: kernels of one recipe may differ in it.

    Attributes:
        weighs_in_combine: the top-k weight multiplies in the combine, after all rounding, rather
            than before the second matmul's input is quantised.
        rounds_gate_up: gate, up and the clamp are rounded to BF16 before the activation.
        floors_scales: NVFP4 block scales do not go below the smallest E4M3 number, and tokens are
            divided by their scales; else blocks far below their token vanish, and tokens are
            multiplied by reciprocals. No other format has the choice.
        power_of_two_scales: second inputs in fp8_block have the scale that is the power of two
            next above amax / 448; else amax / 448 itself. No other format has the choice.
    """

    weighs_in_combine: bool = False
    rounds_gate_up: bool = True
    floors_scales: bool = True
    power_of_two_scales: bool = False


@dataclass(frozen=True, repr=False)
class Recipe:
    """A weight format with an activation format, and the rules of a layer that has both.

    Attributes:
        name: the key in `RECIPES`.
        weights: how the routed experts are stored.
        activations: how tokens and second inputs are quantised.
        functions: names of the gated activations that kernels of the recipe have.
        shared_formats: recipes that a fused shared expert may have, by name, the default first;
            empty: never fused.
        rounding: of `xla` and `reference` where no kernel's own is asked for.
    """

    name: str
    weights: WeightFormat
    activations: ActivationFormat
    functions: tuple[str, ...] = ("swiglu",)
    shared_formats: tuple[str, ...] = ()
    rounding: Rounding = Rounding()

    def __repr__(self) -> str:
        return f"<Recipe {self.name}>"


MXFP4 = WeightFormat("mxfp4", WeightSpec("uint8", 2, "ue8m0", (1, 32)))
MXFP8 = WeightFormat("mxfp8", WeightSpec("float8_e4m3fn", 1, "ue8m0", (1, 32)))
NVFP4 = WeightFormat("nvfp4", WeightSpec("uint8", 2, "e4m3", (1, 16), has_global_scale=True))
BF16 = WeightFormat("bf16", WeightSpec("bfloat16", 1, "none", (0, 0)))
FP8_BLOCK = WeightFormat("fp8_block", WeightSpec("float8_e4m3fn", 1, "float32", (128, 128)))

WEIGHT_FORMATS: Mapping[str, WeightFormat] = MappingProxyType(
    {f.name: f for f in (MXFP4, MXFP8, NVFP4, BF16, FP8_BLOCK)}
)
"""Every weight format by name."""

_MXFP8_ACTIVATIONS = ActivationFormat("mxfp8", "float8_e4m3fn", 1, "ue8m0", 32)
_NVFP4_ACTIVATIONS = ActivationFormat("nvfp4", "uint8", 2, "e4m3", 16, has_global_scale=True)
_BF16_ACTIVATIONS = ActivationFormat("bf16", "bfloat16", 1, "none", 0)
_FP8_ACTIVATIONS = ActivationFormat("fp8_block", "float8_e4m3fn", 1, "float32", 128)

ACTIVATION_FORMATS: Mapping[str, ActivationFormat] = MappingProxyType(
    {
        f.name: f
        for f in (_MXFP8_ACTIVATIONS, _NVFP4_ACTIVATIONS, _BF16_ACTIVATIONS, _FP8_ACTIVATIONS)
    }
)
"""Every activation format by name."""

_FLASHINFER = Rounding(rounds_gate_up=False, power_of_two_scales=True)

_RECIPES = (
    Recipe("mxfp4", MXFP4, _MXFP8_ACTIVATIONS, ("swiglu", "situ"), ("mxfp8",)),
    Recipe("mxfp8", MXFP8, _MXFP8_ACTIVATIONS, ("swiglu", "situ"), ("mxfp8",)),
    Recipe(
        "nvfp4",
        NVFP4,
        _NVFP4_ACTIVATIONS,
        shared_formats=("mxfp8", "bf16"),
        rounding=Rounding(weighs_in_combine=True),
    ),
    Recipe("bf16", BF16, _BF16_ACTIVATIONS, shared_formats=("bf16",)),
    Recipe("fp8_block", FP8_BLOCK, _FP8_ACTIVATIONS, rounding=Rounding(rounds_gate_up=False)),
    Recipe("mxfp4_block", MXFP4, _FP8_ACTIVATIONS, rounding=_FLASHINFER),
    Recipe("nvfp4_block", NVFP4, _FP8_ACTIVATIONS, rounding=_FLASHINFER),
    # As GPT-OSS's model: outputs are weighed, tokens stay BF16.
    Recipe(
        "mxfp4_bf16",
        MXFP4,
        _BF16_ACTIVATIONS,
        ("swiglu", "situ"),
        rounding=Rounding(weighs_in_combine=True),
    ),
)

RECIPES: Mapping[str, Recipe] = MappingProxyType({recipe.name: recipe for recipe in _RECIPES})
"""Every recipe by name. One named as a weight format is that format's default."""


def as_weight_format(value: "str | WeightFormat", argument: str = "weight_format") -> WeightFormat:
    """The format of that name; a `WeightFormat` passes through.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    if isinstance(value, WeightFormat):
        return value
    _checks.one_of(argument, value, WEIGHT_FORMATS)
    return WEIGHT_FORMATS[value]


def recipe_of(weights: WeightFormat, activations: ActivationFormat | None = None) -> Recipe:
    """The recipe of a pair; activations None: the default of the weight format.

    Raises:
        ValueError: no recipe has the pair; the message lists the weight format's.
    """
    if activations is None:
        return RECIPES[weights.name]
    known = {recipe.activations.name: recipe for recipe in _RECIPES if recipe.weights == weights}
    if activations.name not in known:
        argument = f"activation_format of {weights.name} weights"
        raise ValueError(_checks.message(argument, f"one of {[*known]}", activations.name))
    return known[activations.name]
