"""plan_mega_moe: steps, operands, sources and errors."""

import pytest
from problems import B200, H100, config

from jax_megamoe import Activation
from jax_megamoe.plan import check_sizes, plan_mega_moe
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.launch import Fill, Float32, LaunchPlan, Pointer, TensorMap
from jax_megamoe.plan.operand import Operand

ROUTED = {"w13_weight", "w2_weight", "symmetric_buffer", "y"}
SCALES = {"w13_weight_scale", "w2_weight_scale"}
INPUTS = {"x", "topk_ids", "topk_weights"}
FP8, BF16 = "sm100_fp8_fp4_mega_moe_impl", "sm100_bf16_mega_moe_impl"
STAGING, OURS = "mega_moe_pre_dispatch_kernel", "stage_tokens"


def names(plan: LaunchPlan) -> set[str]:
    """Operands that a plan's launches point to, constants left out."""
    found: set[str] = set()
    for launch in plan.launches:
        for argument in launch.arguments:
            if isinstance(argument, Pointer) and argument.operand is not None:
                found.add(argument.operand.name)
            elif isinstance(argument, TensorMap):
                found.add(argument.spec.base.name)
    return found - dict(plan.constants).keys()


def symbols(plan: LaunchPlan) -> list[str]:
    return [launch.kernel.symbol for launch in plan.launches]


CASES = [
    ("mxfp4", None, [STAGING, FP8], SCALES),
    ("mxfp8", "sgl", [STAGING, FP8], SCALES),
    ("bf16", None, [OURS, BF16], set()),
    ("mxfp4", "vllm", [OURS, FP8], SCALES),
    ("bf16", "vllm", [OURS, BF16], set()),
    (
        "nvfp4",
        None,
        [STAGING, FP8],
        SCALES | {"w13_weight_scale_2", "w2_weight_scale_2", "w2_input_scale"},
    ),
    (
        "nvfp4",
        "vllm",
        [OURS, "sm100_nvfp4_mega_moe_impl"],
        SCALES | {"w13_weight_scale_2", "w2_weight_scale_2", "l2_alpha"},
    ),
]


@pytest.mark.parametrize(("weight_format", "source", "kernels", "operands"), CASES)
def test_sm100_plans(weight_format, source, kernels, operands):
    plan = plan_mega_moe(config(weight_format=weight_format), B200, 64, 8, source)
    assert symbols(plan) == kernels
    assert names(plan) == ROUTED | INPUTS | operands
    assert plan.unstaged == ()
    assert (plan.num_ranks, plan.block_m, plan.buffer.max_num_tokens) == (8, 32, 1920)
    assert {launch.kernel.arch for launch in plan.launches} == {"sm_100f"}
    mega = plan.launches[-1]
    assert mega.kernel.source == (source or "sgl")
    assert mega.config.grid == (148, 1, 1) and mega.config.cluster == (2, 1, 1)
    assert 200_000 < mega.config.smem <= 232_448


