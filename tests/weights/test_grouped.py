"""Layouts of the grouped products' weights: recorded ones, inverses, and conversions of layers."""

import json
from pathlib import Path
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_megamoe as mm
from jax_megamoe.weights import grouped
from jax_megamoe.weights.experts import dequantize_biases, dequantize_experts
from jax_megamoe.weights.params import check_weights, parameter_shapes
from jax_megamoe.weights.regroup import from_grouped, fuses_exactly, to_grouped

RECORDS = np.load(Path(__file__).parents[1] / "golden" / "humming_layouts.npz")
CASES: list[dict[str, Any]] = json.loads(bytes(RECORDS["meta"]))


def codes_of(weight: np.ndarray, bits: int) -> np.ndarray:
    if bits == 8:
        return weight
    return np.stack((weight & 15, weight >> 4), -1).reshape(*weight.shape[:-1], -1)


def padded(case: dict[str, Any]) -> tuple[np.ndarray, int, int]:
    """A case's weights with its padding, bits of a weight, bits of the rows."""
    _, form, activation, _ = case["case"].split(".")
    bits, config = 8 if "fp8" in form else 4, case["config"]
    weight = RECORDS[case["inputs"]["weight"]]
    extra = ((0, 0), (0, config["pad_shape_n"]), (0, config["pad_shape_k"] * bits // 8))
    return np.pad(weight, extra), bits, 16 if activation == "bf16" else 8


def padded_scales(case: dict[str, Any]) -> np.ndarray:
    """Scale bytes with the package's padding of fused scales: the largest of the row, then of the
    matrix."""
    config = case["config"]
    scale = RECORDS[case["inputs"]["scale"]]
    groups = config["shape_k"] // 32 - scale.shape[2]
    scale = np.concatenate((scale, np.repeat(scale.max(-1, keepdims=True), groups, 2)), -1)
    rows = config["shape_n"] - scale.shape[1]
    largest = np.broadcast_to(scale.max((1, 2), keepdims=True), (len(scale), rows, scale.shape[2]))
    return np.concatenate((scale, largest), 1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_words_are_the_recorded_ones(case):
    weight, bits, row_bits = padded(case)
    config, outputs = case["config"], case["outputs"]
    want = RECORDS[outputs["weight"]]
    if case["flat"]:
        got = grouped.to_flat(weight)
        np.testing.assert_array_equal(got.ravel().view(np.uint8), want.ravel().view(np.uint8))
        np.testing.assert_array_equal(grouped.from_flat(got), weight)
        return
    codes = codes_of(weight, bits)
    fused, packed_k = config["use_fused_e8m0_scale"], config["use_packed_k_layout"]
    how = grouped.Packing(bits, row_bits, fused, packed_k)
    if fused:
        by_row = config["weight_scale_2_type"] == "channel"
        found = grouped.fuse(codes, padded_scales(case), by_row=by_row)
        codes = found.codes
        scale = grouped.transpose_eights(found.scale.swapaxes(-1, -2))
        np.testing.assert_array_equal(scale, RECORDS[outputs["weight_scale"]])
        second = grouped.second_scale(found.lowest)
        np.testing.assert_array_equal(grouped.lowest_of(second), found.lowest)
        if by_row:
            rows = second[..., 0].copy()
            rows[:, config["shape_n"] - config["pad_shape_n"] :] = 0
            bits_of_rows = grouped.to_thirtytwos(rows).view(np.uint32) >> 16
            np.testing.assert_array_equal(bits_of_rows, RECORDS[outputs["weight_scale_2"]])
        else:
            np.testing.assert_array_equal(second.ravel(), RECORDS[outputs["weight_scale_2"]])
    got = grouped.pack(codes, how)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(grouped.unpack(got, how, *codes.shape[1:]), codes)


def test_scales_by_group_and_biases_are_the_recorded_ones():
    counted = {"scale": 0, "bias": 0}
    for case in CASES:
        config, outputs = case["config"], case["outputs"]
        form = case["case"].split(".")[1]
        if "bias" in case["inputs"]:
            bias = np.pad(RECORDS[case["inputs"]["bias"]], ((0, 0), (0, config["pad_shape_n"])))
            np.testing.assert_array_equal(grouped.to_thirtytwos(bias), RECORDS[outputs["bias"]])
            np.testing.assert_array_equal(grouped.to_thirtytwos(grouped.to_thirtytwos(bias)), bias)
            counted["bias"] += 1
        if config["use_fused_e8m0_scale"] or form == "fp8_block":
            continue
        scale = RECORDS[case["inputs"]["scale"]]
        filled = 0 if form == "nvfp4" else 127
        groups = RECORDS[outputs["weight_scale"]].shape[1] - scale.shape[2]
        extra = ((0, 0), (0, config["pad_shape_n"]), (0, groups))
        scale = np.pad(scale, extra, constant_values=filled)
        got = grouped.transpose_eights(scale.swapaxes(-1, -2))
        np.testing.assert_array_equal(got, RECORDS[outputs["weight_scale"]])
        np.testing.assert_array_equal(grouped.transpose_eights(got), scale.swapaxes(-1, -2))
        counted["scale"] += 1
    assert counted == {"scale": 8, "bias": 8}


LAYOUTS = [(form, layout) for layout, forms in mm.GROUPED_LAYOUTS.items() for form in forms]


@pytest.mark.parametrize(("form", "layout"), LAYOUTS)
def test_layers_come_back_as_they_were(form, layout):
    # 384 rows of w2 are padded to 512.
    config = cases.config(form, hidden_size=384, num_experts=4, top_k=2)
    weights = cases.weights(config, biased=True)
    for by_row in (False, True) if (form, layout) == ("mxfp4", mm.GROUPED_FP8) else (None,):
        moved = to_grouped(weights, layout, by_row=by_row)
        check_weights(config, moved)
        shapes = parameter_shapes(
            config, None, layout, has_biases=True, by_row=bool(by_row)
        ).arrays()
        for name, array in moved.arrays().items():
            assert (array.shape, array.dtype) == (shapes[name].shape, shapes[name].dtype), name
        back = from_grouped(moved, weights.layout)
        for name, array in weights.arrays().items():
            assert jnp.array_equal(*map(as_bits, (array, back.arrays()[name]))), name
        for got, want in zip(
            dequantize_experts(config, moved), dequantize_experts(config, weights), strict=True
        ):
            np.testing.assert_array_equal(got, want)
        got, want = dequantize_biases(moved), dequantize_biases(weights)
        assert all(np.array_equal(got[name], want[name]) for name in want)


def as_bits(array: jax.Array) -> jax.Array:
    if array.dtype.itemsize == 1:
        return jax.lax.bitcast_convert_type(array, jnp.uint8)
    return array


def test_to_layout_goes_there_and_back():
    config = cases.config("nvfp4", num_experts=4, top_k=2)
    weights = cases.weights(config)
    moved = mm.to_layout(weights, mm.GROUPED_BF16)
    assert moved.layout == mm.GROUPED_BF16
    assert mm.to_layout(moved, mm.GROUPED_BF16) is moved
    for layout in ("interleave8", "sgl_fp4"):
        there = mm.to_layout(moved, layout)
        want = mm.to_layout(weights, layout)
        assert there.layout == layout
        for name, array in want.arrays().items():
            assert jnp.array_equal(*map(as_bits, (array, there.arrays()[name]))), name


def wide_scales(config: mm.MoEConfig, low: int, by_row: bool) -> mm.ExpertWeights:
    """MXFP4 whose blocks' scales are up to `low` powers of two below the largest, in one row or
    from row to row."""
    weights = cases.weights(config)
    scale = np.asarray(weights.routed.w2_weight_scale).view(np.uint8).copy()
    scale[:] = 120
    if by_row:
        scale.reshape(config.num_experts, -1)[:, ::7] = 120 - low
    else:
        scale[:, 0] = 120 - low
    words = scale.view(np.int32).reshape(weights.routed.w2_weight_scale.shape)
    return weights.with_routed(w2_weight_scale=jnp.asarray(words))


def test_second_scales_are_of_rows_where_one_would_change_values():
    config = cases.config("mxfp4", num_experts=4, top_k=2)
    weights = cases.weights(config)
    assert fuses_exactly(weights)
    assert to_grouped(weights, mm.GROUPED_FP8).routed.w2_weight_scale_2.ndim == 1
    wide = wide_scales(config, 12, by_row=True)
    assert not fuses_exactly(wide)
    assert to_grouped(wide, mm.GROUPED_FP8).routed.w2_weight_scale_2.ndim == 2
    traced = jax.eval_shape(lambda w: to_grouped(w, mm.GROUPED_FP8), weights)
    assert traced.routed.w2_weight_scale_2.ndim == 2


@pytest.mark.parametrize(("code", "delta", "want"), [
    *((7, 0, 7), (7, 1, 5), (7, 2, 3), (7, 3, 2), (7, 4, 1), (7, 5, 0), (15, 1, 13)),
    # Ties go away from zero: 2.5 to 3, 0.75 to 1, 0.25 to 0.5.
    *((1, 1, 1), (2, 2, 1), (3, 1, 2), (9, 1, 9), (1, 2, 0), (8, 0, 0), (9, 2, 8)),
])  # fmt: skip
def test_blocks_out_of_range_are_rounded(code, delta, want):
    """Of a block `11 + delta` powers of two below the largest, E2M1 codes under the lowest."""
    codes = np.zeros((1, 64, 64), np.uint8)
    codes[0, 0, 3] = code
    scale = np.full((1, 64, 2), 100, np.uint8)
    scale[0, 0, 0] = 100 - 11 - delta
    for by_row in (False, True):
        found = grouped.fuse(codes, scale, by_row=by_row)
        sign = want & 8 if code != 8 else 0
        assert found.codes[0, 0, 3] in (want, want & 7 | sign)
        assert found.scale[0, 0].tolist() == [1, 12]
        assert found.lowest.ravel()[0] == 89


def test_words_under_jit_are_those_of_numpy():
    codes = np.random.default_rng(0).integers(0, 16, (2, 128, 64), dtype=np.uint8)
    how = grouped.Packing(4, 8, fused=True, packed_k=True)
    got = jax.jit(grouped.pack, static_argnums=1)(codes, how)
    np.testing.assert_array_equal(got, grouped.pack(codes, how))
    back = jax.jit(grouped.unpack, static_argnums=(1, 2, 3))(got, how, 128, 64)
    np.testing.assert_array_equal(back, codes)


def test_second_scales_of_every_byte():
    lowest = np.arange(255, dtype=np.int32)
    second = grouped.second_scale(lowest)
    np.testing.assert_array_equal(second, np.ldexp(np.float32(1), lowest - 128))
    np.testing.assert_array_equal(grouped.lowest_of(second), lowest)


@pytest.mark.parametrize(
    ("form", "layout", "message"),
    [
        ("bf16", "humming_bf16", "format of layout humming_bf16: expected one of"),
        ("mxfp8", "humming_fp8", "format of layout humming_fp8: expected one of"),
        ("mxfp4", "humming", "layout: expected one of"),
    ],
)
def test_layouts_that_a_format_lacks_are_refused(form, layout, message):
    weights = cases.weights(cases.config(form, num_experts=4, top_k=2))
    with pytest.raises(ValueError, match=message):
        mm.to_layout(weights, layout)


@pytest.mark.parametrize(
    ("function", "shape", "message"),
    [
        (grouped.to_flat, (2, 8), "bytes of a row: expected a multiple of 16, got 8"),
        (grouped.transpose_eights, (1, 32), "rows of scales: expected a multiple of 64, got 32"),
        (grouped.to_thirtytwos, (48,), "rows of biases: expected a multiple of 32, got 48"),
        (
            lambda a: grouped.pack(a, grouped.Packing(4, 16)),
            (32, 64),
            "rows of a packed matrix: expected a multiple of 64, got 32",
        ),
        (
            lambda a: grouped.pack(a, grouped.Packing(4, 16)),
            (64, 32),
            "columns of a packed matrix: expected a multiple of 64, got 32",
        ),
    ],
)
def test_sizes_off_their_multiple_are_refused(function, shape, message):
    with pytest.raises(ValueError, match=message):
        function(np.zeros(shape, np.uint8))
