"""`implementation="grouped"` as the op runs it: its checks, its route, and ranks.

Launches are computed with JAX here; tests/kernels runs this package's kernels, tests/gpu the rest.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jaxtyping import Array

import jax_megamoe as mm
from jax_megamoe.compile import MissingDependency
from jax_megamoe.launch import grouped
from jax_megamoe.numerics import expert
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.grouped.call import GroupedLayer
from jax_megamoe.plan.grouped.rules import layout_of
from jax_megamoe.weights.experts import dequantize_biases, dequantize_experts
from jax_megamoe.weights.params import MATRIX_FIELDS, ExpertMatrices, ExpertWeights


@pytest.fixture
def hopper(monkeypatch) -> list[GroupedLayer]:
    """A device to plan for, Humming's headers found, and launches by JAX; returns what is run."""
    launched: list[GroupedLayer] = []

    def launch(each: GroupedLayer, operands: dict[str, Array]) -> dict[str, Array]:
        launched.append(each)
        return computed(each, operands)

    monkeypatch.setattr(grouped, "spec_of", lambda *_: DeviceSpec(90, 132))
    monkeypatch.setattr(grouped.compiler, "find_source", lambda _: SimpleNamespace())
    monkeypatch.setattr(grouped.launcher, "build", lambda _: None)
    monkeypatch.setattr(grouped, "launch_layer", launch)
    return launched


def computed(each: GroupedLayer, operands: dict[str, Array]) -> dict[str, Array]:
    """A layer without roundings between the products, out of its operands."""
    fields = {name: operands[name] for name in MATRIX_FIELDS if name in operands}
    layout = layout_of(each.weights, each.activations)
    weights = ExpertWeights(ExpertMatrices(**fields), None, each.weights, layout)
    if each.activations == "nvfp4":  # the second scale has the inputs' in it already
        weights = weights.with_routed(w2_input_scale=None)
    config = mm.MoEConfig(
        num_experts=each.num_experts,
        top_k=1,
        hidden_size=each.hidden_size,
        intermediate_size=each.intermediate_size,
        max_num_tokens=each.num_tokens,
        weight_format=each.weights,
    )
    gate, up, down = dequantize_experts(config, weights)
    if each.activations == "nvfp4":
        down = down / operands["w2_input_scale"][0]
    biases = dequantize_biases(weights)
    ids = operands["topk_ids"]
    if "padding_mask" in operands:
        ids = jnp.where(operands["padding_mask"][:, None], -1, ids)
    activation = mm.Activation(each.activation, clamp=each.clamp, alpha=each.alpha, beta=each.beta)
    x = operands["x"].astype(jnp.float32)
    y = jnp.zeros_like(x)
    for e in range(each.num_experts):
        g, u = x @ gate[e].T, x @ up[e].T
        if biases:
            g, u = g + biases["gate_bias"][e][None], u + biases["up_bias"][e][None]
        out = expert.activate(g, u, activation) @ down[e].T
        out = out + (biases["down_bias"][e][None] if biases else 0)
        y = y + out * jnp.where(ids == e, operands["topk_weights"], 0).sum(1)[:, None]
    outputs = {"y": y.astype(x.dtype).astype(jnp.bfloat16)}
    if each.stats:
        outputs["stats"] = expert.count_tokens(ids, each.num_experts)
    return outputs


