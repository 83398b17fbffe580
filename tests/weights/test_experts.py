"""weights/experts.py: float matrices to kernel layout and back."""

from functools import partial
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import NamedSharding

import jax_megamoe as mm
from jax_megamoe.weights.drawn import random_experts
from jax_megamoe.weights.experts import dequantize_biases, dequantize_shared
from jax_megamoe.weights.params import check_weights

# Relative error of one cast of normal values: rounding to 8, 4 or 2 significant bits.
ROUNDING = {
    "bf16": (0.0, 0.0),
    "mxfp8": (0.024, 0.029),
    "fp8_block": (0.022, 0.028),
    "mxfp4": (0.105, 0.125),
    "nvfp4": (0.088, 0.102),
    "mxfp4_block": (0.105, 0.125),
    "mxfp4_bf16": (0.105, 0.125),
    # As nvfp4, and an eighth of them rounded to E4M3 again.
    "nvfp4_block": (0.088, 0.106),
}


@pytest.mark.parametrize("form", cases.RECIPES)
def test_dequantize_is_the_inverse(form: str) -> None:
    cfg = cases.config(form)
    parts = cases.float_matrices(cfg)["routed"]
    got = mm.dequantize_experts(cfg, mm.quantize_experts(cfg, *parts))
    low, high = ROUNDING[form]
    for name, back, want in zip(("gate", "up", "down"), got, parts, strict=True):
        assert back.shape == want.shape and back.dtype == jnp.float32
        error = cases.relative_error(back, want.astype(jnp.float32))
        assert low <= error <= high, f"{name}: {error}"
    again = mm.dequantize_experts(cfg, mm.quantize_experts(cfg, *got))
    for back, first in zip(again, got, strict=True):
        if form in ("bf16", "mxfp8", "mxfp4", "mxfp4_block", "mxfp4_bf16"):
            np.testing.assert_array_equal(back, first)


@pytest.mark.parametrize(
    ("form", "source"), [*((form, None) for form in cases.RECIPES), ("nvfp4", "sgl")]
)
def test_rows_stand_where_the_kernel_reads_them(form: str, source: str | None) -> None:
    """Against the oracle, which finds each weight and scale by its own formulas."""
    cfg = cases.config(form, kernel_source=source, num_experts=3, top_k=1)
    weights = cases.weights(cfg, biased=True)
    got = mm.dequantize_experts(cfg, weights)
    for part, want in zip(got, oracle.experts(weights, form), strict=True):
        np.testing.assert_array_equal(part, want)
    biases = dequantize_biases(weights)
    for part, want in zip(biases.values(), oracle.biases(weights), strict=True):
        np.testing.assert_array_equal(part, want)


@pytest.mark.parametrize(
    ("form", "shared_format"), [*((form, None) for form in cases.FUSING), ("nvfp4", "bf16")]
)
def test_shared_expert(form: str, shared_format: str | None) -> None:
    cfg = cases.config(form, shared_format=shared_format, num_shared_experts=2)
    weights = cases.weights(cfg)
    got = dequantize_shared(cfg, weights)
    assert [part.shape for part in got] == [(256, 256), (256, 256), (256, 256)]
    want = oracle.shared(weights, str(cfg.shared_format))
    for part, bytes_, plain in zip(
        got, want, cases.float_matrices(cfg, gain=4.0)["shared"], strict=True
    ):
        np.testing.assert_array_equal(part, bytes_)
        error = cases.relative_error(part, plain.astype(jnp.float32))
        assert error <= ROUNDING[str(cfg.shared_format)][1]


@pytest.mark.parametrize("biased", [False, True])
def test_nvfp4_rows_moved_between_the_layouts(biased: bool) -> None:
    by_source = {
        source: cases.weights(cases.config("nvfp4", kernel_source=source), biased=biased)
        for source in ("sgl", "vllm")
    }
    for old, new in (("sgl", "vllm"), ("vllm", "sgl")):
        want = by_source[new]
        moved = mm.to_layout(by_source[old], want.layout)
        assert jax.tree.structure(moved) == jax.tree.structure(want)
        for name, array in want.arrays().items():
            np.testing.assert_array_equal(moved.arrays()[name], array, err_msg=name)
        assert mm.to_layout(moved, want.layout) is moved


def test_moved_rows_stay_on_their_devices() -> None:
    cfg, mesh = cases.config("nvfp4"), cases.ep_mesh(8)
    specs = cases.weights(cfg).partition_specs("ep")
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    placed = jax.device_put(cases.weights(cfg), shardings)
    moved = mm.to_layout(placed, "interleave8")
    for name, array in moved.arrays().items():
        assert array.sharding.is_equivalent_to(shardings.arrays()[name], array.ndim), name


