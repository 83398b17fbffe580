"""Inputs that are hard to stage, and what the symmetric buffer holds of them afterwards."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_megamoe import MoEConfig, ReplicaMap, quantization
from jax_megamoe.plan.launch import LaunchPlan
from jax_megamoe.plan.symmetric_buffer import BufferLayout
from jax_megamoe.staging import QuantizedTokens, StagedTokens, stage

NAN, INFINITY = 0x7FC1, 0x7F80
LARGEST, SMALLEST_NORMAL, SMALLEST = 0x7F7F, 0x0080, 0x0001


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """uint16 bits of float values rounded to BF16."""
    return np.asarray(values, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)


def hard_tokens(num_tokens: int, hidden_size: int, seed: int = 0) -> np.ndarray:
    """Tokens uint16 [T, H], the bits of BF16: each row one kind of trouble, then random again.

    Normal values; any bits at all; zeros of both signs; denormals; E2M1 and E4M3 ties; the largest
    finite; block maxima at the edges where a scale is rounded up; one NaN, a row of NaN, infinity.
    """
    rng = np.random.default_rng(seed)
    shape = (num_tokens, hidden_size)
    rows = bf16_bits(rng.standard_normal(shape) * np.exp2(rng.integers(-30, 30, (num_tokens, 1))))
    kinds = [
        lambda n: rng.integers(0, 1 << 16, n),
        lambda n: rng.choice([0, 0x8000], n),
        lambda n: rng.integers(0, 0x80, n) | rng.choice([0, 0x8000], n),
        lambda n: bf16_bits(rng.choice(_ties(), n) * rng.choice([-1, 1], n)),
        lambda n: rng.choice([LARGEST, LARGEST | 0x8000, SMALLEST_NORMAL, SMALLEST], n),
        lambda n: _edges(rng, n),
        lambda n: _with_one(rng, n, NAN),
        lambda n: np.full(n, NAN | 0x8000),
        lambda n: _with_one(rng, n, INFINITY),
        lambda n: _mantissas(rng, n),
    ]
    for row in range(0, num_tokens, 2):
        rows[row] = kinds[row // 2 % len(kinds)](hidden_size)
    return rows


def _ties() -> np.ndarray:
    """Midpoints of E2M1 and some of E4M3, and the values around them, in units of 1 and of 448."""
    middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 17, 19, 21, 416, 432, 448, 2688.0])
    return np.concatenate([middles, middles / 448, middles * 3, [0, 0.5, 1]])


def _edges(rng: np.random.Generator, size: int) -> np.ndarray:
    """Per 16 values a maximum of 448, 6 or 1e-4 times a power of two, or the BF16 next to it."""
    small = bf16_bits(rng.standard_normal(size) * 2.0**-12)
    limit = rng.choice([448.0, 6.0, 1.0], size // 16) * np.exp2(rng.integers(-24, 24, size // 16))
    tops = bf16_bits(np.where(rng.random(size // 16) < 0.2, 1e-4, limit))
    small[::16] = tops + rng.integers(-1, 2, size // 16).astype(np.uint16)
    return small


def _with_one(rng: np.random.Generator, size: int, bits: int) -> np.ndarray:
    row = bf16_bits(rng.standard_normal(size))
    row[rng.integers(size)] = bits
    return row


def _mantissas(rng: np.random.Generator, size: int) -> np.ndarray:
    """A few exponents and every mantissa: quotients close to E2M1's thresholds."""
    exponents = rng.integers(120, 128, size) << 7
    return exponents | rng.integers(0, 128, size) | rng.choice([0, 0x8000], size)


def hard_routing(config: MoEConfig, num_tokens: int, seed: int = 1) -> tuple[np.ndarray, ...]:
    """(topk_ids int32, topk_weights float32, padding_mask bool): some ids -1, far out of range or
    repeated; weights of every kind, NaN where unrouted."""
    rng = np.random.default_rng(seed)
    shape = (num_tokens, config.top_k)
    ids = rng.integers(0, config.logical_experts, shape).astype(np.int32)
    bad = np.array([-1, -7, config.logical_experts, 2**31 - 1, -(2**31)], np.int32)
    ids = np.where(rng.random(shape) < 0.3, rng.choice(bad, shape), ids)
    weights = rng.standard_normal(shape).astype(np.float32)
    weights = np.where(ids == -1, np.float32(np.nan), weights)
    return ids, weights, rng.random(num_tokens) < 0.2


def staged_on_host(
    config: MoEConfig,
    source: str,
    bits: np.ndarray,
    routing: tuple[np.ndarray, np.ndarray],
    *,
    padding_mask: np.ndarray | None = None,
    eplb: ReplicaMap | None = None,
) -> StagedTokens:
    """`staging.stage` of the tokens on the CPU; NVFP4 for the sgl source by sgl's rule."""

    @jax.jit
    def run(bits, routing, padding_mask, eplb):
        x = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
        staged = stage(
            x,
            *routing,
            config=config,
            padding_mask=padding_mask,
            eplb=eplb,
            fused_shared=config.num_shared_experts > 0,
        )
        if (config.weight_format.name, source) == ("nvfp4", "sgl"):
            tokens = QuantizedTokens(*quantization.quantize_tokens_nvfp4(x, source="sgl"))
            staged = StagedTokens(tokens, staged.topk_ids, staged.topk_weights)
        return staged

    with jax.default_device(jax.devices("cpu")[0]):
        return run(bits.astype(np.uint16), routing, padding_mask, eplb)


def fill_buffer(buffer: np.ndarray, plan: LaunchPlan, staged: StagedTokens) -> None:
    """Writes to `buffer`, uint8, a symmetric buffer from its region ``x`` on, what a plan's staging
    step writes."""
    layout = plan.buffer
    values: dict[str, Any] = {
        "x": staged.tokens.values,
        "x_sf": staged.tokens.scale,
        "x_scales": staged.tokens.token_scale,
        "topk_idx": np.asarray(staged.topk_ids).astype(np.int64),
        "topk_weights": staged.topk_weights,
    }
    if staged.shared_tokens is not None:
        values["shared_l1_acts"] = staged.shared_tokens.values
        values["shared_l1_acts_sf"] = staged.shared_tokens.scale
    for name, array in values.items():
        if array is None:
            continue
        region = layout[name]
        start = region.offset - layout["x"].offset
        target = buffer[start : start + region.num_bytes]
        if name == "shared_l1_acts_sf":
            words = np.asarray(array).view(np.uint32)
            rows = quantization.shared_scale_rows(len(words), plan.block_m)
            target.view(np.uint32).reshape(region.shape[::-1])[:, rows] = words.T
        else:
            written = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
            target[: written.size] = written


def first_difference(got: np.ndarray, want: np.ndarray, layout: BufferLayout) -> str:
    """Where two such buffers differ first, by region; empty if they are equal."""
    places = np.flatnonzero(got != want)
    if not places.size:
        return ""
    at = int(places[0]) + layout["x"].offset
    name, region = max(
        ((name, region) for name, region in layout.regions if region.offset <= at),
        key=lambda named: named[1].offset,
    )
    here = f"byte {at - region.offset} of {name} {list(region.shape)}"
    return f"{places.size} bytes differ, first {here}: {got[places[0]]} for {want[places[0]]}"
