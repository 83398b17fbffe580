"""The kernels around the grouped products on the host, and compiled for GPUs.

tests/gpu/check_grouped.py runs whole layers on a GPU.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kernels.on_host import HostKernels

from jax_megamoe import Activation, MoEConfig, replica_map
from jax_megamoe.compile import MissingDependency, build
from jax_megamoe.compile.cache import KernelCache
from jax_megamoe.compile.compiler import COMPILERS
from jax_megamoe.compile.cubin import read_kernels
from jax_megamoe.formats import RECIPES
from jax_megamoe.numerics import expert
from jax_megamoe.numerics.tokens import quantize_tokens
from jax_megamoe.plan.grouped.call import GroupedLayer
from jax_megamoe.plan.grouped.layer import plan_grouped
from jax_megamoe.plan.grouped.rules import ROWS
from jax_megamoe.plan.launch import (
    KernelLaunch,
    LaunchPlan,
    Pointer,
    TensorMap,
    parameter_block,
)
from jax_megamoe.routing.replicas import physical_ids

HIDDEN, INTER, TOP_K, EXPERTS, LOGICAL = 384, 256, 3, 40, 33
WEIGHTS = {"bf16": "mxfp4", "mxfp8": "mxfp4", "nvfp4": "nvfp4", "fp8_block": "fp8_block"}


def layer(activations: str, num_tokens: int = 21, **changes: Any) -> GroupedLayer:
    fields: dict[str, Any] = dict(
        arch=90,
        num_sms=132,
        num_tokens=num_tokens,
        top_k=TOP_K,
        num_experts=EXPERTS,
        num_logical=LOGICAL,
        hidden_size=HIDDEN,
        intermediate_size=INTER,
        weights=WEIGHTS[activations],
        activations=activations,
        padding_mask=True,
        stats=True,
    )
    return GroupedLayer(**(fields | changes))


def steps(plan: LaunchPlan) -> dict[str, KernelLaunch]:
    """The plan's kernels by name; of the products the last."""
    return {step.kernel.symbol: step for step in plan.launches}


VARIANTS = (
    *(layer(name) for name in ROWS),
    layer("bf16", max_replicas=2, num_logical=5, num_experts=8),
    layer("mxfp8", activation="situ", alpha=2.0, beta=3.0, biases=True),
    layer("fp8_block", rounds=False, biases=True, clamp=0.5, alpha=1.702, beta=1.0),
    layer("nvfp4", weighs_in_combine=True, biases=True),
    layer("bf16", num_tokens=700, num_experts=300, num_logical=300),
)
SORTED = (
    *VARIANTS,
    # A block of 256, of 1024 and of 512 threads with a row each; and several blocks.
    layer("fp8_block", num_tokens=86, num_experts=300, num_logical=300),
    layer("bf16", num_tokens=7, top_k=1, num_experts=8, num_logical=8, stream_k=True),
    layer("mxfp8", num_tokens=200),
    layer("bf16", num_tokens=150, num_experts=300, num_logical=300),
    layer("bf16", num_tokens=1400),
)
EDGES = tuple(
    layer("bf16", num_tokens=rows, top_k=1, num_experts=experts, num_logical=experts, weights=form)
    for form, experts, counts in (
        ("mxfp4", 40, (1, 256, 257, 1024, 1025)),
        ("mxfp4", 512, (256, 512, 513, 1025)),
        ("bf16", 40, (1, 1025)),
        ("bf16", 512, (512, 513)),
    )
    for rows in counts
)
"""Rows as many as a block sorts, and one more."""
IN_SLOTS = (
    layer("bf16", weights="bf16"),
    layer("bf16", weights="bf16", num_tokens=90),
    layer("bf16", weights="bf16", num_tokens=700, num_experts=300, num_logical=300),
    layer("bf16", weights="bf16", num_tokens=400),
)


@pytest.fixture(scope="module")
def on_host(tmp_path_factory) -> HostKernels:
    found = [steps(plan_grouped(each)) for each in (*SORTED, *EDGES, *IN_SLOTS)]
    own = [s.kernel for each in found for s in each.values() if s.kernel.source == "jax_megamoe"]
    return HostKernels(own, tmp_path_factory.mktemp("kernels"))


def sort(on_host: HostKernels, plan: LaunchPlan, arrays: dict[str, np.ndarray]) -> None:
    """The launches before the first product, or before its rows are gathered."""
    launches = steps(plan)
    for name in ("group_tokens", "place_rows"):
        if name in launches:
            on_host.launch(launches[name], arrays)


