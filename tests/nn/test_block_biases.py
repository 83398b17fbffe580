"""Blocks whose experts have biases (GPT-OSS): folded where a fused kernel runs them so."""

from typing import Any

import cases
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
import transformers_blocks
import transformers_cases
from emulation import B200, H200
from flax import nnx
from hf_configs import HF_CONFIGS
from transformers_cases import CASES

import jax_megamoe as mm
from jax_megamoe.launch import runnable
from jax_megamoe.plan import plan_mega_moe
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.launch import KernelLaunch

CASE = next(case for case in CASES if case.name == "gpt_oss")


@pytest.mark.parametrize("form", ["mxfp4", "mxfp8", "bf16"])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_folded_block_against_transformers(form: str, implementation: str) -> None:
    """Within what the block with biases of its own is allowed."""
    held = transformers_blocks.read_record(CASE)
    block = mm.MegaMoEBlock.from_config(
        CASE.hf_config, max_num_tokens=transformers_cases.TOKENS, weight_format=form
    )
    block.load(transformers_cases.checkpoint(CASE), CASE.layer_index or 0)
    folded = mm.fold_biases(block.config, block.experts.weights)
    block.experts = mm.MegaMoE(block.config, folded, implementation=implementation)
    y = block(jnp.asarray(transformers_cases.inputs(CASE)[0]))
    limit = tolerances.ACCURACY[form].layer[1]
    errors = [cases.relative_error(a, b) for a, b in zip(y, held.y, strict=True)]
    assert cases.relative_error(y, held.y) <= limit and max(errors) <= 2 * limit


@pytest.mark.parametrize("name", ["openai/gpt-oss-120b", "openai/gpt-oss-20b"])
@pytest.mark.parametrize("arch", [100, 103])
def test_published_models_on_blackwell(name: str, arch: int, on_device: Any) -> None:
    """Sizes that the kernel takes, biases folded, and the launch is planned."""
    device = DeviceSpec(arch, 148)
    on_device(device)
    block = mm.MegaMoEBlock.from_config(HF_CONFIGS[name], max_num_tokens=512)
    config = block.config
    assert (config.hidden_size, config.intermediate_size) == (3072, 2944)
    assert config.recipe.name == "mxfp4" and block.stored_sizes == (2880, 2880)
    assert block.experts.folds_biases
    assert block.experts.routed.w2_bias.get_value().shape == (config.num_experts, 3072)
    assert runnable.check_supported(config, device) == "sgl"
    for num_tokens in (1, 512):
        mega = plan_mega_moe(config, device, num_tokens, 1).steps[-1]
        assert isinstance(mega, KernelLaunch)
        assert mega.kernel.symbol == "sm100_fp8_fp4_mega_moe_impl"
        assert mega.kernel.arch in ("sm_100f", "sm_103a")


def test_what_folding_fills_up_is_said(on_device: Any, caplog: pytest.LogCaptureFixture) -> None:
    on_device(DeviceSpec(100, 148))
    runnable._log_wider.cache_clear()
    config = HF_CONFIGS["openai/gpt-oss-20b"] | {"hidden_size": 2048}
    with caplog.at_level("INFO", logger="jax_megamoe"):
        block = mm.MegaMoEBlock.from_config(config, max_num_tokens=512)
    assert block.config.hidden_size == 2304
    assert "hidden size 2048 is filled up to 2304 (12.5 % more weights)" in caplog.text


def test_other_devices_keep_the_biases(on_device: Any) -> None:
    config = HF_CONFIGS["openai/gpt-oss-20b"]
    for prepare in (lambda: None, lambda: on_device(H200)):
        prepare()
        block = mm.MegaMoEBlock.from_config(config, max_num_tokens=512)
        assert block.config.hidden_size == 2944
        assert block.experts.routed.w13_bias is not None


def test_a_block_loads_into_folded_ones_and_is_reloaded(on_device: Any) -> None:
    on_device(B200)
    block = mm.MegaMoEBlock.from_config(
        CASE.hf_config, max_num_tokens=transformers_cases.TOKENS, weight_format="mxfp4",
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    assert block.experts.folds_biases and block.config.hidden_size == 256
    tensors = transformers_cases.checkpoint(CASE)
    block.load(tensors, CASE.layer_index or 0)
    assert block.experts.folds_biases
    before = {name: np.asarray(a) for name, a in block.experts.weights.arrays().items()}
    prefix = next(name for name in tensors if name.endswith("down_proj_bias"))
    block.experts.reload(
        {prefix: tensors[prefix] * 2},
        prefix=prefix.removesuffix(".down_proj_bias"),
        stored_sizes=block.stored_sizes,
        gate_up_order="alternating",
    )
    after = block.experts.weights.arrays()
    for name, array in before.items():
        want = 2 * array if name == "routed.w2_bias" else array
        np.testing.assert_array_equal(np.asarray(after[name]), want, err_msg=name)
