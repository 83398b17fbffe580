"""The recipe of a block that is made from a published config: by the device it will run on."""

from collections.abc import Callable

import pytest
from emulation import B200, H200
from hf_configs import HF_CONFIGS

import jax_megamoe as mm
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.weights.params import default_layout

V4_FLASH, GPT_OSS = "deepseek-ai/DeepSeek-V4-Flash", "openai/gpt-oss-20b"


@pytest.mark.parametrize(
    ("model", "device", "recipe", "layout"),
    [
        (V4_FLASH, H200, "mxfp4_block", "flashinfer_mxfp4"),
        (V4_FLASH, B200, "mxfp4", "interleave8"),
        (GPT_OSS, H200, "mxfp4", "interleave8"),  # no kernel has its activation
    ],
)
def test_mxfp4_checkpoint(
    model: str, device: DeviceSpec, recipe: str, layout: str, on_device: Callable[..., None]
) -> None:
    on_device(device)
    block = mm.MegaMoEBlock.from_config(HF_CONFIGS[model], max_num_tokens=512)
    assert block.config.recipe.name == recipe
    assert default_layout(block.config) == layout


def test_a_named_activation_format_stays(on_device: Callable[..., None]) -> None:
    on_device(H200)
    block = mm.MegaMoEBlock.from_config(
        HF_CONFIGS[V4_FLASH], max_num_tokens=512, weight_format="mxfp4"
    )
    assert block.config.recipe.name == "mxfp4"
