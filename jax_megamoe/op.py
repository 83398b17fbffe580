"""`mega_moe`: check the arguments, choose an implementation, call it."""

import logging
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, BFloat16, Bool, Float32, Int32

from jax_megamoe import _checks, expert, reference, xla
from jax_megamoe.config import MoEConfig
from jax_megamoe.eplb import ReplicaMap
from jax_megamoe.staging import StagedTokens, stage
from jax_megamoe.weights.params import ExpertWeights, check_weights

Axis = str | tuple[str, ...]
IMPLEMENTATIONS = ("deep_gemm", "xla", "reference")

_log = logging.getLogger("jax_megamoe")