def call_of(config: mm.MoEConfig, num_tokens: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shape = (num_tokens, config.top_k)
    ids = np.argsort(rng.random((num_tokens, config.num_experts)), axis=1)[:, : config.top_k]
    return {
        "x": jnp.asarray(rng.standard_normal((num_tokens, config.hidden_size)), jnp.bfloat16),
        "topk_ids": jnp.asarray(np.where(rng.random(shape) < 0.1, -1, ids), jnp.int32),
        "topk_weights": jnp.asarray(rng.random(shape), jnp.float32),
    }


def near(got: Array, want: Array, form: str) -> None:
    """`computed` does not round tokens and hidden values: ACCURACY says how far that is."""
    a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
    limit = {"fp8_block": 0.06, "mxfp4": 0.06, "mxfp8": 0.06, "nvfp4": 0.2, "bf16": 0.01}[form]
    assert np.linalg.norm(a - b) < limit * np.linalg.norm(b)


@pytest.mark.parametrize("form", ["fp8_block", "mxfp4", "nvfp4", "bf16"])
def test_one_rank(hopper, form):
    config = cases.config(form, num_experts=8, top_k=2)
    weights = cases.weights(config, gain=1.0, biased=form in ("mxfp4", "bf16"))
    moved = mm.to_layout(weights, layout_of(form, config.recipe.activations.name))
    call, mask = call_of(config, 13), np.arange(13) % 5 == 2
    run = partial(mm.mega_moe, config=config, padding_mask=mask, return_stats=True)
    y, counts = run(**call, weights=moved, implementation="grouped")
    want, wanted = run(**call, weights=weights, implementation="reference")
    near(y, want, form)
    np.testing.assert_array_equal(counts, wanted)
    assert not np.asarray(y, np.float32)[mask].any()
    (each,) = hopper
    assert (each.num_tokens, each.num_experts, each.padding_mask, each.stats) == (13, 8, True, True)
    assert each.weighs_in_combine == (form == "nvfp4") and each.rounds


@pytest.mark.parametrize("fast_math", [True, False])
def test_fast_math_is_the_configs(hopper, fast_math):
    config = cases.config("bf16", num_experts=8, top_k=2, fast_math=fast_math)
    run = partial(mm.mega_moe, config=config, implementation="grouped")
    # A trace of its own: what is launched is seen there.
    run(**call_of(config, 5), weights=cases.weights(config))
    assert [each.fast_math for each in hopper] == [fast_math]


def test_weights_in_its_layout_choose_it(hopper):
    config = cases.config("mxfp4", num_experts=8, top_k=2)
    moved = mm.to_layout(cases.weights(config), mm.GROUPED_BF16)
    mm.mega_moe(**call_of(config, 3), weights=moved, config=config)
    assert len(hopper) == 1


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4", "bf16"])
@pytest.mark.parametrize("skewed", [False, True])
def test_ranks_between_two_exchanges(hopper, form, skewed):
    # A trace of its own: what is launched is seen there.
    config = cases.config(form, num_experts=8, top_k=2, max_num_tokens=63 + skewed)
    weights = cases.weights(config, gain=1.0)
    moved = mm.to_layout(weights, layout_of(form, config.recipe.activations.name))
    mesh = Mesh(np.array(jax.devices()[:4]), ("ep",))
    call = call_of(config, 32)
    if skewed:
        call["topk_ids"] = jnp.where(call["topk_ids"] >= 0, call["topk_ids"] % 2, -1)
    run = partial(mm.mega_moe, config=config, return_stats=True)
    y, counts = run(**call, weights=moved, mesh=mesh, axis="ep", implementation="grouped")
    want, wanted = run(**call, weights=weights, implementation="reference")
    near(y, want, form)
    np.testing.assert_array_equal(counts, wanted)
    assert {each.num_experts for each in hopper} == {2} and {each.top_k for each in hopper} == {1}


def test_a_shared_expert_is_added(hopper):
    config = cases.config("mxfp4", num_experts=8, top_k=2, num_shared_experts=1)
    weights = cases.weights(config, gain=1.0)
    moved = mm.to_layout(weights, mm.GROUPED_BF16)
    call = call_of(config, 5)
    y = mm.mega_moe(**call, weights=moved, config=config, implementation="grouped")
    near(y, mm.mega_moe(**call, weights=weights, config=config, implementation="xla"), "mxfp4")


@pytest.mark.parametrize("form", ["mxfp4", "fp8_block"])
def test_xla_and_reference_read_its_layouts(form):
    config = cases.config(form, num_experts=4, top_k=2)
    weights = cases.weights(config, biased=True)
    call = call_of(config, 9)
    for layout in [name for name, forms in mm.GROUPED_LAYOUTS.items() if form in forms]:
        moved = mm.to_layout(weights, layout)
        outputs = [
            mm.mega_moe(**call, weights=moved, config=config, implementation=name)
            for name in ("xla", "reference")
        ]
        near(*outputs, form)
        want = mm.mega_moe(**call, weights=weights, config=config, implementation="xla")
        # Of fp8_block the grouped kernels round gate and up.
        near(outputs[0], want, form)


def test_gradients_are_those_of_xla(hopper):
    config = cases.config("mxfp4", num_experts=4, top_k=2)
    weights = cases.weights(config)
    moved = mm.to_layout(weights, mm.GROUPED_BF16)
    call = call_of(config, 5)

    def total(x: Array, weights: ExpertWeights, implementation: str) -> Array:
        rest = {name: array for name, array in call.items() if name != "x"}
        y = mm.mega_moe(x, **rest, weights=weights, config=config, implementation=implementation)
        return y.astype(jnp.float32).sum()

    got = jax.grad(total)(call["x"], moved, "grouped")
    np.testing.assert_array_equal(got, jax.grad(total)(call["x"], weights, "xla"))


def refused(form: str, message: str, error: type[Exception], **changes: Any) -> None:
    config = cases.config(form, num_experts=4, top_k=2, **changes)
    weights = cases.weights(config)
    with pytest.raises(error, match=message):
        mm.mega_moe(**call_of(config, 3), weights=weights, config=config, implementation="grouped")


def test_refusals(hopper, monkeypatch):
    text = r"weights\.layout: expected 'humming_bf16' for implementation grouped, got 'interleave8'"
    refused("mxfp4", text + r"; jax_megamoe\.to_layout\(weights, 'humming_bf16'\)", ValueError)
    monkeypatch.setattr(grouped, "spec_of", lambda *_: DeviceSpec(80, 108))
    text = r"implementation grouped: expected compute capability 9\.0 or 10\.0 for bf16 weights, "
    text += r"got bf16 weights and bf16 activations on 8\.0; use xla"
    refused("bf16", text, NotImplementedError)
    monkeypatch.setattr(grouped, "spec_of", lambda *_: DeviceSpec(75, 40))
    text = r"expected compute capability 8\.0 or newer, got mxfp4 weights .* on 7\.5"
    refused("mxfp4", text, NotImplementedError)


def test_bf16_weights_choose_it(hopper):
    config = cases.config("bf16", num_experts=8, top_k=2)
    weights, call = cases.weights(config, gain=1.0), call_of(config, 3)
    y = mm.mega_moe(**call, weights=weights, config=config)
    assert len(hopper) == 1
    near(y, mm.mega_moe(**call, weights=weights, config=config, implementation="xla"), "bf16")
    mesh = Mesh(np.array(jax.devices()[:2]), ("ep",))
    call = call_of(config, 4)
    mm.mega_moe(**call, weights=weights, config=config, mesh=mesh, axis="ep")
    assert len(hopper) == 1  # one rank alone


def test_bf16_weights_on_blackwell_take_it_where_it_is_named(hopper, monkeypatch):
    """Nothing was measured there, so no call takes it by itself."""
    monkeypatch.setattr(grouped, "spec_of", lambda *_: DeviceSpec(103, 148))
    config = cases.config("bf16", num_experts=8, top_k=2)
    weights, call = cases.weights(config, gain=1.0), call_of(config, 3)
    run = partial(mm.mega_moe, **call, weights=weights, config=config)
    y = run()
    assert not hopper
    near(run(implementation="grouped"), y, "bf16")
    assert [each.arch for each in hopper] == [100]
    for biases in (False, True):
        assert grouped.layer_layout(config, jax.devices()[0], 1, None, adds_biases=biases) is None
    assert grouped.layer_layout(config, jax.devices()[0], 1, "grouped") == "interleave8"


def test_missing_headers_name_the_command(hopper, monkeypatch):
    def absent(name: str) -> None:
        raise MissingDependency(f"{name} is not installed")

    monkeypatch.setattr(grouped.compiler, "find_source", absent)
    config = cases.config("mxfp4", num_experts=4, top_k=2)
    moved = mm.to_layout(cases.weights(config), mm.GROUPED_BF16)
    call = partial(mm.mega_moe, **call_of(config, 3), weights=moved, config=config)
    with pytest.raises(MissingDependency, match="humming is not installed"):
        call(implementation="grouped")
    assert call().shape == (3, config.hidden_size)  # by xla


def test_experts_beyond_the_sort_are_refused(hopper, monkeypatch):
    monkeypatch.setattr(grouped.rules, "MAX_EXPERTS", 3)
    config = cases.config("mxfp4", num_experts=4, top_k=2)
    moved = mm.to_layout(cases.weights(config), mm.GROUPED_BF16)
    with pytest.raises(ValueError, match="experts of a rank: expected at most 3 for "):
        mm.mega_moe(**call_of(config, 3), weights=moved, config=config, implementation="grouped")


def test_without_a_gpu_it_is_refused():
    config = cases.config("mxfp4", num_experts=4, top_k=2)
    moved = mm.to_layout(cases.weights(config), mm.GROUPED_BF16)
    with pytest.raises(NotImplementedError, match="device: expected a CUDA device"):
        mm.mega_moe(**call_of(config, 3), weights=moved, config=config, implementation="grouped")
