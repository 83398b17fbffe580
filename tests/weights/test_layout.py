"""layout.py against the recorded layouts, behaviour's index formulas, and its own inverses."""

import golden_records as golden
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_megamoe.numerics.elements import expand_scales, unpack_words
from jax_megamoe.weights import layout

CASES = ["E2_H256_I128", "E1_H512_I256"]
HOST_OR_DEVICE = pytest.mark.parametrize("put", [np.asarray, jnp.asarray], ids=["numpy", "jax"])


@HOST_OR_DEVICE
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("format_name", ["mxfp4", "mxfp8", "nvfp4"])
def test_scaled_parameters_are_laid_out_as_recorded(format_name, case, put):
    name = f"{format_name}_{case}"
    stored = golden.arrays("layouts")
    l1, l1_scale = put(stored[f"{name}_l1_in"]), put(stored[f"{name}_l1_sf_in"])
    l2_scale = put(stored[f"{name}_l2_sf_in"])
    outputs = {"interleave8": "vllm", "sgl_fp4": "sgl_packed"}
    if format_name == "mxfp8":
        del outputs["sgl_fp4"]
    for tag, source in outputs.items():
        weight = layout.w13_to_kernel(l1, tag)
        words = layout.w13_scale_to_kernel(l1_scale, tag)
        golden.assert_recorded("layouts", f"{name}_l1_out_{source}", weight)
        golden.assert_recorded("layouts", f"{name}_l1_sf_out_{source}", words.swapaxes(-1, -2))
        golden.assert_same(layout.w13_from_kernel(weight, tag), l1)
        golden.assert_same(layout.w13_scale_from_kernel(words, tag), l1_scale)
    words = layout.w2_scale_to_kernel(l2_scale)
    golden.assert_recorded("layouts", f"{name}_l2_sf_out", words.swapaxes(-1, -2))
    golden.assert_same(layout.w2_scale_from_kernel(words), l2_scale)


@pytest.mark.parametrize("case", CASES)
def test_bf16_rows_are_laid_out_as_recorded(case):
    weight = golden.bfloat16("layouts", f"bf16_{case}_l1_in")
    out = layout.w13_to_kernel(weight, "interleave8")
    assert out.dtype == ml_dtypes.bfloat16
    golden.assert_recorded("layouts", f"bf16_{case}_l1_out", out)


@HOST_OR_DEVICE
@pytest.mark.parametrize("case", CASES)
def test_a_coarse_grid_is_repeated_as_recorded(case, put):
    coarse = put(golden.arrays("layouts")[f"pack_scale_128_{case}_in"])
    rows, columns = coarse.shape
    fine = expand_scales("w2_weight_scale", coarse, (128 * rows, 4 * columns))
    golden.assert_recorded(
        "layouts", f"pack_scale_128_{case}_out", layout.pack_scales(fine).swapaxes(0, 1)
    )


