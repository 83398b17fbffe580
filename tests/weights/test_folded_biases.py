"""folded_biases.py: biases as columns of the first matrix, bit for bit, and back."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType

import jax_megamoe as mm
from jax_megamoe.formats import RECIPES
from jax_megamoe.numerics.tokens import quantize_tokens
from jax_megamoe.plan.folding import COLUMNS, CONSTANTS
from jax_megamoe.weights import folded_biases
from jax_megamoe.weights.experts import dequantize_biases
from jax_megamoe.weights.params import check_weights

FORMATS = tuple(COLUMNS)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
HIDDEN = 192
"""Of the model; the config's is 256."""


def finite_biases() -> np.ndarray:
    """Every finite bfloat16, 65,280 of them."""
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    return every[np.isfinite(every.astype(np.float32))]


def mxfp4_values(columns: np.ndarray) -> np.ndarray:
    """Float64 of E2M1 pairs, by the format's definition."""
    codes = np.stack([columns & 15, columns >> 4], -1).reshape(len(columns), -1)
    return np.where(codes & 8, -1, 1) * E2M1[codes & 7]


def mxfp8_values(columns: np.ndarray) -> np.ndarray:
    return columns.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


@pytest.mark.parametrize(
    ("fold", "unfold", "values", "most"),
    [
        (folded_biases.mxfp4_columns, folded_biases.mxfp4_biases, mxfp4_values, 22),
        (folded_biases.mxfp8_columns, folded_biases.mxfp8_biases, mxfp8_values, 2),
    ],
    ids=["mxfp4", "mxfp8"],
)
def test_every_finite_bfloat16(
    fold: Callable[..., Any], unfold: Callable[..., Any], values: Callable[..., Any], most: int
) -> None:
    """Subnormals, both zeros and the largest too: no scale leaves UE8M0's range."""
    biases = finite_biases()
    assert biases.size == 65_280
    columns, exponents = map(np.asarray, jax.jit(fold)(jnp.asarray(biases)))
    assert exponents.max() == 253 and exponents.min() == 0  # 255 is NaN
    decoded = values(columns) * 2.0 ** (exponents.astype(np.float64)[:, None] - 127)
    assert decoded.shape == (65_280, 32)
    assert np.count_nonzero(decoded, axis=1).max() == most
    # Exact in float64: 8 significant bits, exponents from -133 to 127.
    np.testing.assert_array_equal(decoded.sum(axis=1) * 2.0**-5, biases.astype(np.float64))
    assert CONSTANTS["mxfp4"] == CONSTANTS["mxfp8"] == 2.0**-5
    back = np.asarray(jax.jit(unfold)(jnp.asarray(columns), jnp.asarray(exponents)))
    np.testing.assert_array_equal(back.view(np.uint16), biases.view(np.uint16))


@pytest.mark.parametrize("form", FORMATS)
def test_any_order_of_float32_sums_is_exact(form: str) -> None:
    """What a kernel's accumulator sees alone: the products, in another order each time."""
    biases = finite_biases()
    magnitude = np.abs(biases.astype(np.float64))
    # No product is subnormal, no column beyond float32.
    biases = biases[(magnitude >= 2.0**-112) & (magnitude < 2.0**123)]
    if form == "bf16":
        decoded = biases.astype(np.float32)[:, None]
    else:
        fold = getattr(folded_biases, f"{form}_columns")
        columns, exponents = map(np.asarray, fold(jnp.asarray(biases)))
        values = mxfp4_values(columns) if form == "mxfp4" else mxfp8_values(columns)
        decoded = np.ldexp(values, exponents.astype(int)[:, None] - 127).astype(np.float32)
    products = decoded * np.float32(CONSTANTS[form])
    rng = np.random.default_rng(0)
    for _ in range(3):
        total = np.zeros(len(biases), np.float32)
        for column in rng.permutation(products.shape[1]):
            total = total + products[:, column]
        np.testing.assert_array_equal(total, biases.astype(np.float32))


@pytest.mark.parametrize("form", FORMATS)
def test_tokens_hold_the_constant_exactly(form: str) -> None:
    """Beside values of any size, in a group of its own."""
    cfg = cases.config(form)
    rows = np.random.default_rng(0).standard_normal((4, cfg.hidden_size))
    x = jnp.asarray(rows * np.array([[1e30], [1e-30], [1.0], [0.0]]), jnp.bfloat16)
    column = cfg.hidden_size - COLUMNS[form]
    places = slice(column, None)
    decoded = jax.jit(lambda x: quantize_tokens(x, cfg.recipe).decoded().astype(jnp.float32))
    tokens, plain = decoded(x.at[:, places].set(CONSTANTS[form])), decoded(x)
    np.testing.assert_array_equal(tokens[:, places], np.float32(CONSTANTS[form]))
    np.testing.assert_array_equal(tokens[:, :column], plain[:, :column])


