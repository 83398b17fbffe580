"""All 43 layers of V4-Flash's experts in 4 bits over the GPUs of a host, in one jitted scan.

    PYTHONPATH=.:benchmarks/gpu python benchmarks/gpu/whole_model.py [--layers N]

One process, a rank on each GPU; some 75 GB of mxfp4_block parameters on each of two, which in FP8
would be 280 GB and not fit. Codes and scales are random bytes. Each layer reads the residual stream
of the one before and its own random routing. Prints and writes $OUT/whole_model.json: microseconds
a layer, the bytes that JAX holds on a GPU, and the share of the copy rate at which weights are
read.
"""

import argparse
import faulthandler
import json
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.88")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import driver
import jax
import jax.numpy as jnp
import numpy as np
import workload
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

import jax_megamoe as mm
from jax_megamoe.cli.gpu.routings import routing
from jax_megamoe.plan import plan_mega_moe
from jax_megamoe.runtime.devices import device_spec
from jax_megamoe.weights.drawn import random_experts
from jax_megamoe.weights.flashinfer_layout import TILE_BYTES
from jax_megamoe.weights.params import ExpertWeights, parameter_shapes

AXIS, LAYERS, MAX_TOKENS = "ep", 43, 128
TOKENS = (1, 8, 32, 64, 128)
CODE_BYTES = 8192
SECONDS = 300
SMALL = dict(num_experts=16, top_k=4, hidden_size=512, intermediate_size=256)

Json = dict[str, Any]


