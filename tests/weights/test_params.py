"""weights/params.py: shapes of the parameters, and what `check_weights` refuses."""

import dataclasses
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_megamoe as mm
from jax_megamoe.weights.params import (
    check_weights,
    default_layout,
    known_layouts,
    layout_of,
    parameter_shapes,
)

BYTES = {"mxfp4": 0.5 + 1 / 32, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16, "bf16": 2.0}

SHAPES = {
    # For E 16, H 256, I 128, by hand: stored dtype, [E, 2I, H / v], scale words.
    "mxfp4": ("uint8", (16, 256, 128), "int32", (16, 2, 256), (16, 256, 64), (16, 1, 256)),
    "mxfp4_bf16": ("uint8", (16, 256, 128), "int32", (16, 2, 256), (16, 256, 64), (16, 1, 256)),
    "mxfp8": ("float8_e4m3fn", (16, 256, 256), "int32", (16, 2, 256), (16, 256, 128), (16, 1, 256)),
    "nvfp4": ("uint8", (16, 8, 32, 128), "int32", (16, 4, 8, 32), (16, 256, 64), (16, 2, 256)),
    "bf16": ("bfloat16", (16, 256, 256), None, None, (16, 256, 128), None),
    "fp8_block": (
        "float8_e4m3fn",
        (16, 256, 256),
        "float32",
        (16, 2, 2),
        (16, 256, 128),
        (16, 2, 1),
    ),
    "mxfp4_block": ("uint8", (16, 2, 2, 8704), None, None, (16, 2, 1, 8704), None),
    "nvfp4_block": ("uint8", (16, 256, 160), None, None, (16, 256, 80), None),
}


@pytest.mark.parametrize("form", cases.RECIPES)
def test_shapes(form: str) -> None:
    storage, w13, scale_dtype, w13_scale, w2, w2_scale = SHAPES[form]
    shapes = parameter_shapes(cases.config(form), has_biases=True).routed.arrays()
    want = {"w13_weight": (w13, storage), "w2_weight": (w2, storage)}
    if scale_dtype is not None:
        want["w13_weight_scale"] = (w13_scale, scale_dtype)
        want["w2_weight_scale"] = (w2_scale, scale_dtype)
    if form == "nvfp4":
        for name in ("w13_weight_scale_2", "w2_weight_scale_2", "w2_input_scale"):
            want[name] = ((16,), "float32")
    if form.endswith("4_block"):
        for name in ("w13_weight_scale_2", "w2_weight_scale_2"):
            want[name] = ((16,), "float32")
    bias = (16, 8, 32) if form == "nvfp4" else (16, 256)
    want["w13_bias"], want["w2_bias"] = (bias, "float32"), ((16, 256), "float32")
    assert {name: (s.shape, str(s.dtype)) for name, s in shapes.items()} == want
    assert parameter_shapes(cases.config(form), 2).routed.w13_weight.shape == (2, *w13[1:])


def test_shapes_of_a_shared_expert() -> None:
    shapes = parameter_shapes(cases.config("mxfp4", num_shared_experts=2)).shared
    assert shapes is not None
    assert {name: (each.shape, str(each.dtype)) for name, each in shapes.arrays().items()} == {
        "w13_weight": ((512, 256), "float8_e4m3fn"),
        "w13_weight_scale": ((2, 512), "int32"),
        "w2_weight": ((256, 256), "float8_e4m3fn"),
        "w2_weight_scale": ((2, 256), "int32"),
    }
    bf16 = parameter_shapes(cases.config("nvfp4", num_shared_experts=1, shared_format="bf16"))
    assert bf16.shared is not None and list(bf16.shared.arrays()) == ["w13_weight", "w2_weight"]
    none = parameter_shapes(cases.config("fp8_block", num_shared_experts=1))
    assert none.shared is None


@pytest.mark.parametrize("form", BYTES)
def test_bytes(form: str) -> None:
    values = 16 * 3 * 256 * 128
    globals_ = 16 * 3 * 4 if form == "nvfp4" else 0
    assert cases.weights(cases.config(form)).num_bytes == values * BYTES[form] + globals_