def test_sm90_plan():
    plan = plan_mega_moe(config(weight_format="fp8_block"), H100, 64, 8)
    assert symbols(plan) == ["sm90_mega_moe_pre_dispatch_kernel", "sm90_fp8_mega_moe_impl"]
    assert names(plan) == ROUTED | SCALES | INPUTS
    assert plan.unstaged == plan.constants == ()
    staging, mega = plan.launches
    assert staging.config.block == (7168 // 8, 1, 1)
    assert staging.config.grid == (64 + -(-(1024 - 64) * 8 // 896), 1, 1)
    assert mega.config.block == (384, 1, 1) and mega.config.programmatic_serialization
    assert {launch.kernel.arch for launch in plan.launches} == {"sm_90a"}
    assert (plan.block_m, plan.buffer.max_num_tokens) == (64, 1024)


def test_large_calls_on_sm90_pair_their_sms():
    plan = plan_mega_moe(config(weight_format="fp8_block", max_num_tokens=4096), H100, 4096, 8)
    mega = plan.launches[-1]
    assert plan.block_m == 128 and mega.config.cluster == (2, 1, 1)
    assert not mega.config.programmatic_serialization


def test_the_locality_table_is_a_constant_of_the_plan():
    plan = plan_mega_moe(config(), B200, 64, 8)
    assert plan.constants == (("sm_locality_domains", bytes([0, 0, 1, 1] * 37)),)
    assert plan.launches[-1].arguments[-1] == Pointer(
        "sm_locality_domains", Operand("sm_locality_domains")
    )
    assert plan_mega_moe(config(weight_format="nvfp4"), B200, 64, 8, "vllm").constants == ()


@pytest.mark.parametrize("source", ["sgl", "vllm"])
@pytest.mark.parametrize("reserved", [2, 4, 72])
def test_the_locality_table_has_an_entry_for_every_sm_of_the_device(source, reserved):
    """Kernels read it at the number of the SM they run on, and that may be the last one."""
    device = DeviceSpec(100, 148 - reserved, reserved_sms=reserved)
    plan = plan_mega_moe(config(), device, 64, 8, source)
    assert dict(plan.constants) == {"sm_locality_domains": bytes([0, 0, 1, 1] * 37)}
    assert plan.launches[-1].config.grid == (148 - reserved, 1, 1)


def test_vllm_plans_clear_ready_words_where_there_are_peers():
    fill = Fill(Operand("symmetric_buffer", 128), 576)
    plan = plan_mega_moe(config(), B200, 64, 8, "vllm")
    assert plan.steps == (fill, *plan.launches)
    assert fill not in plan_mega_moe(config(), B200, 64, 1, "vllm").steps
    assert plan_mega_moe(config(), B200, 64, 8, "sgl").steps[0] != fill


def test_blackwell_ultra_has_its_own_architecture_in_the_vllm_source():
    b300 = DeviceSpec(103, 148)
    archs = {s: plan_mega_moe(config(), b300, 64, 8, s).launches[-1] for s in ("sgl", "vllm")}
    assert {s: launch.kernel.arch for s, launch in archs.items()} == {
        "sgl": "sm_100f",
        "vllm": "sm_103f",
    }


@pytest.mark.parametrize("weight_format", ["mxfp4", "bf16"])
def test_no_tokens_still_launch(weight_format):
    plan = plan_mega_moe(config(weight_format=weight_format), B200, 0, 8)
    assert names(plan) == names(plan_mega_moe(config(weight_format=weight_format), B200, 1, 8)) - {
        *("x", "topk_ids", "topk_weights", "y")
    }
    assert plan.launches[-1].config.grid == (148, 1, 1)


def test_stats_are_an_operand_where_asked_for():
    assert "stats" not in names(plan_mega_moe(config(), B200, 64, 8))
    assert "stats" in names(plan_mega_moe(config(), B200, 64, 8, with_stats=True))


def test_the_scale_of_layer_2_inputs_is_a_value_in_the_vllm_source():
    plan = plan_mega_moe(
        config(weight_format="nvfp4"), B200, 64, 8, "vllm", l2_activation_scale=0.25
    )
    assert Float32("l2_activation_scale", 0.25) in plan.launches[-1].arguments


def test_equal_arguments_give_the_same_plan_object():
    assert plan_mega_moe(config(), B200, 64, 8) is plan_mega_moe(config(), B200, 64, 8)


def test_fused_shared_experts():
    plan = plan_mega_moe(config(num_shared_experts=2), B200, 64, 8)
    assert names(plan) > {
        *("shared_w13_weight", "shared_w13_weight_scale"),
        *("shared_w2_weight", "shared_w2_weight_scale"),
    }
    assert symbols(plan) == [OURS, FP8]
    words = plan.buffer["shared_l1_acts_sf"]
    assert (words.shape, words.strides) == ((30_720, 56), (1, 30_720))


SOURCES = [
    ({}, "sgl"),
    ({"weight_format": "bf16", "num_shared_experts": 1}, "sgl"),
    ({"activation": Activation("swiglu", alpha=1.702, beta=1.0, clamp=7.0)}, "sgl"),
    ({"activation": Activation("swiglu", alpha=1.5)}, "vllm"),
    ({"activation": "situ"}, "sgl"),
    ({"activation": Activation("situ", alpha=2.0)}, "vllm"),
    ({"weight_format": "nvfp4", "num_shared_experts": 1}, "vllm"),
    ({"intermediate_size": 8192}, "sgl"),
    ({"hidden_size": 8704}, "sgl"),
    ({"kernel_source": "vllm"}, "vllm"),
]


@pytest.mark.parametrize(("fields", "source"), SOURCES)
def test_the_first_source_that_can(fields, source):
    assert check_sizes(config(**fields), B200, 8) == source
    plan = plan_mega_moe(config(**fields), B200, 64, 8)
    assert plan.launches[-1].kernel.source == source


WIDE_POOL = {"hidden_size": 8704, "max_num_tokens": 6144, "num_experts": 16}
MANY_SCALES = {"weight_format": "nvfp4", "intermediate_size": 4096, "max_num_tokens": 9600}

NEIGHBOURS = [
    ({"top_k": 31}, B200, None),
    ({"top_k": 32, "weight_format": "nvfp4", "kernel_source": "vllm"}, B200, None),
    ({"top_k": 32, "weight_format": "fp8_block"}, H100, None),
    (WIDE_POOL | {"hidden_size": 8192}, B200, "sgl"),
    (WIDE_POOL | {"num_shared_experts": 1}, B200, "sgl"),
    (WIDE_POOL | {"intermediate_size": 4352}, B200, "sgl"),
    (MANY_SCALES | {"intermediate_size": 2048}, B200, "sgl"),
    ({}, DeviceSpec(100, 146, reserved_sms=2), None),
    ({}, DeviceSpec(100, 76, reserved_sms=72), None),
]


@pytest.mark.parametrize(("fields", "device", "source"), NEIGHBOURS)
def test_what_the_kernels_run_beside_their_limits(fields, device, source):
    check_sizes(config(**fields), device, 8, source)


def test_an_argument_overrides_the_source_of_the_config():
    plan = plan_mega_moe(config(kernel_source="vllm"), B200, 64, 8, "sgl")
    assert plan.launches[-1].kernel.source == "sgl"


def test_situ_is_its_own_kernel_in_the_vllm_source():
    situ = config(activation=Activation("situ", alpha=2.0, beta=3.0))
    mega = plan_mega_moe(situ, B200, 64, 8).launches[-1]
    assert mega.kernel.symbol == "sm100_fp8_fp4_mega_moe_situ_impl"
    assert mega.kernel.template_args[-4:-1] == ("0x1p+1f", "0x1.8p+1f", "true")


SM90 = {"weight_format": "fp8_block"}
REFUSED = [
    ({}, {"num_tokens": 1025}, ValueError, r"num_tokens: expected at most max_num_tokens = 1024, "),
    ({}, {"num_tokens": -1}, ValueError, "num_tokens: expected an integer >= 0, got -1"),
    ({}, {"num_ranks": 0}, ValueError, "num_ranks: expected an integer >= 1, got 0"),
    (
        {},
        {"source": "triton"},
        ValueError,
        r"source: expected one of \['sgl', 'vllm', 'flashinfer'\], got 'tri",
    ),
    ({}, {"num_ranks": 73}, ValueError, "num_ranks: expected at most 72, got 73"),
    ({}, {"num_ranks": 7}, ValueError, "num_experts: expected a multiple of the 7 expert-parallel"),
    ({"top_k": 33}, {}, ValueError, "top_k: expected at most 31, got 33"),
    (
        {"top_k": 32, "num_shared_experts": 1},
        {},
        ValueError,
        "top_k with the shared expert's slot: expected at most 32, got 33",
    ),
    ({"num_experts": 4096}, {}, ValueError, "num_experts: expected at most 2048, got 4096"),
    ({"num_experts": 1024}, {"num_ranks": 1}, ValueError, "num_experts per rank: expected at most"),
    ({"hidden_size": 7040}, {}, ValueError, "hidden_size: expected a multiple of 256, got 7040"),
    (
        {"hidden_size": 4352},
        {},
        ValueError,
        "hidden_size: expected a multiple of 512, got 4352; the combine splits a row into 2 chunks",
    ),
    (
        {"hidden_size": 10240},
        {"source": "vllm"},
        ValueError,
        "hidden_size: expected at most 9216, got 10240; the combine's buffers do not fit shared",
    ),
    (
        {"intermediate_size": 4224},
        {"source": "vllm"},
        ValueError,
        "intermediate_size: expected at most 4096, got 4224",
    ),
    (
        {"max_num_tokens": 1 << 20},
        {},
        ValueError,
        "max_num_tokens: expected a ring of at most 8388608 received tokens, got .* on 8 ranks",
    ),
    ({}, {"device": DeviceSpec(100, 142)}, ValueError, "num_sms: expected a multiple of 4, got"),
    (
        {},
        {"device": DeviceSpec(100, 147, reserved_sms=1)},
        ValueError,
        "num_sms without the reserved ones: expected a multiple of 2, got 147",
    ),
    (
        {},
        {"device": DeviceSpec(100, 74, reserved_sms=74)},
        ValueError,
        "reserved_sms: expected fewer than half of the device's 148 SMs, got 74; the kernel needs",
    ),
    *(
        (fields | {"top_k": 32}, {}, ValueError, "top_k: expected at most 31, got 32")
        for fields in (
            {},
            {"weight_format": "bf16"},
            {"weight_format": "mxfp8", "activation": "situ"},
            {"weight_format": "mxfp8", "kernel_source": "vllm"},
            {"weight_format": "bf16", "kernel_source": "vllm"},
            {"weight_format": "nvfp4", "kernel_source": "sgl"},
        )
    ),
    *(
        (
            {"weight_format": "nvfp4", "intermediate_size": size},
            {"source": source},
            ValueError,
            f"intermediate_size: expected a multiple of 256, got {size}",
        )
        for source in ("sgl", "vllm")
        for size in (128, 384, 896, 1408, 2944)
    ),
    (
        WIDE_POOL,
        {"source": "sgl"},
        ValueError,
        "hidden_size: expected at most 8192 in a ring for every row that may arrive, got 8704; sgl",
    ),
    (
        {"num_experts": 8, "top_k": 1, "max_num_tokens": 261_121},
        {"num_ranks": 1},
        ValueError,
        "max_num_tokens, rounded up: expected at most 262144, got 263040",
    ),
    (
        MANY_SCALES,
        {"source": "sgl", "num_ranks": 16},
        ValueError,
        r"max_num_tokens: expected scales of second inputs \(l2_acts_sf\) in at most 4294967296 b",
    ),
    (
        {"num_shared_experts": 33, "max_num_tokens": 261_120, "num_experts": 8, "top_k": 1},
        {"source": "sgl", "num_ranks": 1},
        ValueError,
        r"max_num_tokens: expected scales of second inputs \(shared_l2_acts_sf\) in at most 429496",
    ),
    (
        SM90,
        {"device": DeviceSpec(90, 131)},
        ValueError,
        "num_sms: expected a multiple of 2, got 131",
    ),
    (
        SM90
        | {
            "num_experts": 2048,
            "hidden_size": 512,
            "intermediate_size": 256,
            "max_num_tokens": 262_144,
        },
        {"device": H100, "num_ranks": 1},
        ValueError,
        "max_num_tokens: expected experts, tiles of received tokens and columns in 29 bits, got 30",
    ),
    (
        {},
        {"device": H100},
        NotImplementedError,
        "device: expected compute capability 10.x for sm100_fp8_fp4_mega_moe, got 9.0",
    ),
    ({}, {"device": DeviceSpec(120, 188)}, NotImplementedError, "capability 10.x .*, got 12.0"),
    (
        SM90,
        {},
        NotImplementedError,
        "device: expected compute capability 9.0 for fp8_block, got 10",
    ),
    (
        SM90,
        {"device": H100, "source": "vllm"},
        NotImplementedError,
        "source: expected sgl for fp8_block, got vllm",
    ),
    (
        {"activation": Activation("swiglu", alpha=1.5)},
        {"source": "sgl"},
        NotImplementedError,
        r"activation of sgl: expected \(alpha, beta\) one of .*, got swiglu \(1.5, 0.0\); the vllm",
    ),
    (
        {"weight_format": "nvfp4", "num_shared_experts": 1},
        {"source": "sgl"},
        NotImplementedError,
        r"shared_format: expected one of \['nvfp4'\] for sgl's .*, got mxfp8",
    ),
    (SM90, {"device": H100, "num_ranks": 64}, ValueError, "num_ranks: expected at most 32, got 64"),
    (
        SM90 | {"intermediate_size": 2944},
        {"device": H100},
        ValueError,
        "intermediate_size: expected a multiple of 256, got 2944",
    ),
    (
        SM90 | {"num_shared_experts": 1},
        {"device": H100},
        NotImplementedError,
        "num_shared_experts: expected 0 on SM90, got 1; never fused",
    ),
    (
        SM90 | {"max_num_tokens": 12032},
        {"device": DeviceSpec(90, 78), "num_ranks": 16},
        ValueError,
        "max_num_tokens: expected two pipeline stages in 232448 bytes of shared memory, got 1",
    ),
]


@pytest.mark.parametrize(("fields", "call", "error", "text"), REFUSED)
def test_refused(fields, call, error, text):
    arguments = {"device": B200, "num_tokens": 64, "num_ranks": 8} | call
    with pytest.raises(error, match=text):
        plan_mega_moe(config(**fields), **arguments)


@pytest.mark.parametrize(("fields", "call", "error", "text"), REFUSED[2:])
def test_sizes_are_refused_before_a_call(fields, call, error, text):
    arguments = {"device": B200, "num_ranks": 8} | call
    with pytest.raises(error, match=text):
        check_sizes(config(**fields), **arguments)


def test_check_sizes_looks_at_every_number_of_tokens_a_call_may_have():
    """vllm's MXFP4 kernel takes hidden_size 9216 with low tiles but not with 240 rows."""
    low = config(hidden_size=9216, max_num_tokens=64)
    high = config(hidden_size=9216, max_num_tokens=1024)
    assert check_sizes(low, B200, 8, "vllm") == "vllm"
    assert plan_mega_moe(high, B200, 64, 8, "vllm").block_m == 32
    with pytest.raises(ValueError, match="hidden_size: expected at most 8704, got 9216"):
        check_sizes(high, B200, 8, "vllm")
    with pytest.raises(ValueError, match="hidden_size: expected at most 8704, got 9216"):
        plan_mega_moe(high, B200, 1024, 8, "vllm")
