"""GPT-OSS's launches with folded biases: DeepGEMM's records where there are some, else arithmetic.

The records have hidden size 3072 and intermediate size 2944 with 128 experts, as
`folding.folded_sizes` makes the model's 2880. For other sizes the formulas of `mx_by_hand.py` say
what the plan must be; they give every record of these kernels without shared experts.
"""

from collections.abc import Iterator
from typing import Any

import mx_by_hand
import pytest
from golden_launches import first_difference, launch_records
from golden_plans import launch_record
from mx_by_hand import Call

import jax_megamoe as mm
from jax_megamoe.plan import folding, plan_mega_moe
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.launch import KernelLaunch

MODEL = 2880
EXPERTS = {"gpt-oss-120b": 128, "gpt-oss-20b": 32}
ACTIVATION = mm.Activation("swiglu", clamp=7.0, alpha=1.702, beta=1.0)
FLAG = {("sgl", 100): "sm_100f", ("sgl", 103): "sm_100f", ("vllm", 100): "sm_100f"}
FLAG |= {("vllm", 103): "sm_103f"}


def records() -> Iterator[tuple[Call, dict[str, Any], int]]:
    """Recorded launches of the MX kernels without a shared expert or anything else that is rare."""
    for _, record in launch_records().values():
        given = record["inputs"]
        is_mx = given["kernel"] == "fp8_fp4_mega_moe" and given["mma_type"].startswith("fp8x")
        rare = ("num_shared_experts", "global_num_tokens", "post_norm", "use_x_scales", "l1_alphas",
                "l2_alphas", "l2_act_scales", "env")  # fmt: skip
        if not is_mx or "rejected" in record or any(given.get(name) for name in rare):
            continue
        if given["activation"] == "situ" or not record["outputs"].get("launches"):
            continue
        yield _call(given), record["outputs"], given["arch"]


def _call(given: dict[str, Any]) -> Call:
    names = dict(source="provider", ranks="num_ranks", experts="num_experts", top_k="top_k",
                 hidden="hidden", inter="intermediate", asked="max_tokens_per_rank",
                 tokens="num_tokens", sms="num_sms", weights="weight_dtype", rank="rank",
                 activation="activation", clamp="clamp", alpha="alpha", beta="beta",
                 fast_math="fast_math", stats="stats")  # fmt: skip
    return Call(**{ours: given[theirs] for ours, theirs in names.items()})


def compared(want: dict[str, Any], launch: dict[str, Any]) -> str:
    """Where they differ first; of nvcc's flags the architecture counts."""
    flags = [flag for flag in launch["nvcc_flags"] if flag.startswith("--gpu-arch")]
    return first_difference(want, {name: launch[name] for name in want} | {"nvcc_flags": flags})


def test_the_formulas_give_every_record() -> None:
    of_model = 0
    count = dict.fromkeys(("sgl", "vllm"), 0)
    for call, outputs, arch in records():
        want = mx_by_hand.launch(call, FLAG[call.source, arch])
        difference = compared(want, outputs["launches"][0])
        assert not difference, f"{call}: {difference}"
        assert call.offsets()["end"] == outputs["sym_buffer_bytes"]
        count[call.source] += 1
        sizes = (call.hidden, call.inter, call.experts, call.top_k)
        of_model += sizes == (3072, 2944, 128, 4)
    assert count == {"sgl": 87, "vllm": 119} and of_model == 14


@pytest.mark.parametrize("source", ["sgl", "vllm"])
@pytest.mark.parametrize("form", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("model", EXPERTS)
@pytest.mark.parametrize("inter", [2944, 3072])
def test_plan_of_the_model(source: str, form: str, model: str, inter: int) -> None:
    """2944 is what a block takes; 3072 are sizes that a user may choose."""
    for ranks, asked, tokens, sms, arch in (
        (1, 512, 1, 148, 100),
        (1, 512, 512, 148, 103),
        (1, 8192, 8192, 152, 100),
        (8, 1024, 64, 148, 100),
        (8, 4096, 4096, 152, 103),
        (32, 2048, 300, 148, 100),
    ):
        config = mm.MoEConfig(
            num_experts=EXPERTS[model], top_k=4, hidden_size=3072, intermediate_size=inter,
            max_num_tokens=asked, weight_format=form, kernel_source=source, activation=ACTIVATION,
        )  # fmt: skip
        device = DeviceSpec(arch, sms)
        plan = plan_mega_moe(config, device, tokens, ranks, source)
        mega = plan.steps[-1]
        assert isinstance(mega, KernelLaunch)
        call = Call(source, ranks, EXPERTS[model], 4, 3072, inter, asked, tokens, sms, form,
                    "swigluoai" if source == "sgl" else "swiglu", 7.0, 1.702, 1.0)  # fmt: skip
        difference = compared(mx_by_hand.launch(call, FLAG[source, arch]), launch_record(mega, 0))
        assert not difference, f"{call}: {difference}"
        assert plan.buffer.num_bytes == call.offsets()["end"]


@pytest.mark.parametrize("source", ["sgl", "vllm"])
@pytest.mark.parametrize("form", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_sizes_of_the_model(source: str, form: str, ranks: int) -> None:
    """Kernels take hidden sizes in steps of 256, intermediate sizes in steps of 128."""
    config = mm.MoEConfig(
        num_experts=128, top_k=4, hidden_size=2944, intermediate_size=2944, max_num_tokens=512,
        weight_format=form, kernel_source=source, activation=ACTIVATION,
    )  # fmt: skip
    wide = folding.folded_sizes(config, DeviceSpec(100, 148), ranks, MODEL)
    assert wide is not None and (wide.hidden_size, wide.intermediate_size) == (3072, 2944)
