"""Parameters of layers that the grouped products run: loaded, reloaded and kept in their layout."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import checkpoint_files as files
import jax.numpy as jnp
import numpy as np
import pytest
import transformers_cases
from checkpoint_files import PREFIX
from emulation import B200, H200
from fake_cuda import FakeDevice

import jax_megamoe as mm
from jax_megamoe import compile
from jax_megamoe.launch import grouped
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.weights.regroup import fuses_exactly, to_grouped

LAYOUTS = {
    "fp8_block": "humming_fp8",
    "mxfp4_block": "humming_fp8",
    "mxfp4": "humming_bf16",
    "mxfp4_bf16": "humming_bf16",
    "mxfp8": "humming_bf16",
    "nvfp4": "humming_bf16",
}
"""By recipe, on compute capability 9.0."""

GPT_OSS = next(case for case in transformers_cases.CASES if case.name == "gpt_oss")


def checkpoint(seed: int = 0, spread: float = 0.0) -> dict[str, np.ndarray]:
    """Four experts of hidden size 256; `spread`: binades by which an expert's columns differ."""
    tensors = files.per_expert(files.floats(np.random.default_rng(seed), 4, 256, 128))
    for name, array in tensors.items():
        scale = 2.0 ** np.linspace(spread / 2, -spread / 2, array.shape[1])
        tensors[name] = (array.astype(np.float32) * scale).astype(array.dtype)
    return tensors


def config(recipe: str) -> mm.MoEConfig:
    return cases.config(recipe, num_experts=4, hidden_size=256, intermediate_size=128)


def load(
    recipe: str, tensors: dict[str, np.ndarray], layout: str | None = None
) -> mm.ExpertWeights:
    return mm.load_experts(config(recipe), tensors, prefix=PREFIX, progress=False, layout=layout)


def in_rows(recipe: str, tensors: dict[str, np.ndarray]) -> mm.ExpertWeights:
    """Loaded for a kernel that reads rows as they are."""
    own = config(recipe)
    plain = replace(own, activation_format=None) if recipe == "mxfp4_block" else own
    return mm.load_experts(plain, tensors, prefix=PREFIX, progress=False)


def assert_same(got: mm.ExpertWeights, want: mm.ExpertWeights) -> None:
    assert got.layout == want.layout
    files.assert_same(got, want)


@pytest.mark.parametrize("recipe", LAYOUTS)
def test_loading_gives_what_to_layout_gives(recipe: str) -> None:
    tensors, layout = checkpoint(), LAYOUTS[recipe]
    assert_same(load(recipe, tensors, layout), mm.to_layout(in_rows(recipe, tensors), layout))


def test_loading_into_a_layout_that_the_format_has_not() -> None:
    text = "layout: expected one of ['interleave8', 'humming_bf16'], got 'humming_fp8'"
    with pytest.raises(ValueError, match=re.escape(text)):
        load("mxfp8", checkpoint(), "humming_fp8")


@pytest.mark.parametrize("recipe", LAYOUTS)
def test_a_layer_converts_for_the_implementation_it_names(
    recipe: str, on_device: Callable[..., None]
) -> None:
    on_device(H200, products=True)
    weights = load(recipe, checkpoint())
    layer = mm.MegaMoE(config(recipe), weights, implementation="grouped")
    assert_same(layer.weights, mm.to_layout(weights, LAYOUTS[recipe]))


@pytest.mark.parametrize(
    ("recipe", "device", "layout"),
    [
        ("mxfp8", H200, "humming_bf16"),
        ("mxfp4", H200, "humming_bf16"),
        ("bf16", H200, "interleave8"),  # which its products read
        ("fp8_block", H200, "interleave8"),  # the fused kernel runs it
        ("mxfp8", B200, "interleave8"),
        ("mxfp8", DeviceSpec(80, 108), "interleave8"),  # where the products have not run
    ],
)
def test_a_layer_without_an_implementation(
    recipe: str, device: DeviceSpec, layout: str, on_device: Callable[..., None]
) -> None:
    on_device(device, products=True)
    sizes = dict(hidden_size=512, intermediate_size=256)
    weights = cases.weights(cases.config(recipe, **sizes))
    layer = mm.MegaMoE(cases.config(recipe, **sizes), weights)
    assert layer.layout == layout
    x, ids, factors = cases.tokens(layer.config, 8)
    want = mm.mega_moe(x, ids, factors, layer.weights, config=layer.config, implementation="xla")
    layer.implementation = "xla"
    np.testing.assert_array_equal(
        np.asarray(layer(x, ids, factors), np.float32), np.asarray(want, np.float32)
    )


