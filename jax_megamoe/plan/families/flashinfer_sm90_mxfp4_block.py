"""The flashinfer source's MXFP4 kernel: E2M1 weights under UE8M0 scales, E4M3 tokens per 128."""

from jax_megamoe.formats import FLASHINFER_MXFP4
from jax_megamoe.plan.families.flashinfer_sm90 import FlashInferFamily

FAMILY = FlashInferFamily(
    kind="mxfp4",
    name="flashinfer_sm90_mxfp4_block",
    recipes=("mxfp4_block",),
    w13_layout=FLASHINFER_MXFP4,
)
