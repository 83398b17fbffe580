"""FlashInfer's kernels under `mega_moe`: what they are launched with on emulated H200s."""

import logging
import struct

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulation import B200, H200, STAGING, Emulation, call, kernel_of, sym_buffer, u64

import jax_megamoe as mm
from jax_megamoe.launch import grouped, runnable
from jax_megamoe.launch.runnable import in_recipe_with_kernel
from jax_megamoe.plan import plan_mega_moe
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.launch import KernelLaunch

RECIPES = pytest.mark.parametrize("recipe", ["mxfp4_block", "nvfp4_block"])
SYM_BUFFER = {"mxfp4_block": 3, "nvfp4_block": 4}
TOKENS = {"mxfp4_block": 2, "nvfp4_block": 3}


def config(recipe: str, **changes: object) -> mm.MoEConfig:
    return cases.config(recipe, **(dict(hidden_size=512, intermediate_size=256) | changes))


def entry(recipe: str) -> str:
    return f"sm90_{recipe.removesuffix('_block')}_mega_moe_fused_impl"


@RECIPES
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_call_is_two_launches(recipe: str, ranks: int, emulation: Emulation) -> None:
    emulation.device = H200
    cfg = config(recipe)
    where = {} if ranks == 1 else dict(mesh=cases.ep_mesh(ranks), axis="ep")
    call(cfg, num_tokens=32, return_stats=True, **where)
    staged, ran = emulation.launches(STAGING), emulation.launches(entry(recipe))
    assert set(staged) == set(ran) == set(range(ranks))
    plan = plan_mega_moe(cfg, H200, 32 // ranks, ranks, with_stats=True)
    mega = plan.steps[-1]
    assert isinstance(mega, KernelLaunch)
    assert mega.kernel.source == "flashinfer"
    for device, each in ran.items():
        assert kernel_of(each) == mega.kernel
        assert (tuple(each["grid"]), tuple(each["block"])) == (mega.config.grid, mega.config.block)
        values = dict(zip((a.name for a in mega.arguments), each["parameters"], strict=True))
        assert struct.unpack("<I", bytes.fromhex(values["num_tokens"])) == (32 // ranks,)
        assert bytes.fromhex(values["sym_buffer"]) == sym_buffer(range(ranks), device)
        pointers = ["y", "cumulative_local_expert_recv_stats"]
        pointers += ["l1_global_scales", "l2_global_scales"]
        addresses = [u64(values[name]) for name in pointers]
        assert all(addresses)
        assert len(set(addresses)) == len(addresses)
        assert u64(values["phase_stamps"]) == 0
        assert "kFp8Block" in " ".join(kernel_of(staged[device]).template_args)


def test_layers_share_a_buffer(emulation: Emulation) -> None:
    """The two kernels too, whose counters are the same code; fp8_block has another."""
    emulation.device = H200
    for recipe in ("mxfp4_block", "nvfp4_block", "mxfp4_block"):
        call(config(recipe), num_tokens=8)
    assert len(emulation.memory.allocated) == 1
    call(config("fp8_block"), num_tokens=8)
    assert len(emulation.memory.allocated) == 2


@RECIPES
def test_a_scan_has_one_launch_a_layer(recipe: str, emulation: Emulation) -> None:
    emulation.device = H200
    cfg = config(recipe)
    weights = cases.weights(cfg)
    x, ids, factors = cases.tokens(cfg, 16)
    stacked = jax.tree.map(lambda a: jnp.stack([a, a, a]), weights)

    @jax.jit
    def layers(x, stacked):
        def one(x, w):
            y = mm.mega_moe(x, ids, factors, w, config=cfg, implementation="deep_gemm")
            return y, None

        return jax.lax.scan(one, x, stacked)[0]

    jax.block_until_ready(layers(x, stacked))
    ran = [e for e in emulation.driver.launches() if kernel_of(e).symbol == entry(recipe)]
    assert len(ran) == 3
    assert len({tuple(each["parameters"][SYM_BUFFER[recipe]]) for each in ran}) == 1


@RECIPES
def test_default_implementation_on_hopper(recipe: str, emulation: Emulation) -> None:
    emulation.device = H200
    call(config(recipe), implementation=None)
    assert emulation.launches(entry(recipe))


@RECIPES
def test_blackwell_refuses(recipe: str, emulation: Emulation) -> None:
    text = f"device: expected compute capability 9.0 for {recipe}, got 10.0"
    with pytest.raises(NotImplementedError, match=text):
        call(config(recipe))


def test_a_buffer_holds_a_multiple_of_four_tokens(emulation: Emulation) -> None:
    """Else the pool would start off TMA's 16 bytes; the kernel is told of the same number."""
    emulation.device = H200
    cfg = config("mxfp4_block", max_num_tokens=1, top_k=3)
    plan = plan_mega_moe(cfg, H200, 1, 1)
    assert plan.buffer.max_num_tokens == 4
    mega = plan.steps[-1]
    assert isinstance(mega, KernelLaunch)
    assert mega.kernel.template_args[6] == "4"
    assert all(region.offset % 16 == 0 for _, region in plan.buffer.regions)
    call(cfg, num_tokens=1)
    values = emulation.launches(entry("mxfp4_block"))[0]["parameters"]
    assert np.frombuffer(bytes.fromhex(values[TOKENS["mxfp4_block"]]), np.uint32) == 1


def recipe_on(device: DeviceSpec, form: str, **changes: object) -> str:
    return in_recipe_with_kernel(config(form, **changes), device).recipe.name


def test_4_bit_weights_take_the_recipe_that_has_a_kernel(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runnable._log_recipe.cache_clear()
    with caplog.at_level(logging.INFO, logger="jax_megamoe"):
        assert [recipe_on(H200, "mxfp4") for _ in range(3)] == ["mxfp4_block"] * 3
    text = "mxfp4 weights run as mxfp4_block: this device has a kernel of that alone"
    assert [record.getMessage() for record in caplog.records] == [text]
    assert recipe_on(H200, "nvfp4") == "nvfp4_block"
    assert recipe_on(H200, "fp8_block") == "fp8_block"
    assert recipe_on(B200, "mxfp4") == "mxfp4"


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 103, 120])
def test_bf16_tokens_are_asked_for(arch: int) -> None:
    """They would give no device a kernel: `grouped` runs mxfp4 wherever it runs mxfp4_bf16."""
    device = DeviceSpec(arch, 132)
    assert recipe_on(device, "mxfp4") == ("mxfp4_block" if arch == 90 else "mxfp4")
    assert recipe_on(device, "mxfp4_bf16") == "mxfp4_bf16"
    layouts = [grouped.layout_of(config(form), arch) for form in ("mxfp4", "mxfp4_bf16")]
    assert layouts == ["humming_bf16"] * 2


def test_4_bit_weights_stay_where_no_kernel_runs_them() -> None:
    assert recipe_on(H200, "mxfp4", activation=cases.ACTIVATIONS["gpt_oss"]) == "mxfp4"
    assert recipe_on(H200, "mxfp4", activation="situ") == "mxfp4"
    assert recipe_on(H200, "mxfp4", hidden_size=384) == "mxfp4"
    assert recipe_on(H200, "mxfp4", num_shared_experts=1) == "mxfp4"
