"""Whole layers of the grouped implementation on the host: this package's kernels as they are, the
products by NumPy from the tables that the kernels made."""

import grouped_layers
import ml_dtypes
import numpy as np
import pytest
from kernels.on_host import HostKernels
from kernels.test_grouped import scratch, steps

from jax_megamoe import MoEConfig
from jax_megamoe.plan.grouped.call import GroupedLayer
from jax_megamoe.plan.grouped.layer import plan_grouped
from jax_megamoe.weights.experts import dequantize_experts
from jax_megamoe.weights.layout import w13_to_kernel
from jax_megamoe.weights.params import ExpertWeights

CASES = (
    *(grouped_layers.case(*recipe, 9) for recipe in grouped_layers.RECIPES),
    grouped_layers.case("mxfp4", "bf16", 9, biases=True, clamp=0.7, alpha=1.702, beta=1.0),
    grouped_layers.case("fp8_block", "fp8_block", 9, biases=True, hidden_size=384),
    grouped_layers.case("mxfp4", "mxfp8", 9, activation="situ", alpha=4.0, beta=25.0),
    grouped_layers.case("bf16", "bf16", 9, biases=True, clamp=0.7, alpha=1.702, beta=1.0),
)


@pytest.fixture(scope="module")
def on_host(tmp_path_factory) -> HostKernels:
    own = [step.kernel for each in CASES for step in plan_grouped(each).launches]
    return HostKernels(
        [kernel for kernel in own if kernel.source == "jax_megamoe"],
        tmp_path_factory.mktemp("kernels"),
    )


def matrices(each: GroupedLayer, stored: ExpertWeights) -> tuple[np.ndarray, np.ndarray]:
    """w13, gate rows first, and w2, as float64."""
    sizes = dict(hidden_size=each.hidden_size, intermediate_size=each.intermediate_size)
    experts = dict(num_experts=each.num_experts, top_k=each.top_k)
    config = MoEConfig(**sizes, **experts, max_num_tokens=99, weight_format=each.weights)
    plain = stored.with_routed(w13_bias=None, w2_bias=None)
    gate, up, down = (np.asarray(m, np.float64) for m in dequantize_experts(config, plain))
    return np.concatenate([gate, up], axis=1), down


def product(
    arrays: dict[str, np.ndarray],
    rows: tuple[str, str],
    out: str,
    matrix: np.ndarray,
    block_m: int,
    top_k: int,
) -> None:
    """What a product does: rows by the tables through their experts' matrices, to BF16."""
    a = arrays[rows[0]].astype(np.float64)
    if rows[1] in arrays and arrays[rows[1]].ndim == 2:
        a = a * np.repeat(arrays[rows[1]], 128, axis=1)
    used = int(arrays["num_slots"][0])
    for slot, row in enumerate(arrays["sorted_ids"][:used]):
        if row < len(arrays[out]):
            expert = arrays["expert_ids"][slot // block_m]
            arrays[out][row] = (matrix[expert] @ a[row // top_k]).astype(ml_dtypes.bfloat16)


def product_in_slots(
    arrays: dict[str, np.ndarray], rows: str, out: str, matrix: np.ndarray, block_m: int
) -> None:
    """The same of rows in slots: each expert's up to its end, from the block after the last's."""
    start = 0
    for expert, end in enumerate(arrays["expert_ends"]):
        a = arrays[rows][start:end].astype(np.float64)
        arrays[out][start:end] = (a @ matrix[expert].T).astype(ml_dtypes.bfloat16)
        start = -(-int(end) // block_m) * block_m


@pytest.mark.parametrize(
    "each", CASES, ids=lambda e: f"{e.weights}-{e.activations}-{e.activation}-{e.biases}"
)
def test_a_layer_is_what_its_recipe_says(on_host, each):
    stored = grouped_layers.stored_weights(each)
    call = grouped_layers.tokens(each)
    plan = plan_grouped(each)
    arrays = scratch(plan) | {name: np.asarray(array) for name, array in call.items()}
    arrays["y"] = np.zeros((each.num_tokens, each.hidden_size), ml_dtypes.bfloat16)
    grouped = grouped_layers.grouped_weights(each, stored)
    for name in ("w13_bias", "w2_bias"):
        if (bias := getattr(grouped.routed, name)) is not None:
            arrays[name] = np.asarray(bias)
    w13, w2 = matrices(each, stored)
    if each.activations == "nvfp4":
        arrays["w2_input_scale"] = np.array([0.25], np.float32)
        w2 = w2 * 0.25  # with the second inputs' scale
    launches = steps(plan)
    on_host.launch(launches["group_tokens"], arrays)
    if each.in_slots:
        on_host.launch(launches["gather_rows"], arrays)
        w13 = w13_to_kernel(w13, grouped.layout)
        product_in_slots(arrays, "token_rows", "h", w13, plan.block_m)
    else:
        first = "x" if each.activations == "bf16" else "token_rows"
        product(arrays, (first, "token_scales"), "h", w13, plan.block_m, each.top_k)
    on_host.launch(launches["activate_rows"], arrays)
    if each.in_slots:
        product_in_slots(arrays, "hidden_rows", "outputs", w2, plan.block_m)
    else:
        product(arrays, ("hidden_rows", "hidden_scales"), "outputs", w2, plan.block_m, 1)
    on_host.launch(launches["combine_rows"], arrays)

    want = grouped_layers.expected(each, stored, call)
    error = np.linalg.norm(arrays["y"].astype(np.float64) - want) / np.linalg.norm(want)
    assert error < grouped_layers.ERROR[each.activations]