def test_activations_that_do_not_hold_it() -> None:
    """Why fp8_block and NVFP4 activations are refused."""

    @jax.jit
    def quantised(x: jax.Array) -> dict[str, Any]:
        return {name: quantize_tokens(x, RECIPES[name]) for name in ("fp8_block", "nvfp4")}

    constant = jnp.full((1, 256), 2.0**-5, jnp.bfloat16).at[0, :128].set(3.3).at[0, 200].set(0.7)
    tokens = quantised(constant)
    # A value in the same 128 columns takes the scale, amax / 448, off the powers of two.
    blocks = np.asarray(jax.jit(lambda each: each.decoded())(tokens["fp8_block"]))
    assert (blocks[0, 128:200] != 2.0**-5).all()
    # The token's scale is amax / (448 * 6), whatever is in the group of 16.
    decoded = np.asarray(jax.jit(lambda each: each.decoded())(tokens["nvfp4"]), np.float64)
    decoded *= np.asarray(tokens["nvfp4"].token_scale, np.float64)[:, None]
    assert (decoded[0, 128:192] != 2.0**-5).all()


def biased(form: str, **changes: Any) -> tuple[mm.MoEConfig, mm.ExpertWeights]:
    """A layer of a model of hidden size 192 with biases of all exponents."""
    cfg = cases.config(form, **changes)
    pool = np.random.default_rng(5).permutation(finite_biases())
    sizes = (cfg.intermediate_size, cfg.intermediate_size, cfg.hidden_size)
    gate, up, down = (
        jnp.asarray(np.resize(pool[7 * i :], (cfg.logical_experts, size)))
        for i, size in enumerate(sizes)
    )
    return cfg, cases.filled_up(cfg, HIDDEN, (gate, up, down))


@pytest.mark.parametrize("form", FORMATS)
def test_parameters_fold_and_unfold(form: str) -> None:
    cfg, weights = biased(form)
    folded = mm.fold_biases(cfg, weights)
    check_weights(cfg, folded)
    assert folded.folds_biases and folded.routed.w13_bias is None and not weights.folds_biases
    assert (
        folded.routed.w2_bias is weights.routed.w2_bias
        and folded.routed.w2_weight is weights.routed.w2_weight
    )
    assert folded.num_bytes == weights.num_bytes - weights.routed.w13_bias.nbytes
    back = mm.unfold_biases(folded)
    assert not back.folds_biases and mm.unfold_biases(weights) is weights
    for name in ("w13_weight", "w13_bias"):
        got, want = (np.asarray(each.arrays()[f"routed.{name}"]) for each in (back, weights))
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8), err_msg=name)
    # Matrices and biases as they were, -0.0 and subnormals included.
    for got, want in zip(
        mm.dequantize_experts(cfg, folded), mm.dequantize_experts(cfg, weights), strict=True
    ):
        np.testing.assert_array_equal(got, want)
    of_folded, of_plain = dequantize_biases(folded), dequantize_biases(weights)
    assert [*of_folded] == [*of_plain] == ["gate_bias", "up_bias", "down_bias"]
    for name, want in of_plain.items():
        bits, of_want = (np.asarray(each).view(np.uint32) for each in (of_folded[name], want))
        np.testing.assert_array_equal(bits, of_want, err_msg=name)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_sharded_parameters(kind: AxisType) -> None:
    cfg, weights = biased("mxfp4")
    mesh = cases.ep_mesh(4, kind)
    spread = cases.sharded(weights, weights.partition_specs("ep"), mesh)
    folded, want = mm.fold_biases(cfg, spread), mm.fold_biases(cfg, weights)
    for name, array in folded.arrays().items():
        assert array.sharding.spec[0] == "ep", name
        np.testing.assert_array_equal(
            np.asarray(array).view(np.uint8), np.asarray(want.arrays()[name]).view(np.uint8)
        )
    bias = mm.unfold_biases(folded).routed.w13_bias
    assert bias.sharding.spec[0] == "ep"
    np.testing.assert_array_equal(
        np.asarray(bias).view(np.uint32), np.asarray(weights.routed.w13_bias).view(np.uint32)
    )


