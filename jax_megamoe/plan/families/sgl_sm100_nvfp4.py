"""The sgl source's SM100 kernel for NVFP4 weights.

It reads w13 in a row order of its own, weighs before it quantises the second matmul's input, and
fuses a shared expert in NVFP4 alone, which the recipe does not have.
"""

from dataclasses import replace

from jax_megamoe.formats import SGL_FP4, Rounding
from jax_megamoe.plan.families.sgl_sm100 import (
    MX_TRAITS,
    PACKED_ACTIVATIONS,
    PACKED_WEIGHTS,
    SOURCE,
    activation_name,
    scaled_launch,
    staging_launch,
)
from jax_megamoe.plan.sm100_family import Sm100Family

FAMILY = Sm100Family(
    name="sgl_sm100_nvfp4",
    source=SOURCE,
    recipes=("nvfp4",),
    traits=replace(
        MX_TRAITS,
        activations=PACKED_ACTIVATIONS,
        scale_block=16,
        weights={"nvfp4": PACKED_WEIGHTS},
        shared={"nvfp4": PACKED_WEIGHTS},
        block_k=256,
        operand_bits=4,
        lookup_bytes=1024,
        intermediate_multiple=256,
        pulls_whole_rows=False,
        store_rows=(48, (40, 40)),
        staged_as="kNvfp4Sgl",
        activation_names=("swiglu", "swigluoai"),
    ),
    mega_launch=scaled_launch,
    own_staging=staging_launch,
    activation_name=activation_name,
    w13_layout=SGL_FP4,
    rounding=Rounding(floors_scales=False),
    factors="folded",
)
