"""Which recipes hold biases exactly in columns, and what the others would make of the constant."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from emulation import B200, H200

import jax_megamoe as mm
from jax_megamoe.numerics.tokens import quantize_tokens
from jax_megamoe.plan import folding

HIDDEN = 512


def constants(activations: str, columns: int, value: float) -> np.ndarray:
    """What tokens of many sizes have in their last columns, once quantised."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1024, HIDDEN)) * 2.0 ** rng.uniform(-3, 3, (1024, 1))
    x[:, -columns:] = value
    quantised = quantize_tokens(jnp.asarray(x, jnp.bfloat16), mm.RECIPES[activations])
    decoded = np.asarray(quantised.decoded(), np.float64)
    if quantised.token_scale is not None:
        decoded *= np.asarray(quantised.token_scale, np.float64)[:, None]
    return decoded[:, -columns:]


@pytest.mark.parametrize("form", folding.CONSTANTS)
def test_the_constant_is_exact(form: str) -> None:
    value = folding.CONSTANTS[form]
    assert (constants(form, folding.COLUMNS[form], value) == value).all()


@pytest.mark.parametrize("form", ["nvfp4", "fp8_block"])
@pytest.mark.parametrize("value", [2.0**-5, 1.0])
def test_the_constant_would_be_another_in_each_token(form: str, value: float) -> None:
    """E4M3 values, of tokens or of NVFP4's scales, under a scale that is no power of two."""
    errors = np.abs(constants(form, 32, value) / value - 1)
    assert 0.05 < errors.max() <= 2**-4
    assert 0.01 < errors.mean() < 0.03


def test_fp8_block_would_hold_it_alone_in_its_block() -> None:
    """Its scale is then value / 448; no kernel with these tokens has GPT-OSS's activation."""
    value = 2.0**-5
    assert np.abs(constants("fp8_block", 128, value) / value - 1).max() <= 2.0**-23
    gpt_oss = mm.Activation("swiglu", clamp=7.0, alpha=1.702, beta=1.0)
    for name in ("fp8_block", "mxfp4_block", "nvfp4_block"):
        recipe = mm.RECIPES[name]
        config = mm.MoEConfig(
            num_experts=32, top_k=4, hidden_size=3072, intermediate_size=3072, max_num_tokens=128,
            weight_format=recipe.weights, activation_format=recipe.activations, activation=gpt_oss,
        )  # fmt: skip
        assert folding.unfoldable(config) is not None
        with pytest.raises((NotImplementedError, ValueError)):
            mm.check_supported(config, H200)


def test_fp8_block_would_hold_128_biases_within_16_octaves() -> None:
    """In units of their common scale: 128 columns of at most 448, in steps of 2^-9."""

    def is_e4m3(value: float) -> bool:
        return float(np.float32(value).astype(ml_dtypes.float8_e4m3fn)) == value

    largest, smallest = 255 * 2.0**7, 255 * 2.0**-9
    assert largest == 85 * 384 and is_e4m3(384) and not is_e4m3(480)
    assert smallest == 240 * 2.0**-9 + 15 * 2.0**-9
    assert is_e4m3(240 * 2.0**-9) and is_e4m3(15 * 2.0**-9) and not is_e4m3(2.0**-10)
    assert 255 * 2.0**8 > 128 * 448 and largest / smallest == 2**16


@pytest.mark.parametrize("form", folding.COLUMNS)
def test_cost_of_gpt_oss_is_its_second_biases(form: str) -> None:
    """192 of 3072 columns multiply zeros in any case."""
    config = gpt_oss_120b(form)
    cost = mm.folding_cost(config, B200, 8, hidden_size=2880)
    assert cost.folded == cost.plain
    assert (cost.folded.hidden_size, cost.folded.intermediate_size) == (3072, 2944)
    bytes_of_weight = {"mxfp4": 0.5 + 1 / 32, "mxfp8": 1 + 1 / 32, "bf16": 2}[form]
    assert cost.plain_bytes == 128 * 3 * 3072 * 2944 * bytes_of_weight
    assert cost.folded_bytes - cost.plain_bytes == cost.gathered_bytes == 4 * 128 * 3072
    assert cost.plain_operations == 4 * 3 * 2 * 3072 * 2944
    assert cost.folded_operations - cost.plain_operations == 2 * 128 * 3072
    assert mm.folding_cost(config, B200, hidden_size=2880).gathered_bytes == 0


def test_a_model_without_spare_columns_pays_for_256() -> None:
    config = mm.MoEConfig(
        num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768, max_num_tokens=512,
        weight_format="mxfp4",
    )  # fmt: skip
    cost = mm.folding_cost(config, B200, hidden_size=2048)
    assert (cost.plain.hidden_size, cost.folded.hidden_size) == (2048, 2304)
    matrices = cost.folded_bytes - 4 * 128 * 2304
    assert matrices / cost.plain_bytes == 2304 / 2048 == 1.125
    between = replace(config, hidden_size=2176)
    for source in ("sgl", "vllm"):
        with pytest.raises(ValueError, match="hidden_size: expected a multiple of 256, got 2176"):
            mm.check_supported(replace(between, kernel_source=source), B200)


def test_errors_of_the_cost() -> None:
    text = "recipe: expected mxfp4 or mxfp8 or bf16, .* got nvfp4"
    with pytest.raises(NotImplementedError, match=text):
        mm.folding_cost(gpt_oss_120b("nvfp4"), B200, hidden_size=2880)
    text = (
        "config: expected sizes that a fused kernel of the device takes, with columns to spare, "
        "got 2944 and 2944"
    )
    with pytest.raises(NotImplementedError, match=text):
        mm.folding_cost(gpt_oss_120b("mxfp4"), H200, hidden_size=2880)
    with pytest.raises(NotImplementedError, match="device"):
        mm.folding_cost(gpt_oss_120b("mxfp4"), jax.devices()[0], hidden_size=2880)


def gpt_oss_120b(form: str) -> mm.MoEConfig:
    """Sizes filled up to multiples of 128."""
    activation = mm.Activation("swiglu", clamp=7.0, alpha=1.702, beta=1.0)
    return mm.MoEConfig(
        num_experts=128, top_k=4, hidden_size=2944, intermediate_size=2944, max_num_tokens=512,
        weight_format=form, activation=activation,
    )  # fmt: skip