def test_other_layouts_get_the_biases_back() -> None:
    cfg, weights = biased("mxfp4")
    folded = mm.fold_biases(cfg, weights)
    for layout in ("humming_bf16", "flashinfer_mxfp4"):
        got, want = (mm.to_layout(each, layout) for each in (folded, weights))
        assert not got.folds_biases
        np.testing.assert_array_equal(
            np.asarray(got.routed.w13_bias).view(np.uint32),
            np.asarray(want.routed.w13_bias).view(np.uint32),
        )
        np.testing.assert_array_equal(
            *(np.asarray(mm.dequantize_experts(cfg, each)[0]) for each in (got, want))
        )


def test_saved_parameters_are_unfolded(tmp_path: Any) -> None:
    cfg, weights = biased("mxfp4")
    mm.save_experts(tmp_path / "a", cfg, weights)
    mm.save_experts(tmp_path / "b", cfg, mm.fold_biases(cfg, weights))
    one, other = (mm.load_converted(tmp_path / name, cfg) for name in "ab")
    assert not other.folds_biases
    np.testing.assert_array_equal(other.routed.w13_weight, one.routed.w13_weight)
    np.testing.assert_array_equal(
        np.asarray(other.routed.w13_bias).view(np.uint32),
        np.asarray(one.routed.w13_bias).view(np.uint32),
    )


@pytest.mark.parametrize(
    ("form", "error", "text"),
    [
        ("nvfp4", NotImplementedError, r"recipe: expected mxfp4 or mxfp8 or bf16, .*got nvfp4; "),
        ("fp8_block", NotImplementedError, r"recipe: expected .*exactly in columns, got fp8_block"),
        ("mxfp4_block", NotImplementedError, r"recipe: expected .* got mxfp4_block; .*xla"),
    ],
)
def test_recipes_that_hold_no_bias(form: str, error: type[Exception], text: str) -> None:
    cfg = cases.config(form)
    with pytest.raises(error, match=text):
        mm.fold_biases(cfg, cases.weights(cfg, biased=True))


def test_errors() -> None:
    cfg, weights = biased("mxfp4")
    full = cases.weights(cfg, biased=True)
    text = (
        r"weights.routed.w13_weight: expected zeros in the last 32 columns, got others; make the "
        r"config"
    )
    with pytest.raises(ValueError, match=text):
        mm.fold_biases(cfg, full)
    for value in (1 + 2.0**-9, np.inf):
        other = weights.with_routed(w13_bias=weights.routed.w13_bias.at[1, 3].set(value))
        text = r"weights.routed.w13_bias: expected finite bfloat16 values.* got others; round them"
        with pytest.raises(ValueError, match=text):
            mm.fold_biases(cfg, other)
    folded = mm.fold_biases(cfg, weights)
    for each, got in ((folded, "folded ones"), (cases.weights(cfg), "none")):
        with pytest.raises(
            ValueError, match=f"weights.routed.w13_bias: expected biases, got {got}"
        ):
            mm.fold_biases(cfg, each)
    with pytest.raises(ValueError, match=r"weights.layout: expected the layout of a fused kernel"
                                         r".*got 'humming_bf16'"):  # fmt: skip
        mm.fold_biases(cfg, mm.to_layout(weights, "humming_bf16"))


def test_a_fused_shared_expert_would_multiply_the_constant() -> None:
    cfg = cases.config("mxfp4", num_shared_experts=1)
    weights = replace(cases.weights(cfg), **vars(cases.weights(cfg, biased=True)))
    with pytest.raises(ValueError, match=r"weights.shared: expected none beside folded biases.*"
                                         r"got a fused one; pass it to mega_moe"):  # fmt: skip
        mm.fold_biases(cfg, weights)
    with pytest.raises(ValueError, match=r"weights.shared: expected none beside folded biases"):
        check_weights(cfg, weights.with_routed(w13_bias=None))


def test_what_parameters_may_say() -> None:
    """Second biases alone mean folded ones, where the recipe and the layout have such."""
    cfg, weights = biased("mxfp4")
    grouped = mm.to_layout(weights, "humming_bf16")
    text = r"weights.routed.w13_bias: expected an array, got None; the grouped products add biases"
    with pytest.raises(ValueError, match=text):
        check_weights(cfg, grouped.with_routed(w13_bias=None))
    block = cases.config("mxfp4_block")
    of_block = cases.weights(block, biased=True).with_routed(w13_bias=None)
    with pytest.raises(ValueError, match=r"weights.routed.w13_bias: expected an array, got None$"):
        check_weights(block, of_block)