@pytest.mark.parametrize("form", cases.FORMATS)
def test_every_layout_of_a_format_has_shapes_of_its_own(form: str) -> None:
    """So that arrays say their layout, whoever moves them."""
    cfg = cases.config(form)
    found: dict[tuple[Any, ...], str] = {}
    for layout in known_layouts(cfg):
        for by_row in (False, True):
            routed = parameter_shapes(cfg, layout=layout, by_row=by_row).routed
            shapes = {n: each for n, each in routed.arrays().items() if "_weight" in n}
            key = tuple((name, each.shape, str(each.dtype)) for name, each in shapes.items())
            assert found.setdefault(key, layout) == layout
            assert layout_of(cfg, routed) == layout
    with pytest.raises(
        ValueError, match=r"^the layer's parameters: expected dtypes and shapes of one of the"
    ):
        layout_of(cfg, mm.ExpertMatrices(jnp.zeros((1, 3)), jnp.zeros((1, 3))))


@pytest.mark.parametrize("name", ["w13_weight", "w13_weight_scale"])
def test_fields_of_two_row_orders(name: str) -> None:
    cfg = cases.config("nvfp4")
    other = mm.to_layout(cases.weights(cfg), "interleave8")
    mixed = cases.weights(cfg).with_routed(**{name: getattr(other.routed, name)})
    message = r"^weights.routed.w13_.*: expected shape .*; the arrays are not in the layout sgl_fp4"
    with pytest.raises(ValueError, match=message):
        check_weights(cfg, mixed)


def test_is_a_pytree_with_a_static_format() -> None:
    weights = cases.weights(cases.config("nvfp4", num_shared_experts=1))
    leaves, tree = jax.tree.flatten(weights)
    assert len(leaves) == len(weights.arrays()) == 11
    again = jax.tree.unflatten(tree, leaves)
    assert (again.format, again.layout) == ("nvfp4", "interleave8")
    with pytest.raises(dataclasses.FrozenInstanceError):
        weights.format = "bf16"  # type: ignore[misc]


def test_partition_specs_split_experts_and_replicate_the_shared_one() -> None:
    weights = cases.weights(cases.config("mxfp8", num_shared_experts=1), biased=True)
    specs = weights.partition_specs(("host", "chip"))
    assert specs.arrays().keys() == weights.arrays().keys()
    for name, spec in specs.arrays().items():
        assert spec == (P() if name.startswith("shared.") else P(("host", "chip"))), name


@pytest.mark.parametrize(
    ("form", "source", "layout"),
    [
        ("nvfp4", "sgl", "sgl_fp4"),
        ("mxfp4", "sgl", "interleave8"),
        ("nvfp4", "vllm", "interleave8"),
        ("fp8_block", None, "interleave8"),
    ],
)
def test_default_layout(form: str, source: str | None, layout: str) -> None:
    assert default_layout(cases.config(form, kernel_source=source)) == layout