def test_layouts_that_do_not_exist() -> None:
    text = r"layout: expected one of \['interleave8', 'sgl_fp4', .*\], got 'rows'"
    with pytest.raises(ValueError, match=f"^{text}$"):
        mm.to_layout(cases.weights(cases.config("nvfp4")), "rows")
    text = r"layout of mxfp4: expected one of \['interleave8', 'flashinfer_mxfp4'\], got 'sgl_fp4'"
    with pytest.raises(ValueError, match=f"^{text}$"):
        mm.to_layout(cases.weights(cases.config("mxfp4")), "sgl_fp4")


@pytest.mark.parametrize(("form", "biased"), [("mxfp4", False), ("mxfp4", True), ("nvfp4", False)])
def test_moved_into_one_array_and_back(form: str, biased: bool) -> None:
    """A layout of FlashInfer's holds what quantising for it gives, and goes back."""
    plain = cases.weights(cases.config(form), biased=biased)
    want = cases.weights(cases.config(f"{form}_block"), biased=biased)
    moved = mm.to_layout(plain, want.layout)
    assert jax.tree.structure(moved) == jax.tree.structure(want)
    for name, array in want.arrays().items():
        np.testing.assert_array_equal(moved.arrays()[name], array, err_msg=name)
    back = mm.to_layout(moved, plain.layout)
    if form == "nvfp4":  # the input scale is not in it, and the scales have moved
        again = mm.dequantize_experts(cases.config(form), back)
        for got, part in zip(again, mm.dequantize_experts(cases.config(form), plain), strict=True):
            np.testing.assert_allclose(got, part, rtol=1e-6)
        return
    assert jax.tree.structure(back) == jax.tree.structure(plain)
    for name, array in plain.arrays().items():
        np.testing.assert_array_equal(back.arrays()[name], array, err_msg=name)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_float_dtypes_by_value(dtype: str) -> None:
    cfg = cases.config("mxfp4")
    parts = [part.astype(dtype) for part in cases.float_matrices(cfg)["routed"]]
    got = mm.quantize_experts(cfg, *parts)
    rounded = [part.astype(jnp.bfloat16).astype(jnp.float32) for part in parts]
    want = mm.quantize_experts(cfg, *rounded) if dtype == "float32" else got
    for name, array in got.arrays().items():
        np.testing.assert_array_equal(array, want.arrays()[name], name)


def test_traced() -> None:
    cfg = cases.config("nvfp4", num_shared_experts=1)
    parts = cases.float_matrices(cfg)
    quantise = partial(mm.quantize_experts, cfg)
    eager = quantise(*parts["routed"], shared=parts["shared"])
    jitted = jax.jit(quantise)(*parts["routed"], shared=parts["shared"])
    for name, array in eager.arrays().items():
        np.testing.assert_array_equal(jitted.arrays()[name], array, name)


def test_all_physical_experts_are_taken_as_they_are() -> None:
    cfg = cases.config("bf16", num_logical_experts=12)
    plain = cases.config("bf16")
    parts = cases.float_matrices(plain)["routed"]
    got = mm.dequantize_experts(cfg, mm.quantize_experts(cfg, *parts))
    for part, want in zip(got, parts, strict=True):
        np.testing.assert_array_equal(part, want.astype(jnp.float32))


def test_input_scales_and_biases_follow_their_experts() -> None:
    cfg = cases.config("nvfp4", num_logical_experts=12)
    parts = cases.float_matrices(cfg)["routed"]
    scales = jnp.arange(12, dtype=jnp.float32)
    biases = tuple(jnp.ones((12, n)) * scales[:, None] for n in (128, 128, 256))
    weights = mm.quantize_experts(cfg, *parts, w2_input_scale=scales, biases=biases)
    np.testing.assert_array_equal(weights.routed.w2_input_scale, np.arange(16) % 12)
    for bias in (weights.routed.w13_bias[:, 0], weights.routed.w2_bias):
        np.testing.assert_array_equal(bias[:, 0], np.arange(16) % 12)
    plain = mm.quantize_experts(cfg, *parts)
    np.testing.assert_array_equal(plain.routed.w2_input_scale, np.zeros(16))


@pytest.mark.parametrize("form", cases.RECIPES)
def test_random_experts(form: str) -> None:
    cfg = cases.config(form, num_shared_experts=int(form in cases.FUSING))
    weights = random_experts(cfg, jax.random.key(0))
    check_weights(cfg, weights)
    assert (weights.shared is not None) == (form in cases.FUSING)
    for part in mm.dequantize_experts(cfg, weights):
        np.testing.assert_allclose(part.std() * part.shape[-1] ** 0.5, 1, rtol=0.03)


CONFIG = cases.config("mxfp8", num_shared_experts=1)
PARTS = cases.float_matrices(CONFIG)
NAMES = dict(zip(("gate", "up", "down"), PARTS["routed"], strict=True))


def shared(**changes: Any) -> tuple[Any, ...]:
    return tuple((dict(zip(NAMES, PARTS["shared"], strict=True)) | changes).values())


