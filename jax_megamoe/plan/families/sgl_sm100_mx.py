"""The sgl source's SM100 kernel for MXFP4 and MXFP8 weights."""

from jax_megamoe.plan.families.sgl_sm100 import (
    MX_TRAITS,
    SOURCE,
    activation_name,
    scaled_launch,
    staging_launch,
)
from jax_megamoe.plan.sm100_family import Sm100Family

FAMILY = Sm100Family(
    name="sgl_sm100_mx",
    source=SOURCE,
    recipes=("mxfp4", "mxfp8"),
    traits=MX_TRAITS,
    mega_launch=scaled_launch,
    own_staging=staging_launch,
    activation_name=activation_name,
)