NVFP4 = cases.config("nvfp4", num_shared_experts=1)

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"format": "mxfp4"},
        ValueError,
        r"weights.format: expected 'nvfp4' \(config.weight_format\), got 'mxfp4'; quantise or load "
        r"the weights with the same config",
    ),
    (
        {"layout": "halves"},
        ValueError,
        r"weights.layout: expected one of \['sgl_fp4', 'interleave8', 'humming_bf16'\], got "
        r"'halves'",
    ),
    (
        {"routed.w2_weight": None},
        ValueError,
        r"weights.routed.w2_weight: expected an array, got None",
    ),
    (
        {"routed.w13_weight": None},
        ValueError,
        r"weights.routed.w13_weight: expected an array, got None",
    ),
    (
        {"routed.w13_weight_scale": None},
        ValueError,
        r"weights.routed.w13_weight_scale: expected an array, got None",
    ),
    (
        {"routed.w2_weight_scale_2": None},
        ValueError,
        r"weights.routed.w2_weight_scale_2: expected an array, got None",
    ),
    (
        {"routed.w2_input_scale": None},
        ValueError,
        r"weights.routed.w2_input_scale: expected an array, got None",
    ),
    (
        {"shared.w2_weight": None},
        ValueError,
        r"weights.shared.w2_weight: expected an array, got None",
    ),
    (
        {"shared.w13_weight": None},
        ValueError,
        r"weights.shared.w13_weight: expected an array, got None",
    ),
    (
        {"routed.w13_bias": jnp.zeros((16, 256))},
        ValueError,
        r"weights.routed.w2_bias: expected an array, got None",
    ),
    (
        {"routed.w2_bias": jnp.zeros((16, 256))},
        ValueError,
        r"weights.routed.w13_bias: expected an array, got None",
    ),
    (
        {"routed.w13_weight": jnp.zeros((16, 256, 256), jnp.uint8)},
        ValueError,
        r"weights.routed.w13_weight: expected shape \[16, 256, 128\], got shape \[16, 256, 256\]",
    ),
    (
        {"routed.w13_weight": jnp.zeros((16, 256, 128), jnp.int8)},
        TypeError,
        r"weights.routed.w13_weight: expected dtype uint8, got int8",
    ),
    (
        {"routed.w2_weight_scale": jnp.zeros((16, 2, 256), jnp.uint32)},
        TypeError,
        r"weights.routed.w2_weight_scale: expected dtype int32, got uint32",
    ),
    (
        {"routed.w2_input_scale": jnp.zeros((8,))},
        ValueError,
        r"weights.routed.w2_input_scale: expected shape \[16\], got shape \[8\]",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED)
def test_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    weights = cases.weights(NVFP4)
    for path, value in changes.items():
        part, _, name = path.rpartition(".")
        if not part:
            weights = dataclasses.replace(weights, **{name: value})
        else:
            matrices = dataclasses.replace(getattr(weights, part), **{name: value})
            weights = dataclasses.replace(weights, **{part: matrices})
    with pytest.raises(error, match=f"^{message}$"):
        check_weights(NVFP4, weights)


def test_refused_for_the_config() -> None:
    mxfp8 = cases.config("mxfp8")
    weights = cases.weights(mxfp8)
    superfluous = weights.with_routed(w2_input_scale=jnp.zeros(16))
    message = (
        r"^weights.routed.w2_input_scale: expected None: this config has no such parameter, got"
    )
    with pytest.raises(ValueError, match=message):
        check_weights(mxfp8, superfluous)
    tiled = weights.routed.w13_weight.reshape(16, 8, 32, 256)
    message = (
        r"^weights.routed.w13_weight: expected shape \[16, 256, 256\], got shape \[16, 8, 32, 256\]"
    )
    with pytest.raises(ValueError, match=message):
        check_weights(mxfp8, weights.with_routed(w13_weight=tiled))
    message = r"^weights.layout: expected one of \['interleave8', 'humming_bf16'\], got 'sgl_fp4'$"
    with pytest.raises(ValueError, match=message):
        check_weights(mxfp8, dataclasses.replace(weights, layout="sgl_fp4"))
    message = (
        r"^weights.routed.w13_weight: expected shape \[2, 256, 256\], got shape \[16, 256, 256\]$"
    )
    with pytest.raises(ValueError, match=message):
        check_weights(mxfp8, weights, 2)
    message = r"^weights: expected an ExpertWeights \(from quantize_experts or load_experts\), got"
    with pytest.raises(TypeError, match=message):
        check_weights(mxfp8, {"w13_weight": np.zeros(3)})  # type: ignore[arg-type]


@pytest.mark.parametrize("form", cases.RECIPES)
def test_accepted_with_and_without_shared_and_biases(form: str) -> None:
    plain = cases.config(form)
    check_weights(plain, cases.weights(plain))
    check_weights(plain, cases.weights(plain, biased=True))
    shared = cases.config(form, num_shared_experts=1)
    check_weights(shared, cases.weights(plain))
    check_weights(shared, cases.weights(shared))