def test_what_keeps_a_layer_from_the_products(on_device: Callable[..., None]) -> None:
    own, weights = config("mxfp8"), load("mxfp8", checkpoint())
    on_device(H200)
    assert mm.MegaMoE(own, weights).layout == "interleave8"
    on_device(H200, products=True)
    assert mm.MegaMoE(own, weights, implementation="xla").layout == "interleave8"
    assert mm.MegaMoE(own, weights, mesh=cases.ep_mesh(2), axis="ep").layout == "interleave8"
    moved = mm.to_layout(weights, "humming_bf16")
    on_device(H200)
    assert mm.MegaMoE(own, moved).layout == "humming_bf16"


@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA H100"])
def test_a_layer_goes_by_measured_times(
    kind: str, on_device: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mxfp4_block an H200 was faster with the products at all numbers of tokens."""
    on_device(H200, products=True)
    monkeypatch.setattr(compile, "has_source", lambda _: True)
    own = cases.config("mxfp4_block", hidden_size=1024, intermediate_size=512)
    device: Any = FakeDevice(0, device_kind=kind)
    want = "humming_fp8" if kind == "NVIDIA H200" else None
    assert grouped.layer_layout(own, device, 1, None) == want


def test_experts_with_biases(on_device: Callable[..., None]) -> None:
    """The fused kernel adds none, so the products run a recipe that it has."""
    on_device(H200, products=True)
    own = cases.config("fp8_block", hidden_size=512, intermediate_size=256)
    plain = cases.weights(own)
    gate, up, down = mm.dequantize_experts(own, plain)
    biases = (jnp.ones(gate.shape[:2]), jnp.ones(up.shape[:2]), jnp.ones(down.shape[:2]))
    weights = mm.quantize_experts(own, gate, up, down, biases=biases)
    assert mm.MegaMoE(own, plain).layout == "interleave8"
    assert mm.MegaMoE(own, weights).layout == "humming_fp8"


@pytest.mark.parametrize("recipe", LAYOUTS)
def test_reloading_some_experts(recipe: str) -> None:
    old, new, layout = checkpoint(0), checkpoint(1), LAYOUTS[recipe]
    some = {name: array for name, array in new.items() if f"{PREFIX}.2." in name}
    got = mm.reload_experts(
        config(recipe), load(recipe, old, layout), some, prefix=PREFIX, progress=False
    )
    assert_same(got, load(recipe, old | some, layout))


def test_reloading_keeps_second_scales_of_matrices(caplog: pytest.LogCaptureFixture) -> None:
    """Values that they cannot hold are rounded, which is said; shapes stay."""
    near, far = checkpoint(), checkpoint(1, spread=20)
    weights = load("mxfp4_block", near, "humming_fp8")
    assert weights.routed.w13_weight_scale_2.shape == (4,)
    got = mm.reload_experts(config("mxfp4_block"), weights, far, prefix=PREFIX, progress=False)
    want = in_rows("mxfp4_block", far)
    assert not fuses_exactly(want)
    assert_same(got, to_grouped(want, "humming_fp8", by_row=False))
    assert "over 11 powers of two below the largest" in caplog.text
    assert load("mxfp4_block", far, "humming_fp8").routed.w13_weight_scale_2.shape == (4, 256)


@pytest.mark.parametrize("recipe", LAYOUTS)
def test_files_hold_the_layout(recipe: str, tmp_path: Path) -> None:
    own, weights = config(recipe), load(recipe, checkpoint(), LAYOUTS[recipe])
    mm.save_experts(tmp_path / "layer.safetensors", own, weights)
    assert_same(mm.load_converted(tmp_path / "layer.safetensors", own), weights)


def test_replace_wants_the_shapes_of_the_layer() -> None:
    own, near, far = config("mxfp4_block"), checkpoint(), checkpoint(1, spread=20)
    layer = mm.MegaMoE(own, load("mxfp4_block", near, "humming_fp8"))
    text = "w13_weight_scale_2: expected shape [4], got shape [4, 256]; as the layer has"
    with pytest.raises(ValueError, match=re.escape(text)):
        layer.replace(load("mxfp4_block", far, "humming_fp8"))


def test_gpt_oss_block_on_hopper(on_device: Callable[..., None]) -> None:
    """Its recorded block, loaded into the products' layout with biases of its own."""
    make = mm.MegaMoEBlock.from_config
    options = dict(max_num_tokens=transformers_cases.TOKENS, weight_format="mxfp4")
    plain = make(GPT_OSS.hf_config, **options, implementation="xla")
    on_device(H200, products=True)
    block = make(GPT_OSS.hf_config, **options)
    for each in (plain, block):
        each.load(transformers_cases.checkpoint(GPT_OSS), GPT_OSS.layer_index or 0)
    assert block.experts.layout == "humming_bf16" and not block.experts.folds_biases
    block.experts.implementation = "xla"
    x = jnp.asarray(transformers_cases.inputs(GPT_OSS)[0])
    got, want = (np.asarray(each(x), np.float32) for each in (block, plain))
    np.testing.assert_array_equal(got, want)
