"""Decoding while the load moves: 64 experts with 8 replicas, rebalanced as they run.

Eight devices hold nine experts each. The prompts change subject half way, so that other experts
become popular. The loop counts tokens of each expert on the devices, reads the counts every few
steps, and moves experts where the busiest device has much more to do than the average. The map of
the replicas lies in the layer: the compiled step stays the same, and so do its numbers.

Writes a picture of the tokens that each device got in each step: `watch_load.png`, or the path
given.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import jax_megamoe as mm

# Eight CPU devices stand for eight GPUs.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

RANKS, LOGICAL, REPLICAS, BATCH, HIDDEN = 8, 64, 8, 256, 256
STEPS, WATCHED, DECAY, LIMIT = 96, 8, 0.9, 1.15
"""Steps, of which every eighth is looked at; what an old step counts; imbalance to act on."""

mesh = jax.make_mesh((RANKS,), ("ep",))
rows = NamedSharding(mesh, P("ep"))
config = mm.MoEConfig(
    num_experts=LOGICAL + REPLICAS,
    num_logical_experts=LOGICAL,
    top_k=4,
    hidden_size=HIDDEN,
    intermediate_size=128,
    max_num_tokens=BATCH // RANKS,
    weight_format=mm.MXFP8,
)
settings = mm.Router(num_experts=LOGICAL, top_k=4, renormalize=True)
block = mm.MegaMoEBlock(config, settings, mesh=mesh, axis="ep", rngs=nnx.Rngs(0))


def subject(seed: int) -> np.ndarray:
    """What the hidden values of a subject's tokens have in common."""
    values = np.random.default_rng(seed).standard_normal(HIDDEN)
    return values / np.linalg.norm(values)


def batch(step: int) -> jax.Array:
    """Hidden values of a step's tokens, bfloat16 [BATCH, HIDDEN]."""
    values = np.random.default_rng(step).standard_normal((BATCH, HIDDEN))
    values += 12 * subject(1 if step < STEPS // 2 else 2)
    return jax.device_put(jnp.asarray(values, jnp.bfloat16), rows)


traces: list[int] = []


@nnx.jit
def decode(block: mm.MegaMoEBlock, x: jax.Array, loads: jax.Array) -> tuple[Any, Any, Any]:
    """The block's output, its tokens of each slot, and the loads of the logical experts so far."""
    traces.append(1)
    y, counts = block(x, return_stats=True)
    replicas = block.experts.eplb
    assert replicas is not None
    return y, counts, mm.record_loads(loads, counts, replicas, decay=DECAY)


def serve(watches: bool) -> tuple[np.ndarray, list[np.ndarray], list[int]]:
    """All steps: tokens of each device [STEPS, RANKS], outputs, the steps before which it moved."""
    loads = jax.device_put(jnp.zeros(LOGICAL, jnp.float32), NamedSharding(mesh, P()))
    tokens, outputs, moved = [], [], []
    for step in range(STEPS):
        if watches and step and step % WATCHED == 0:
            seen = np.asarray(loads)
            now = mm.rank_loads(seen, block.experts.placement, RANKS)
            if mm.imbalance(now) > LIMIT:
                block.rebalance(loads=seen)
                moved.append(step)
        y, counts, loads = decode(block, batch(step), loads)
        tokens.append(np.asarray(counts).reshape(RANKS, -1).sum(axis=1))
        outputs.append(np.asarray(y))
    return np.stack(tokens), outputs, moved


def draw(path: Path, before: np.ndarray, after: np.ndarray, moved: list[int]) -> None:
    """Tokens of each device by step, without and with rebalancing, under one scale."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 1, sharex=True, sharey=True)
    mean = before.sum() / before.size
    titles = ("experts stay where they are", "experts move with the load")
    for axis, tokens, title in zip(axes, (before, after), titles, strict=True):
        axis.plot(tokens, color="0.7", linewidth=0.8)
        axis.plot(tokens.max(axis=1), color="tab:red", label="busiest of 8 devices")
        axis.axhline(mean, color="black", linestyle="--", label="mean")
        axis.axvline(STEPS // 2, color="tab:blue", linestyle=":", label="other subject")
        axis.set(title=title, ylabel="tokens of a device", ylim=0)
    for step in moved:
        axes[1].axvline(step, color="tab:green", linewidth=0.8, label="rebalance")
    labels = dict(zip(*axes[1].get_legend_handles_labels()[::-1], strict=True))
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=len(labels))
    axes[1].set_xlabel("decode step")
    figure.savefig(path, dpi=100)


def ratios(tokens: np.ndarray) -> str:
    """Busiest over mean device, in the last quarter before and after the change of subject."""
    parts = (tokens[STEPS * 3 // 8 : STEPS // 2], tokens[STEPS * 7 // 8 :])
    return " then ".join(f"{(part.max(axis=1) / part.mean(axis=1)).mean():.2f}" for part in parts)


before, wanted, _ = serve(watches=False)
after, got, moved = serve(watches=True)
draw(Path(sys.argv[1] if len(sys.argv) > 1 else "watch_load.png"), before, after, moved)
print(f"{2 * STEPS} steps, traces: {len(traces)}")
print("tokens per device in the last step, at rest:", *before[-1])
print("tokens per device in the last step, rebalanced:", *after[-1])
print(f"busiest over mean device, at rest: {ratios(before)}")
print(f"busiest over mean device, rebalanced: {ratios(after)}")
print("rebalanced before the steps", *moved)
same = all(a.tobytes() == b.tobytes() for a, b in zip(wanted, got, strict=True))
print("outputs:", "no bit differs" if same else "bits differ")
if len(traces) > 1 or not same or not after[-1].max() < before[-1].max():
    raise SystemExit("expected one trace, the same outputs, and less for the busiest device to do")
