"""A layer over the GPUs of a host, what a call of it moves and computes, and what GPUs can do."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import unfused
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

import jax_megamoe as mm
from jax_megamoe.cli.gpu.contenders import grouped_layout, random_matrices, random_weights
from jax_megamoe.cli.gpu.routings import routing
from jax_megamoe.weights.drawn import random_experts

Json = dict[str, Any]

AXIS = "ep"


class Layer:
    """A shape over a mesh."""

    def __init__(self, name: str, config: mm.MoEConfig, mesh: Mesh) -> None:
        self.name, self.config, self.mesh = name, config, mesh
        self.num_ranks = mesh.size
        self.local_experts = config.experts_per_rank(mesh.size)

    def drawn(self, draw: Callable[[Array], Any]) -> Any:
        """What `draw` makes of a key of each rank, made where it stays."""

        def one_rank(key: Array) -> Any:
            return draw(jax.random.fold_in(key, lax.axis_index(AXIS)))

        make = jax.shard_map(one_rank, mesh=self.mesh, in_specs=P(), out_specs=P(AXIS))
        return jax.block_until_ready(jax.jit(make)(jax.random.key(0)))

    def parameters(self) -> mm.ExpertWeights:
        """Random parameters."""
        part = replace(self.config, num_experts=self.local_experts)
        return self.drawn(partial(random_experts, part))

    def grouped_parameters(self) -> mm.ExpertWeights:
        """Random parameters in the layout that grouped products read."""
        part = replace(self.config, num_experts=self.local_experts)
        return self.drawn(partial(random_weights, part, grouped_layout(part)))

    def matrices(self) -> tuple[Array, Array]:
        """Random bfloat16 matrices for `unfused`."""
        return self.drawn(partial(random_matrices, self.config, self.local_experts))

    def tokens(self, num_tokens: int, num_layers: int) -> tuple[Array, Array, Array]:
        """x [n T, H], and ids and top-k weights [layers, n T, K], split over the ranks."""
        rows = self.num_ranks * num_tokens
        key = jax.random.key(num_tokens)
        x = jax.random.normal(key, (rows, self.config.hidden_size), jnp.bfloat16)
        ids, factors = routing(self.config, rows, key, (num_layers,))
        by_row, by_layer = (NamedSharding(self.mesh, spec) for spec in (P(AXIS), P(None, AXIS)))
        return jax.device_put((x, ids, factors), (by_row, by_layer, by_layer))

    def repeated(self, call: Callable[..., Array]) -> Callable[..., Array]:
        """f(x, ids, factors, parameters): `call` once for each routing; y of the last."""

        def layers(x: Array, ids: Array, factors: Array, parameters: Any) -> Array:
            def one(_: Array, routing: tuple[Array, Array]) -> tuple[Array, None]:
                return call(x, *routing, parameters), None

            return lax.scan(one, x, (ids, factors))[0]

        specs = (P(AXIS), P(None, AXIS), P(None, AXIS), P(AXIS))
        return jax.jit(jax.shard_map(layers, mesh=self.mesh, in_specs=specs, out_specs=P(AXIS)))

    def fused(self, implementation: str) -> Callable[..., Array]:
        """`mega_moe` on one rank's part, as f(x, ids, factors, weights)."""
        options = dict(config=self.config, mesh=self.mesh, axis=AXIS)
        return partial(mm.mega_moe, **options, implementation=implementation)

    def ragged(self) -> Callable[..., Array]:
        """`unfused.layer` likewise."""
        return partial(unfused.layer, axis=AXIS, num_ranks=self.num_ranks)


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """Median of blocking calls, after one that may compile."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def link_rates(mesh: Mesh, num_bytes: int) -> Json:
    """Bytes a second that enter a GPU from another, in this run.

    Args:
        mesh: the GPUs.
        num_bytes: to send from each.
    """
    ring = [(rank, (rank + 1) % mesh.size) for rank in range(mesh.size)]
    pass_on = jax.shard_map(
        lambda a: lax.ppermute(a, AXIS, ring), mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)
    )
    draw = partial(jax.random.bits, jax.random.key(0), (mesh.size, num_bytes), jnp.uint8)
    spread = jax.jit(draw, out_shardings=NamedSharding(mesh, P(AXIS)))()
    put = partial(jax.device_put, spread.addressable_shards[0].data, mesh.devices[1])
    return {
        "device_put_bytes_per_second": num_bytes / seconds(put, 5),
        "ppermute_bytes_per_second": num_bytes / seconds(partial(jax.jit(pass_on), spread), 5),
    }


def expert_bytes(config: mm.MoEConfig) -> float:
    """Bytes of an expert's parameters as stored."""
    made = jax.eval_shape(partial(random_experts, config), jax.random.key(0))
    return made.num_bytes / config.num_experts


def work(layer: Layer, ids: Array) -> Json:
    """What a call of the busiest rank moves and computes, in the mean over routings.

    Weights are counted as they are stored, with their scales. A token is fetched once for each of
    its slots on another rank, in E4M3 with float32 scales, and comes back in bfloat16; these are
    the bytes that enter a rank from others.
    """
    hidden, all_ranks = layer.config.hidden_size, range(layer.num_ranks)
    matrices = 3 * hidden * layer.config.intermediate_size
    there, back = hidden + 4 * hidden // 128, 2 * hidden
    routed = np.asarray(ids)
    owner = np.arange(routed.shape[1]) // (routed.shape[1] // layer.num_ranks)
    weights, rows, entering = [], [], []
    for one in routed:
        rank = one // layer.local_experts
        away = rank != owner[:, None]
        here = [rank == r for r in all_ranks]
        weights.append(max(len(np.unique(one[mine])) for mine in here))
        rows.append(max(np.count_nonzero(mine) for mine in here))
        entering.append(
            max(
                there * np.count_nonzero(away & here[r]) + back * np.count_nonzero(away[owner == r])
                for r in all_ranks
            )
        )
    return {
        "weight_bytes": float(np.mean(weights)) * expert_bytes(layer.config),
        "flops": 2 * matrices * float(np.mean(rows)),
        "link_bytes": float(np.mean(entering)),
    }