def scratch(plan: LaunchPlan) -> dict[str, np.ndarray]:
    """The plan's own arrays, full of a pattern."""
    arrays: dict[str, np.ndarray] = {}
    for name, shape, dtype in plan.scratch:
        array = np.empty(shape, np.dtype(getattr(ml_dtypes, dtype, dtype)))
        array.view(np.uint8).fill(0xA5)
        arrays[name] = array
    return arrays


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def tokens_of(each: GroupedLayer) -> dict[str, np.ndarray]:
    """Normal tokens with a few hard ones, ids out of range, a mask and top-k weights."""
    rng = np.random.default_rng(each.num_tokens)
    x = normal(1, each.num_tokens, HIDDEN).astype(ml_dtypes.bfloat16)
    x[0], x[1, :5], x[2, 7] = 0, np.nan, 1e30
    ids = rng.integers(-2, each.num_logical + 2, (each.num_tokens, each.top_k), dtype=np.int32)
    return {
        "x": x,
        "topk_ids": ids,
        "topk_weights": rng.random(ids.shape, np.float32),
        "padding_mask": rng.random(each.num_tokens) < 0.2,
        "stats": np.arange(each.num_experts, dtype=np.int32),
    }


def expected_tables(
    experts: np.ndarray, num_experts: int, block_m: int
) -> tuple[np.ndarray, np.ndarray]:
    """sorted_ids and expert_ids by a plain loop."""
    flat, slots, blocks = experts.reshape(-1), [], []
    for each in range(num_experts):
        rows = np.flatnonzero(flat == each)
        padding = -len(rows) % block_m
        slots += [*rows, *[flat.size] * padding]
        blocks += [each] * ((len(rows) + padding) // block_m)
    return np.array(slots, np.uint32), np.array(blocks, np.uint32)


@pytest.mark.parametrize("each", SORTED, ids=lambda e: f"{e.activations}-{e.num_experts}-{e.rows}")
def test_rows_are_sorted_and_tokens_quantised(on_host, each):
    plan = plan_grouped(each)
    arrays = scratch(plan) | tokens_of(each)
    eplb = None
    if each.max_replicas:
        eplb = replica_map(np.array([0, 1, 2, 3, 4, 2, 2, 4]), 5)
        arrays["logical_to_physical"] = np.asarray(eplb.logical_to_physical)
        arrays["num_replicas"] = np.asarray(eplb.num_replicas)
        each = replace(each, max_replicas=arrays["logical_to_physical"].shape[1])
        plan = plan_grouped(each)
    sort(on_host, plan, arrays)

    sizes = dict(top_k=each.top_k, hidden_size=HIDDEN, intermediate_size=INTER, max_num_tokens=999)
    config = MoEConfig(num_experts=each.num_experts, num_logical_experts=each.num_logical, **sizes)
    known = (arrays["topk_ids"] >= 0) & (arrays["topk_ids"] < each.num_logical)
    known &= ~arrays["padding_mask"][:, None]
    logical = jnp.asarray(np.where(known, arrays["topk_ids"], -1))
    experts = np.asarray(physical_ids(logical, config=config, eplb=eplb))
    np.testing.assert_array_equal(arrays["row_experts"], experts.reshape(-1))
    slots, blocks = expected_tables(experts, each.num_experts, plan.block_m)
    assert arrays["num_slots"][0] == len(slots) <= len(arrays["sorted_ids"])
    np.testing.assert_array_equal(arrays["sorted_ids"][: len(slots)], slots)
    np.testing.assert_array_equal(arrays["expert_ids"][: len(blocks)], blocks)
    assert not each.cuts or not arrays["locks"].any()
    counts = np.bincount(experts[experts >= 0], minlength=each.num_experts)
    np.testing.assert_array_equal(arrays["stats"], np.arange(each.num_experts) + counts)
    if each.activations == "bf16":
        return
    want = quantize_tokens(jnp.asarray(arrays["x"]), RECIPES[each.activations])
    fine = ~np.isnan(arrays["x"].astype(np.float32)).any(axis=1)
    if each.activations == "fp8_block":
        np.testing.assert_array_equal(arrays["token_scales"], want.scale)
        same_bytes(arrays["token_rows"], np.asarray(want.values), fine)
    else:
        same_bytes(arrays["token_rows"], np.asarray(want.decoded()), fine)
    if each.activations == "nvfp4":
        np.testing.assert_array_equal(arrays["token_scales"], want.token_scale)


@pytest.mark.parametrize("each", IN_SLOTS, ids=lambda e: f"{e.num_experts}")
def test_rows_in_slots_are_those_of_the_tables(on_host, each):
    plan = plan_grouped(each)
    arrays = scratch(plan) | tokens_of(each)
    sort(on_host, plan, arrays)
    experts = arrays["row_experts"]
    assert (experts < 0).any() and (experts >= 0).any()
    slots, blocks = expected_tables(experts, each.num_experts, plan.block_m)
    assert len(slots) <= len(arrays["token_rows"])
    live = np.flatnonzero(experts >= 0)
    np.testing.assert_array_equal(slots[arrays["row_slots"][live]], live)
    np.testing.assert_array_equal(blocks[arrays["row_slots"][live] // plan.block_m], experts[live])
    counts = np.bincount(experts[live], minlength=each.num_experts)
    np.testing.assert_array_equal(arrays["stats"], np.arange(each.num_experts) + counts)
    starts = np.concatenate([[0], -(-arrays["expert_ends"][:-1] // plan.block_m) * plan.block_m])
    np.testing.assert_array_equal(arrays["expert_ends"] - starts, counts)

    before = arrays["token_rows"].copy()
    on_host.launch(steps(plan)["gather_rows"], arrays)
    filled = np.flatnonzero(slots < each.rows)
    got, want = arrays["token_rows"].view(np.uint16), arrays["x"].view(np.uint16)
    np.testing.assert_array_equal(got[filled], want[slots[filled] // each.top_k])
    empty = np.setdiff1d(np.arange(len(got)), filled)
    np.testing.assert_array_equal(got[empty], before.view(np.uint16)[empty])


@pytest.mark.parametrize("each", EDGES, ids=lambda e: f"{e.weights}-{e.num_experts}-{e.rows}")
@pytest.mark.parametrize("routing", ["random", "one expert", "none", "padding"])
def test_any_routing_of_as_many_rows_as_a_block_has(on_host, each, routing):
    plan = plan_grouped(each)
    few = each.rows <= (1024 if each.num_experts == 40 else 512)
    assert ("place_rows" in steps(plan)) == (not few)
    ids = np.random.default_rng(each.rows).integers(0, each.num_experts, (each.rows, 1), np.int32)
    masked = np.full(each.rows, routing == "padding")
    if routing == "one expert":
        ids[:] = each.num_experts - 1
    if routing == "none":
        ids[:] = -1
    arrays = scratch(plan) | {"topk_ids": ids, "padding_mask": masked}
    arrays |= {"x": np.zeros((each.rows, HIDDEN), ml_dtypes.bfloat16)}
    arrays |= {"stats": np.arange(each.num_experts, dtype=np.int32)}
    sort(on_host, plan, arrays)

    experts = np.where(masked, -1, ids[:, 0])
    np.testing.assert_array_equal(arrays["row_experts"], experts)
    slots, blocks = expected_tables(experts, each.num_experts, plan.block_m)
    counts = np.bincount(experts[experts >= 0], minlength=each.num_experts)
    np.testing.assert_array_equal(arrays["stats"], np.arange(each.num_experts) + counts)
    if each.in_slots:
        live = np.flatnonzero(experts >= 0)
        np.testing.assert_array_equal(slots[arrays["row_slots"][live]], live)
        heights = -(-counts // plan.block_m) * plan.block_m
        np.testing.assert_array_equal(arrays["expert_ends"], np.cumsum(heights) - heights + counts)
        return
    assert arrays["num_slots"][0] == len(slots) <= len(arrays["sorted_ids"])
    np.testing.assert_array_equal(arrays["sorted_ids"][: len(slots)], slots)
    np.testing.assert_array_equal(arrays["expert_ids"][: len(blocks)], blocks)


def same_bytes(got: np.ndarray, want: np.ndarray, rows: np.ndarray) -> None:
    """Equal bits in some rows, a negative zero being a zero."""
    assert got.dtype == want.dtype
    pairs = (array[rows].astype(np.float32) for array in (got, want))
    np.testing.assert_array_equal(*pairs)


@pytest.mark.parametrize(
    "each", VARIANTS[:-1], ids=lambda e: f"{e.activations}-{e.activation}-{e.biases}"
)
def test_hidden_values_are_what_expert_says(on_host, each):
    """The activation differs in the last bits of exp, so a few rounded values may."""
    plan = plan_grouped(each)
    arrays = scratch(plan) | tokens_of(each)
    arrays["row_experts"] = np.arange(each.rows, dtype=np.int32) % each.num_experts
    arrays["row_experts"][5] = -1
    h = normal(2, each.rows, 2 * INTER).astype(ml_dtypes.bfloat16)
    arrays["h"] = h
    arrays["w13_bias"] = normal(3, each.num_experts, 2 * INTER)
    arrays["w2_input_scale"] = np.array([0.37], np.float32)
    if each.activations == "nvfp4":
        arrays["token_scales"] = np.random.default_rng(4).random(each.num_tokens, np.float32)
    before = arrays["hidden_rows"].copy()
    on_host.launch(steps(plan)["activate_rows"], arrays)

    values = h.astype(np.float32)
    if each.activations == "nvfp4":
        values = values * np.repeat(arrays["token_scales"], TOP_K)[:, None]
    if each.biases:
        values = values + arrays["w13_bias"][arrays["row_experts"]]
    gate, up = jnp.split(jnp.asarray(values), 2, axis=1)
    activation = Activation(each.activation, clamp=each.clamp, alpha=each.alpha, beta=each.beta)
    if each.rounds:
        gate, up = expert.round_bf16(gate), expert.round_bf16(up)
    act = expert.activate(gate, up, activation)
    weight = None
    if not each.weighs_in_combine:
        weight = jnp.asarray(arrays["topk_weights"].reshape(-1)[:, None])
    scale = jnp.float32(0.37) if each.activations == "nvfp4" else None
    want = np.asarray(
        expert.second_input(act, weight, RECIPES[each.activations], scale), np.float32
    )
    got = arrays["hidden_rows"].astype(np.float32)
    if each.activations == "fp8_block":
        got = got * np.repeat(arrays["hidden_scales"], 128, axis=1)
    live = arrays["row_experts"] >= 0
    different = ~np.isclose(got[live], want[live], rtol=1e-6, atol=1e-12)
    assert different.mean() < 2e-3
    assert np.linalg.norm((got - want)[live]) < 2e-3 * np.linalg.norm(want[live])
    np.testing.assert_array_equal(arrays["hidden_rows"][5].view(np.uint8), before[5].view(np.uint8))


@pytest.mark.parametrize("each", VARIANTS, ids=lambda e: f"{e.activations}-{e.biases}")
def test_outputs_are_summed_in_order(on_host, each):
    plan = plan_grouped(each)
    arrays = scratch(plan) | tokens_of(each)
    experts = np.random.default_rng(5).integers(-1, each.num_experts, each.rows, dtype=np.int32)
    experts[:TOP_K] = -1
    arrays["row_experts"] = experts
    arrays["outputs"] = normal(6, each.rows, HIDDEN).astype(ml_dtypes.bfloat16)
    arrays["outputs"][experts < 0] = np.nan
    arrays["w2_bias"] = normal(7, each.num_experts, HIDDEN)
    arrays["y"] = np.full((each.num_tokens, HIDDEN), np.nan, ml_dtypes.bfloat16)
    on_host.launch(steps(plan)["combine_rows"], arrays)

    slots = arrays["outputs"].astype(np.float32)
    weights = arrays["topk_weights"].reshape(-1)[:, None]
    if each.biases:
        bias = arrays["w2_bias"][experts] * (1 if each.weighs_in_combine else weights)
        slots = (slots + bias).astype(ml_dtypes.bfloat16).astype(np.float32)
    slots = np.where(experts[:, None] >= 0, slots, 0).reshape(each.num_tokens, TOP_K, HIDDEN)
    factors = jnp.asarray(arrays["topk_weights"]) if each.weighs_in_combine else None
    want = expert.combine(jnp.asarray(slots), factors, None).astype(jnp.bfloat16)
    np.testing.assert_array_equal(arrays["y"].astype(np.float32), np.asarray(want, np.float32))
    assert not arrays["y"][0].any()


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize(
    "each", (VARIANTS[1], VARIANTS[6], IN_SLOTS[0]), ids=lambda e: f"{e.weights}-{e.activations}"
)
def test_compiled_parameters_are_where_planned(each, compiler, tmp_path):
    try:
        made_by = COMPILERS[compiler]()
    except MissingDependency as error:
        pytest.skip(str(error))
    for step in steps(plan_grouped(each)).values():
        if step.kernel.source != "jax_megamoe":
            continue
        (kernel,) = read_kernels(build(step.kernel, compiler=made_by, cache=KernelCache(tmp_path)))
        assert kernel.parameters == parameter_block(step)


def test_every_pointer_has_an_array():
    """Operands of a plan are the arrays that its docstring names, or its own scratch."""
    plan = plan_grouped(layer("nvfp4", biases=True, second_scales=("tensor", "tensor")))
    own = {name for name, *_ in plan.scratch}
    named: set[str] = set()
    for step in plan.steps:
        assert isinstance(step, KernelLaunch)
        for argument in step.arguments:
            if isinstance(argument, TensorMap):
                named.add(argument.spec.base.name)
            elif isinstance(argument, Pointer) and argument.operand is not None:
                named.add(argument.operand.name)
    assert own < named
    assert named - own == {
        *("x", "topk_ids", "topk_weights", "padding_mask", "stats", "y", "w2_input_scale"),
        *("w13_weight", "w13_weight_scale", "w13_weight_scale_2", "w13_bias"),
        *("w2_weight", "w2_weight_scale", "w2_weight_scale_2", "w2_bias"),
    }
