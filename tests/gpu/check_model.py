"""Blocks, JAX's transformations and its caches with the fp8_block kernel, over all GPUs there are.

    PYTHONPATH=.:tests:tests/gpu:benchmarks/gpu python tests/gpu/check_model.py

A model of four `MegaMoEBlock`s decodes with changing numbers of real tokens; the kernels' results
are compared with xla's. Needs Flax. With ``--implementation xla`` the script runs without a GPU.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import jax
import jax.numpy as jnp
import numpy as np
from checks import OUT, Checks
from flax import nnx
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_megamoe as mm
from jax_megamoe.plan import plan_mega_moe
from jax_megamoe.runtime.devices import KNOWN_DEVICES

SCRIPT = "check_model"
LAYERS, STEPS, ROWS = 4, 32, 128
"""Rows on each rank."""
MODEL = dict(
    model_type="deepseek_v3",
    hidden_size=2048,
    moe_intermediate_size=768,
    n_routed_experts=32,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    n_shared_experts=1,
    num_hidden_layers=LAYERS,
)
SMALL = MODEL | dict(hidden_size=512, moe_intermediate_size=256)
HIT = "/jax/compilation_cache/cache_hits"


class Model(nnx.Module):
    """Blocks with a residual each."""

    def __init__(self, sizes: dict[str, Any], mesh: Mesh, how: str) -> None:
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List(
            [
                mm.MegaMoEBlock.from_config(
                    sizes,
                    mesh=mesh,
                    axis="ep",
                    max_num_tokens=ROWS,
                    weight_format="fp8_block",
                    implementation=how,
                    rngs=rngs,
                )
                for _ in range(LAYERS)
            ]
        )

    def __call__(self, x: jax.Array, padding_mask: jax.Array) -> jax.Array:
        """The last block's output for hidden values [T, H]."""
        for block in self.blocks:
            size = jnp.sqrt(jnp.mean(x.astype(jnp.float32) ** 2, axis=1, keepdims=True) + 1e-6)
            fed = (x.astype(jnp.float32) / size).astype(jnp.bfloat16)
            x = x + block(fed, padding_mask=padding_mask)
        return x


class Setting:
    """The devices, the model by each implementation, and tokens."""

    def __init__(self, small: bool, how: str) -> None:
        self.how = how
        self.sizes = SMALL if small else MODEL
        devices = np.array(jax.devices())
        self.mesh = Mesh(devices, ("ep",), axis_types=(AxisType.Auto,))
        self.rows = NamedSharding(self.mesh, P("ep"))
        self.total = ROWS * devices.size
        self.graphs, self.states = {}, {}
        for name in (how, "xla"):
            self.graphs[name], self.states[name] = nnx.split(Model(self.sizes, self.mesh, name))

    def tokens(self, seed: int) -> jax.Array:
        """Hidden values of all rows."""
        shape = (self.total, self.sizes["hidden_size"])
        values = jax.random.normal(jax.random.key(seed), shape).astype(jnp.bfloat16)
        return jax.device_put(values, self.rows)

    def mask(self, num_real: int) -> jax.Array:
        """True from row num_real of the batch on."""
        return jax.device_put(jnp.arange(self.total) >= num_real, self.rows)

    def run(self, name: str) -> Callable[..., Any]:
        """f(state, x, mask): the model by an implementation, jitted."""
        graph = self.graphs[name]
        return jax.jit(lambda state, x, mask: nnx.merge(graph, state)(x, mask))

    def experts(self) -> mm.MegaMoE:
        """The first block's routed experts, by the kernel."""
        return nnx.merge(self.graphs[self.how], self.states[self.how]).blocks[0].experts


def check_block(setting: Setting, checks: Checks) -> None:
    """One block: the kernel against xla, its counts, the captured ids."""
    seen: list[np.ndarray] = []
    x, mask = setting.tokens(0), setting.mask(setting.total - 5)
    results = {}
    for name in (setting.how, "xla"):
        block = nnx.merge(setting.graphs[name], setting.states[name]).blocks[0]
        results[name] = block(x, padding_mask=mask, return_stats=True, return_routing=True)
    (y, counts, routing), (want, _, _) = results[setting.how], results["xla"]
    config = replace(setting.experts().config, num_shared_experts=0)
    plan = plan_mega_moe(config, KNOWN_DEVICES["h200"], ROWS, setting.mesh.size)
    checks.agree(y, want, "a block agrees with xla", plan.block_m)
    stats = mm.moe_stats(
        routing.topk_ids, config=config, padding_mask=mask, num_ranks=setting.mesh.size
    )
    same = np.array_equal(np.asarray(counts), np.asarray(stats.tokens_per_expert))
    checks.check(same, "the kernel counts what moe_stats counts", str(int(counts.sum())))
    block = nnx.merge(setting.graphs[setting.how], setting.states[setting.how]).blocks[0]
    run = jax.jit(lambda x: block(x, padding_mask=mask))
    plain = run(x)
    with mm.capture_routing(lambda name, ids, mask: seen.append(ids)):
        captured = jax.block_until_ready(run(x))
    same = len(seen) == 1 and np.array_equal(seen[0], np.asarray(routing.topk_ids))
    checks.check(same, "capture_routing is handed the ids once")
    checks.same_bits(captured, plain, "and the output stays the same")