def random_layers(cfg: mm.MoEConfig, mesh: Mesh, num_layers: int) -> ExpertWeights:
    """Stacked parameters [layers, E, ...]: random codes under scales 2^-4 to 2^-1, and factors
    that make a matrix of variance 1 / fan-in of them. Drawn a layer at a time, in place."""
    shapes = parameter_shapes(cfg).routed
    specs = P(None, AXIS)
    place = partial(jax.shard_map, mesh=mesh, out_specs=specs)

    def tiles(key: Array, shape: tuple[int, ...]) -> Array:
        drawn = jax.random.bits(key, (*shape[:-1], TILE_BYTES // 4), jnp.uint32)
        octets = lax.bitcast_convert_type(drawn, jnp.uint8).reshape(shape)
        is_code = jnp.arange(TILE_BYTES) < CODE_BYTES
        return jnp.where(is_code, octets, 123 + octets % 4)

    def stacked(key: Array, shape: tuple[int, ...]) -> Array:
        def step(layer: Array, into: Array) -> Array:
            one = tiles(jax.random.fold_in(key, layer), shape)
            return lax.dynamic_update_index_in_dim(into, one, layer, 0)

        key = jax.random.fold_in(key, lax.axis_index(AXIS))
        empty = lax.pcast(jnp.zeros((num_layers, *shape), jnp.uint8), AXIS, to="varying")
        return lax.fori_loop(0, num_layers, step, empty)

    local = cfg.experts_per_rank(mesh.size)
    made: dict[str, Any] = {}
    for index, (name, fan_in) in enumerate(
        (("w13_weight", cfg.hidden_size), ("w2_weight", cfg.intermediate_size))
    ):
        shape = (local, *getattr(shapes, name).shape[1:])
        draw = jax.jit(place(partial(stacked, shape=shape), in_specs=P()))
        made[name] = jax.block_until_ready(draw(jax.random.key(index)))
        # Codes have a mean square of 9.1, these scales of 2^-3.6.
        factor = np.float32((fan_in * 9.1 * 0.083) ** -0.5)
        fill = jax.jit(
            place(
                lambda: lax.pcast(jnp.full((num_layers, local), factor), AXIS, to="varying"),
                in_specs=(),
            )
        )
        made[f"{name}_scale_2"] = fill()
    like = jax.eval_shape(partial(random_experts, cfg), jax.random.key(0))
    return like.with_routed(**made)


def model(cfg: mm.MoEConfig, mesh: Mesh) -> Any:
    """f(x, ids, factors, parameters): every layer once; the residual stream after the last."""

    def layers(x: Array, ids: Array, factors: Array, parameters: ExpertWeights) -> Array:
        def one(x: Array, layer: Any) -> tuple[Array, None]:
            routing, weights = layer
            y = mm.mega_moe(
                x, *routing, weights, config=cfg, mesh=mesh, axis=AXIS, implementation="deep_gemm"
            )
            return x + y / jnp.bfloat16(8), None

        return lax.scan(one, x, ((ids, factors), parameters))[0]

    stack = P(None, AXIS)
    return jax.jit(
        jax.shard_map(layers, mesh=mesh, in_specs=(P(AXIS), stack, stack, stack), out_specs=P(AXIS))
    )


def measure(cfg: mm.MoEConfig, mesh: Mesh, parameters: ExpertWeights, num_tokens: int) -> Json:
    """Microseconds of a layer and the bytes of the experts that a rank reads for it."""
    num_layers = parameters.routed.w13_weight.shape[0]
    rows = num_tokens * mesh.size
    key = jax.random.key(num_tokens)
    x = jax.random.normal(key, (rows, cfg.hidden_size), jnp.bfloat16)
    ids, factors = routing(cfg, rows, key, (num_layers,))
    run = partial(model(cfg, mesh), x, ids, factors, parameters)
    y = np.asarray(jax.block_until_ready(run()), np.float32)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    local = cfg.experts_per_rank(mesh.size)
    used = [
        max(len(np.unique(one[one // local == rank])) for rank in range(mesh.size))
        for one in np.asarray(ids)
    ]
    taken = statistics.median(times) / num_layers * 1e6
    per_expert = parameters.num_bytes / num_layers / cfg.num_experts
    return {
        "tokens": num_tokens,
        "us_per_layer": taken,
        "finite": bool(np.isfinite(y).all()),
        "repeats_bits": bool((y == np.asarray(run(), np.float32)).all()),
        "weight_bytes_per_second": float(np.mean(used)) * per_expert / taken * 1e6,
        "bytes_in_use": (mesh.devices[0].memory_stats() or {}).get("bytes_in_use"),
        "peak_bytes_in_use": (mesh.devices[0].memory_stats() or {}).get("peak_bytes_in_use"),
    }


def main() -> None:
    """Draws the parameters and measures."""
    parser = argparse.ArgumentParser(description="43 layers of 4-bit experts.")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--ranks", type=int, default=0, help="GPUs to use; all by default")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU, to try the script")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    sizes = SMALL if options.small else workload.SHAPES["v4_flash"]
    cfg = mm.MoEConfig(
        **sizes,
        max_num_tokens=MAX_TOKENS,
        weight_format="mxfp4_block",
        activation=mm.Activation("swiglu", clamp=10.0),
    )
    devices = jax.devices()[: options.ranks or None]
    mesh = Mesh(np.array(devices), (AXIS,))
    result: Json = {"ranks": mesh.size, "layers": options.layers, "jax": jax.__version__}
    plans = [plan_mega_moe(cfg, device_spec(devices[0]), count, mesh.size) for count in TOKENS]
    print(workload.compile_kernels(plans), flush=True)
    driver.use_device()
    result["copy_bytes_per_second"] = driver.copy_rate()
    mm.allocate_buffers(cfg, mesh=mesh, axis=AXIS)
    result["buffer_bytes"] = plans[0].buffer.num_bytes
    start = time.perf_counter()
    parameters = random_layers(cfg, mesh, options.layers)
    result["parameter_bytes"] = parameters.num_bytes
    result["fp8_bytes"] = 3 * cfg.hidden_size * cfg.intermediate_size * cfg.num_experts
    result["fp8_bytes"] *= options.layers
    print(f"{parameters.num_bytes / 1e9:.1f} GB drawn in {time.perf_counter() - start:.1f} s")
    result["rows"] = []
    out = Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="whole_model_"))
    for count in TOKENS:
        row = measure(cfg, mesh, parameters, count)
        row["of_copy"] = row["weight_bytes_per_second"] / result["copy_bytes_per_second"]
        result["rows"].append(row)
        print(json.dumps(row), flush=True)
        (out / "whole_model.json").write_text(json.dumps(result, indent=1))
    right = all(row["finite"] and row["repeats_bits"] for row in result["rows"])
    print("checks passed" if right else "FAILED: an output is not finite or does not repeat")
    raise SystemExit(not right)


if __name__ == "__main__":
    main()
