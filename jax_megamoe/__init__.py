"""DeepGEMM's MegaMoE kernels as a JAX op.

`MegaMoE`, the layer, is imported on first use: it is the only name that needs Flax.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jax_megamoe.config import Activation as Activation
from jax_megamoe.config import MoEConfig as MoEConfig
from jax_megamoe.eplb import ReplicaMap as ReplicaMap
from jax_megamoe.eplb import replica_map as replica_map
from jax_megamoe.formats import BF16 as BF16
from jax_megamoe.formats import FP8_BLOCK as FP8_BLOCK
from jax_megamoe.formats import MXFP4 as MXFP4
from jax_megamoe.formats import MXFP8 as MXFP8
from jax_megamoe.formats import NVFP4 as NVFP4
from jax_megamoe.formats import WEIGHT_FORMATS as WEIGHT_FORMATS
from jax_megamoe.formats import WeightFormat as WeightFormat
from jax_megamoe.op import mega_moe as mega_moe
from jax_megamoe.reference import einsum_moe as einsum_moe
from jax_megamoe.weights.experts import dequantize_experts as dequantize_experts
from jax_megamoe.weights.experts import quantize_experts as quantize_experts
from jax_megamoe.weights.params import ExpertWeights as ExpertWeights

if TYPE_CHECKING:
    from jax_megamoe.layer import MegaMoE as MegaMoE


def __getattr__(name: str) -> Any:
    if name != "MegaMoE":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("jax_megamoe.layer").MegaMoE


def __dir__() -> list[str]:
    return sorted([*globals(), "MegaMoE"])