def check_decode(setting: Setting, checks: Checks) -> None:
    """A loop of steps, compiled ahead, with NaN in padded rows or without."""
    run, state = setting.run(setting.how), setting.states[setting.how]
    compiled = run.lower(state, setting.tokens(0), setting.mask(1)).compile()
    outputs = []
    for filler in (0.0, np.nan):
        x = setting.tokens(1)
        for step in range(STEPS):
            mask = setting.mask((step * 37) % (setting.total + 1))
            fed = jnp.where(mask[:, None], jnp.bfloat16(filler), x)
            y = compiled(state, jax.device_put(fed, setting.rows), mask)
            x = jnp.where(mask[:, None], x, y)
        outputs.append(x)
    checks.same_bits(outputs[1], outputs[0], f"{STEPS} steps: NaN in padded rows changes nothing")
    y = run(state, setting.tokens(0), setting.mask(setting.total))
    again = compiled(state, setting.tokens(0), setting.mask(setting.total))
    checks.same_bits(y, again, "jit and the program compiled ahead of it are alike")


def check_transforms(setting: Setting, checks: Checks) -> None:
    """vmap is one call of all rows; grad and export of the kernel are refused."""
    layer, x = setting.experts(), setting.tokens(2)
    ids = jax.random.randint(jax.random.key(3), (setting.total, 4), 0, 32, jnp.int32)
    factors = jnp.full(ids.shape, 0.25, jnp.float32)
    arrays = jax.device_put((x, ids, factors), setting.rows)
    # The rows of element b are every second one, from b, of the flat call on each rank.
    per_rank = ROWS // 2
    flat = np.asarray(layer(*arrays))
    halves = [
        np.asarray(a).reshape(setting.mesh.size, 2, per_rank, -1).swapaxes(0, 1).reshape(
            2, setting.mesh.size * per_rank, -1
        )
        for a in arrays
    ]  # fmt: skip
    batched = jax.vmap(layer)(*(jnp.asarray(a) for a in halves))
    want = flat.reshape(setting.mesh.size, 2, per_rank, -1).swapaxes(0, 1)
    checks.same_bits(
        np.asarray(batched).reshape(setting.total, -1),
        want.reshape(setting.total, -1),
        "vmap is one call with the rows of all elements",
    )
    if setting.how != "deep_gemm":
        return
    for what, call, text in (
        ("grad", lambda: jax.grad(lambda x: layer(x, ids, factors).sum())(x), "deep_gemm has none"),
        ("export", lambda: export.export(jax.jit(layer))(*arrays), "jax_megamoe_launch_graph"),
    ):
        try:
            call()
        except (NotImplementedError, ValueError) as error:
            checks.check(text in str(error), f"{what} is refused", str(error)[:150])
        else:
            checks.check(False, f"{what} is refused", "it was not")


def cached_run(small: bool, how: str) -> None:
    """A child process: one call with JAX's persistent cache; prints hits and the output's hash."""
    hits: list[str] = []
    jax.monitoring.register_event_listener(
        lambda event, **_: hits.append(event) if event == HIT else None
    )
    setting = Setting(small, how)
    hits.clear()
    y = setting.run(how)(setting.states[how], setting.tokens(0), setting.mask(setting.total))
    digest = hashlib.sha256(np.asarray(y).tobytes()).hexdigest()
    print(json.dumps({"hits": len(hits), "digest": digest}))


def check_cache(arguments: list[str], checks: Checks) -> None:
    """A second process takes the executable that the first one compiled."""
    with tempfile.TemporaryDirectory() as folder:
        cache = {
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "XLA_CLIENT_MEM_FRACTION": "0.3",
        }
        found = []
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, __file__, *arguments, "--cached-run"],
                env=os.environ | cache,
                capture_output=True,
                text=True,
                timeout=150,
                check=False,
            )
            if done.returncode:
                checks.check(False, "a process with a compilation cache", done.stderr[-1500:])
                return
            found.append(json.loads(done.stdout.splitlines()[-1]))
    hits = [each["hits"] for each in found]
    checks.check(hits[0] < hits[1], "the second process reads the executable", f"hits {hits}")
    checks.check(found[0]["digest"] == found[1]["digest"], "and gives the same bits")


def main() -> None:
    """All checks."""
    parser = argparse.ArgumentParser(description="Blocks and transformations on GPUs.")
    parser.add_argument("--implementation", default="deep_gemm")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--cached-run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cached_run:
        cached_run(options.small, options.implementation)
        return
    checks = Checks(SCRIPT)
    check_cache(sys.argv[1:], checks)
    setting = Setting(options.small, options.implementation)
    check_block(setting, checks)
    check_decode(setting, checks)
    check_transforms(setting, checks)
    devices = [device.device_kind for device in jax.devices()]
    print(f"results in {OUT}")
    checks.finish(devices=devices, jax=jax.__version__)


if __name__ == "__main__":
    main()