def biases(*sizes: int, dtype: Any = jnp.float32, fill: float = 0) -> tuple[Any, ...]:
    return tuple(jnp.full((16, size), fill, dtype) for size in sizes)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"gate": NAMES["gate"][:, :64]},
        ValueError,
        r"gate: expected shape \[16, 128, 256\], got shape \[16, 64, 256\]",
    ),
    (
        {"gate": NAMES["gate"][:15]},
        ValueError,
        r"gate: expected shape \[16, 128, 256\], got shape \[15, 128, 256\]",
    ),
    ({"gate": NAMES["gate"][0]}, ValueError, r"gate: expected shape \[16, 128, 256\], got shape"),
    (
        {"up": NAMES["up"].swapaxes(1, 2)},
        ValueError,
        r"up: expected shape \[16, 128, 256\], got shape \[16, 256, 128\]",
    ),
    (
        {"down": NAMES["up"]},
        ValueError,
        r"down: expected shape \[16, 256, 128\], got shape \[16, 128, 256\]",
    ),
    (
        {"down": NAMES["down"].astype(jnp.float8_e5m2)},
        TypeError,
        r"down: expected one of the dtypes \['bfloat16', 'float16', 'float32'\], got float8_e5m2",
    ),
    (
        {"up": NAMES["up"].astype(jnp.int32)},
        TypeError,
        r"up: expected one of the dtypes \['bfloat16', 'float16', 'float32'\], got int32",
    ),
    (
        {"gate": NAMES["gate"].at[3, 2, 1].set(jnp.nan)},
        ValueError,
        r"gate: expected finite values, got NaN or infinity",
    ),
    (
        {"down": NAMES["down"].at[3, 2, 1].set(-jnp.inf)},
        ValueError,
        r"down: expected finite values, got NaN or infinity",
    ),
    (
        {"shared": shared(gate=PARTS["shared"][0][:64])},
        ValueError,
        r"shared gate: expected shape \[128, 256\], got shape \[64, 256\]",
    ),
    (
        {"shared": shared(down=PARTS["shared"][0])},
        ValueError,
        r"shared down: expected shape \[256, 128\], got shape \[128, 256\]",
    ),
    (
        {"shared": shared(up=PARTS["shared"][1].astype(jnp.uint8))},
        TypeError,
        r"shared up: expected one of the dtypes \[.*\], got uint8",
    ),
    (
        {"shared": shared(up=PARTS["shared"][1].at[0, 0].set(jnp.inf))},
        ValueError,
        r"shared up: expected finite values, got NaN or infinity",
    ),
    (
        {"biases": biases(128, 128, 128)},
        ValueError,
        r"down bias: expected shape \[16, 256\], got shape \[16, 128\]",
    ),
    (
        {"biases": biases(128, 128, 256, dtype=jnp.int32)},
        TypeError,
        r"gate bias: expected one of the dtypes \[.*\], got int32",
    ),
    (
        {"biases": biases(128, 128, 256, fill=jnp.nan)},
        ValueError,
        r"gate bias: expected finite values, got NaN or infinity",
    ),
    (
        {"w2_input_scale": jnp.ones(16)},
        ValueError,
        r"w2_input_scale: expected None for mxfp8, got an array",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED)
def test_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        mm.quantize_experts(CONFIG, **(NAMES | changes))


INPUT_SCALES: list[tuple[Any, type[Exception], str]] = [
    (jnp.ones(8), ValueError, r"w2_input_scale: expected shape \[16\], got shape \[8\]"),
    (
        jnp.ones(16, jnp.bfloat16),
        TypeError,
        r"w2_input_scale: expected dtype float32, got bfloat16",
    ),
    (
        jnp.ones(16).at[3].set(jnp.nan),
        ValueError,
        r"w2_input_scale: expected finite values, got NaN or infinity",
    ),
]


@pytest.mark.parametrize(("scale", "error", "message"), INPUT_SCALES)
def test_refused_input_scales(scale: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        mm.quantize_experts(cases.config("nvfp4"), **NAMES, w2_input_scale=scale)


def test_refused_shared_experts() -> None:
    hint = "pass the shared expert to mega_moe as a function instead"
    cfg = cases.config("fp8_block", num_shared_experts=1)
    message = rf"^shared: expected None: fp8_block kernels fuse no shared expert, got .*; {hint}$"
    with pytest.raises(ValueError, match=message):
        mm.quantize_experts(cfg, **NAMES, shared=shared())
    message = rf"^shared: expected None where config.num_shared_experts is 0, got matrices; {hint}$"
    with pytest.raises(ValueError, match=message):
        mm.quantize_experts(cases.config("mxfp8"), **NAMES, shared=shared())
    message = r"^weights: expected a fused shared expert, got none$"
    with pytest.raises(ValueError, match=message):
        dequantize_shared(cases.config("bf16"), cases.weights(cases.config("bf16")))