def test_w13_rows_follow_the_formulas():
    half_rows = 128
    source = np.arange(2 * half_rows)
    half, r = np.divmod(source, half_rows)
    weight = layout.w13_to_kernel(source[:, None], "interleave8")[:, 0]
    assert (weight[r // 8 * 16 + 8 * half + r % 8] == source).all()
    scale_rows = layout.UTCCP.apply(weight, axis=0)
    b, rest = np.divmod(r, 64)
    j, rest = np.divmod(rest, 16)
    q, m = np.divmod(rest, 8)
    assert (scale_rows[128 * b + 64 * q + 32 * half + 4 * m + j] == source).all()
    fp4 = layout.w13_to_kernel(source, "sgl_fp4", axis=0)
    assert fp4[:32].tolist() == [
        *range(0, 16, 2), *range(128, 144, 2), *range(1, 16, 2), *range(129, 144, 2)
    ]  # fmt: skip


def test_gate_and_up_are_told_apart():
    w13 = np.concatenate([np.full((1, 64, 4), 1), np.full((1, 64, 4), 2)], axis=1)
    assert layout.w13_to_kernel(w13, "interleave8")[0, :16, 0].tolist() == [1] * 8 + [2] * 8


def test_words_have_the_lowest_k_in_the_lowest_byte_and_rows_contiguous():
    scales = np.arange(2 * 8, dtype=np.uint8).reshape(2, 8)
    words = layout.pack_scales(scales)
    assert words.tolist() == [[0x03020100, 0x0B0A0908], [0x07060504, 0x0F0E0D0C]]


@settings(max_examples=40, deadline=None)
@given(
    order=st.sampled_from([layout.INTERLEAVE8, layout.SGL_FP4, layout.UTCCP]),
    leading=st.lists(st.integers(1, 3), max_size=2),
    periods=st.integers(1, 3),
    columns=st.integers(1, 3),
    dtype=st.sampled_from(["uint8", "bfloat16", "float8_e4m3fn", "float32"]),
    device=st.booleans(),
)
def test_every_order_is_a_permutation_with_an_inverse(
    order, leading, periods, columns, dtype, device
):
    shape = (*leading, periods * order.multiple, columns)
    rng = np.random.default_rng(periods)
    rows = rng.integers(0, 120, shape).astype(np.uint8).astype(jnp.dtype(dtype))
    moved = order.apply(jnp.asarray(rows) if device else rows)
    assert isinstance(moved, jax.Array if device else np.ndarray)
    assert moved.dtype == rows.dtype
    golden.assert_same(order.undo(moved), rows)
    ordinals = order.apply(np.arange(shape[-2]), axis=0)
    golden.assert_same(moved, rows[..., ordinals, :])


@pytest.mark.parametrize("dtype", ["uint8", "float8_e8m0fnu", "float8_e4m3fn"])
def test_scale_words_take_any_byte_dtype(dtype):
    scales = np.arange(128 * 4, dtype=np.uint8).reshape(1, 128, 4).view(jnp.dtype(dtype))
    host = layout.w2_scale_to_kernel(scales)
    golden.assert_same(jax.jit(layout.w2_scale_to_kernel)(scales), host)
    golden.assert_same(layout.w2_scale_from_kernel(host), scales)
    golden.assert_same(jax.jit(layout.w2_scale_from_kernel)(host), scales)


def test_scales_that_do_not_tile_are_refused_with_both_shapes():
    for shape in [(3, 4), (2, 3), (2, 4, 1), (0, 4)]:
        text = r"down_proj: expected a grid that tiles \[256, 8\] exactly, got shape \["
        with pytest.raises(ValueError, match=text):
            expand_scales("down_proj", np.zeros(shape, np.uint8), (256, 8))
    with pytest.raises(ValueError, match=r"tiles \[2, 256, 8\] exactly, got shape \[1, 2, 4\]"):
        expand_scales("down_proj", np.zeros((1, 2, 4), np.uint8), (2, 256, 8))
    assert expand_scales("x", np.zeros((0, 4), np.uint8), (0, 8)).shape == (0, 8)


def test_wrong_arguments_are_named():
    scale = np.zeros((1, 64, 4), np.uint8)
    with pytest.raises(ValueError, match="rows in utccp order: expected a multiple of 128, got 64"):
        layout.w2_scale_to_kernel(scale)
    with pytest.raises(ValueError, match="rows in interleave8 order: expected a multiple of 16"):
        layout.w13_to_kernel(np.zeros((24, 4)), "interleave8")
    known = r"\['interleave8', 'sgl_fp4', 'flashinfer_mxfp4', 'flashinfer_nvfp4'\], got 'halves'"
    with pytest.raises(ValueError, match=f"layout: expected one of {known}"):
        layout.w13_to_kernel(scale, "halves")
    with pytest.raises(ValueError, match="last axis of scales: expected a multiple of 4, got 6"):
        layout.pack_scales(np.zeros((128, 6), np.uint8))
    with pytest.raises(TypeError, match=r"scales: expected one of the dtypes .* got float32"):
        layout.w2_scale_to_kernel(np.zeros((1, 128, 4), np.float32))
    with pytest.raises(TypeError, match="words: expected dtype int32, got uint8"):
        unpack_words(scale)
