"""DeepGEMM's MegaMoE kernels as a JAX op.

`MegaMoE`, which needs Flax, and the names that read and write checkpoints are imported on first
use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jax_megamoe.config import Activation as Activation
from jax_megamoe.config import ExpertSpec as ExpertSpec
from jax_megamoe.config import MoEConfig as MoEConfig
from jax_megamoe.formats import ACTIVATION_FORMATS as ACTIVATION_FORMATS
from jax_megamoe.formats import BF16 as BF16
from jax_megamoe.formats import FP8_BLOCK as FP8_BLOCK
from jax_megamoe.formats import GROUPED_BF16 as GROUPED_BF16
from jax_megamoe.formats import GROUPED_FP8 as GROUPED_FP8
from jax_megamoe.formats import GROUPED_LAYOUTS as GROUPED_LAYOUTS
from jax_megamoe.formats import MXFP4 as MXFP4
from jax_megamoe.formats import MXFP8 as MXFP8
from jax_megamoe.formats import NVFP4 as NVFP4
from jax_megamoe.formats import RECIPES as RECIPES
from jax_megamoe.formats import WEIGHT_FORMATS as WEIGHT_FORMATS
from jax_megamoe.formats import ActivationFormat as ActivationFormat
from jax_megamoe.formats import Recipe as Recipe
from jax_megamoe.formats import WeightFormat as WeightFormat
from jax_megamoe.launch.deep_gemm import allocate_buffers as allocate_buffers
from jax_megamoe.launch.folding_cost import FoldingCost as FoldingCost
from jax_megamoe.launch.folding_cost import folding_cost as folding_cost
from jax_megamoe.launch.runnable import check_supported as check_supported
from jax_megamoe.op.exporting import register as _register_pytrees
from jax_megamoe.op.mega_moe import mega_moe as mega_moe
from jax_megamoe.op.reference import einsum_moe as einsum_moe
from jax_megamoe.routing.rebalance import imbalance as imbalance
from jax_megamoe.routing.rebalance import rank_loads as rank_loads
from jax_megamoe.routing.rebalance import rebalance as rebalance
from jax_megamoe.routing.rebalance import record_loads as record_loads
from jax_megamoe.routing.rebalance import solve_placement as solve_placement
from jax_megamoe.routing.replicas import ReplicaMap as ReplicaMap
from jax_megamoe.routing.replicas import replica_map as replica_map
from jax_megamoe.routing.router import Router as Router
from jax_megamoe.routing.router import RouterParams as RouterParams
from jax_megamoe.routing.router import Routing as Routing
from jax_megamoe.routing.router import route as route
from jax_megamoe.routing.stats import MoEStats as MoEStats
from jax_megamoe.routing.stats import capture_routing as capture_routing
from jax_megamoe.routing.stats import moe_stats as moe_stats
from jax_megamoe.weights.experts import dequantize_experts as dequantize_experts
from jax_megamoe.weights.experts import quantize_experts as quantize_experts
from jax_megamoe.weights.folded_biases import fold_biases as fold_biases
from jax_megamoe.weights.folded_biases import unfold_biases as unfold_biases
from jax_megamoe.weights.params import ExpertMatrices as ExpertMatrices
from jax_megamoe.weights.params import ExpertWeights as ExpertWeights
from jax_megamoe.weights.relayout import to_layout as to_layout

__version__ = "0.1.0"

_register_pytrees()

if TYPE_CHECKING:
    from jax_megamoe.nn.block import MegaMoEBlock as MegaMoEBlock
    from jax_megamoe.nn.layer import MegaMoE as MegaMoE
    from jax_megamoe.nn.variables import ExpertVariable as ExpertVariable
    from jax_megamoe.weights.checkpoint.convert import convert_checkpoint as convert_checkpoint
    from jax_megamoe.weights.checkpoint.converted import load_converted as load_converted
    from jax_megamoe.weights.checkpoint.converted import save_experts as save_experts
    from jax_megamoe.weights.checkpoint.load import load_experts as load_experts
    from jax_megamoe.weights.checkpoint.load import reload_experts as reload_experts
    from jax_megamoe.weights.checkpoint.select import select_format as select_format

_ON_FIRST_USE = {
    "ExpertVariable": "nn.variables",
    "MegaMoE": "nn.layer",
    "MegaMoEBlock": "nn.block",
    "convert_checkpoint": "weights.checkpoint.convert",
    "load_converted": "weights.checkpoint.converted",
    "load_experts": "weights.checkpoint.load",
    "reload_experts": "weights.checkpoint.load",
    "save_experts": "weights.checkpoint.converted",
    "select_format": "weights.checkpoint.select",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"jax_megamoe.{_ON_FIRST_USE[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_ON_FIRST_USE])
