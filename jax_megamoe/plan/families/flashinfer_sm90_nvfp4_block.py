"""The flashinfer source's NVFP4 kernel: E2M1 weights under E4M3 scales, E4M3 tokens per 128."""

from jax_megamoe.formats import FLASHINFER_NVFP4
from jax_megamoe.plan.families.flashinfer_sm90 import FlashInferFamily

FAMILY = FlashInferFamily(
    kind="nvfp4",
    name="flashinfer_sm90_nvfp4_block",
    recipes=("nvfp4_block",),
    w13_layout=FLASHINFER_NVFP4,
)
