"""Lets `jax.export` write down functions that take or return this package's pytrees.

A process that reads one imports jax_megamoe first. `xla` and `reference` run wherever JAX does, on
as many devices as the exported mesh had; on one, of a symbolic number of tokens too, if its
constraints keep it within max_num_tokens.

`deep_gemm`'s launch is bound to symmetric buffers and
machine code, so JAX refuses to export it, naming the target ``jax_megamoe_launch_graph``; where
``jax.export.DisabledSafetyCheck.custom_call`` lets it through, the process that calls it must have
called `allocate_buffers` for the same config and mesh, and have the kernel source: it says so if
not.
"""

import functools
import json
from typing import Any

from jax import export

from jax_megamoe.routing.replicas import ReplicaMap
from jax_megamoe.routing.stats import MoEStats
from jax_megamoe.weights.params import ExpertMatrices, ExpertWeights


def _encode(metadata: Any) -> bytes:
    return json.dumps(metadata).encode()


def _decode(data: bytes | bytearray) -> tuple[Any, ...]:
    return tuple(json.loads(data))


@functools.cache
def register() -> None:
    """Registers each pytree under its public name. Once a process, at import."""
    for tree in (ExpertMatrices, ExpertWeights, ReplicaMap, MoEStats):
        export.register_pytree_node_serialization(
            tree,
            serialized_name=f"jax_megamoe.{tree.__name__}",
            serialize_auxdata=_encode,
            deserialize_auxdata=_decode,
        )
