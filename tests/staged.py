"""Calls that are hard to stage: their inputs, their plans, and what the symmetric buffer holds
afterwards."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import scale_pages

from jax_megamoe import MoEConfig, ReplicaMap
from jax_megamoe.numerics import quantization
from jax_megamoe.numerics.tokens import QuantizedTokens
from jax_megamoe.op.staged_tokens import StagedTokens, stage
from jax_megamoe.plan import plan_mega_moe
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.launch import KernelLaunch, LaunchPlan
from jax_megamoe.plan.staging import Routing
from jax_megamoe.plan.symmetric_buffer import BufferLayout

NUM_RANKS = 2
L2_ACTIVATION_SCALE = 0.37
PATTERN = 0xA5
"""Every byte of a buffer before it is staged into."""


class Form(NamedTuple):
    """What is staged, and for whose kernel."""

    weight_format: str
    source: str
    num_shared_experts: int = 0
    shared_format: str | None = None

    def __str__(self) -> str:
        shared = f" + shared {self.shared_format or ''}" if self.num_shared_experts else ""
        return f"{self.weight_format} {self.source}{shared}".rstrip()


FORMS = (
    Form("mxfp4", "sgl"),
    Form("mxfp8", "vllm", 1),
    Form("nvfp4", "sgl"),
    Form("nvfp4", "vllm"),
    Form("nvfp4", "vllm", 1, "mxfp8"),
    Form("nvfp4", "vllm", 1, "bf16"),
    Form("bf16", "sgl", 1),
    Form("fp8_block", "sgl"),
)


def config(form: Form, **fields: Any) -> MoEConfig:
    """A small config of a form, with some fields of one's own."""
    sizes = {"num_experts": 8, "top_k": 3, "hidden_size": 512, "intermediate_size": 256}
    form_fields = {name: value for name, value in form._asdict().items() if name != "source"}
    return MoEConfig(**(sizes | {"max_num_tokens": 129} | form_fields | fields))


def plan_of(
    form: Form,
    num_tokens: int,
    *,
    routing: Routing | None = None,
    staging_by: str = "jax_megamoe",
    **fields: Any,
) -> LaunchPlan:
    """The plan of a call of `config(form, **fields)` with no step but the one that stages."""
    device = DeviceSpec(90, 132) if form.weight_format == "fp8_block" else DeviceSpec(100, 148)
    plan = plan_mega_moe(
        config(form, **fields),
        device,
        num_tokens,
        NUM_RANKS,
        form.source,
        routing=routing,
        staging_by=staging_by,
        l2_activation_scale=L2_ACTIVATION_SCALE,
    )
    *staging, _ = plan.launches
    return replace(plan, steps=tuple(staging), constants=())


@dataclass(frozen=True)
class Case:
    """A call to stage.

    Attributes:
        plan: from `plan_of`.
        arrays: operands by name, and ``l2_alpha``, zeros, which the plan may write.
        want: the buffer afterwards from its region ``x`` on, uint8.
        l2_alpha: that array afterwards.
    """

    plan: LaunchPlan
    arrays: dict[str, np.ndarray]
    want: np.ndarray
    l2_alpha: np.ndarray

    @property
    def step(self) -> KernelLaunch:
        """The launch."""
        (step,) = self.plan.steps
        assert isinstance(step, KernelLaunch)
        return step

    @property
    def start(self) -> int:
        """Bytes of the buffer before `want`."""
        return self.plan.buffer["x"].offset


def hard_case(
    form: Form,
    num_tokens: int,
    *,
    mask: bool = False,
    eplb: ReplicaMap | None = None,
    block_m: int | None = None,
    **fields: Any,
) -> Case:
    """Hard inputs for a form, and what becomes of them.

    Args:
        mask: some rows are padding.
        eplb: a replica map; None: the initial one.
        block_m: a tile height other than the plan's.
    """
    layer = config(form, **fields)
    max_replicas = 0 if eplb is None else eplb.logical_to_physical.shape[1]
    routing = Routing(
        num_logical=layer.logical_experts, padding_mask=mask, max_replicas=max_replicas
    )
    plan = plan_of(form, num_tokens, routing=routing, **fields)
    if block_m is not None:
        plan = _with_tiles(plan, block_m)
    bits = hard_tokens(num_tokens, layer.hidden_size, seed=num_tokens)
    ids, weights, padding = hard_routing(layer, num_tokens)
    factors = np.linspace(1e-3, 2, layer.num_experts // NUM_RANKS, dtype=np.float32)
    arrays = {
        "x": bits,
        "topk_ids": ids,
        "topk_weights": weights,
        "padding_mask": padding,
        "w2_weight_scale_2": factors,
        "l2_alpha": np.zeros_like(factors),
    }
    if eplb is not None:
        arrays["logical_to_physical"] = np.asarray(eplb.logical_to_physical)
        arrays["num_replicas"] = np.asarray(eplb.num_replicas)
    padding_mask = padding if mask else None
    staged = staged_on_host(
        layer, form.source, bits, (ids, weights), padding_mask=padding_mask, eplb=eplb
    )
    want = np.full(plan.buffer.num_bytes - plan.buffer["x"].offset, PATTERN, np.uint8)
    fill_buffer(want, plan, staged)
    alpha = factors * np.float32(L2_ACTIVATION_SCALE) if plan.scratch else np.zeros_like(factors)
    return Case(plan, arrays, want, alpha)


def _with_tiles(plan: LaunchPlan, block_m: int) -> LaunchPlan:
    (step,) = plan.steps
    assert isinstance(step, KernelLaunch)
    arguments = tuple(
        replace(each, value=block_m) if each.name == "block_m" else each for each in step.arguments
    )
    return replace(plan, steps=(replace(step, arguments=arguments),), block_m=block_m)


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
            tokens = QuantizedTokens(*quantization.quantize_tokens_nvfp4(x, floors_scales=False))
            staged = StagedTokens(tokens, staged.topk_ids, staged.topk_weights)
        return staged

    with jax.default_device(jax.devices("cpu")[0]):
        return run(bits, routing, padding_mask, eplb)


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
            rows = scale_pages.shared_scale_rows(len(words), plan.block_m)
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
