"""Launches of the package's own staging kernel, and who stages a call."""

import pytest
from problems import B200, H100, config

from jax_megamoe.plan import plan_mega_moe
from jax_megamoe.plan.launch import (
    Float32,
    KernelLaunch,
    LaunchPlan,
    Pointer,
    Uint32,
    parameter_block,
)
from jax_megamoe.plan.operand import Operand
from jax_megamoe.plan.staging import Routing

ROUTED = ("x", "x_sf", "topk_idx", "topk_weights")
PAGES = "shared_l1_acts_sf"
# Weight format, source, shared experts and their format; what the kernel is instantiated for, and
# the regions that it fills.
CASES = [
    ("mxfp4", "sgl", 0, None, "Tokens::kMxfp8", "Shared::kNone", ROUTED),
    ("mxfp4", "sgl", 1, None, "Tokens::kMxfp8", "Shared::kScales", (*ROUTED, PAGES)),
    ("mxfp8", "vllm", 2, None, "Tokens::kMxfp8", "Shared::kScales", (*ROUTED, PAGES)),
    ("nvfp4", "sgl", 0, None, "Tokens::kNvfp4Sgl", "Shared::kNone", (*ROUTED, "x_scales")),
    ("nvfp4", "vllm", 0, None, "Tokens::kNvfp4", "Shared::kNone", (*ROUTED, "x_scales")),
    (
        *("nvfp4", "vllm", 1, "mxfp8", "Tokens::kNvfp4", "Shared::kMxfp8"),
        (*ROUTED, "x_scales", "shared_l1_acts", PAGES),
    ),
    (
        *("nvfp4", "vllm", 1, "bf16", "Tokens::kNvfp4", "Shared::kBf16"),
        (*ROUTED, "x_scales", "shared_l1_acts"),
    ),
    ("bf16", "sgl", 1, None, "Tokens::kBf16", "Shared::kNone", ("x", *ROUTED[2:])),
    ("bf16", "vllm", 0, None, "Tokens::kBf16", "Shared::kNone", ("x", *ROUTED[2:])),
    ("fp8_block", "sgl", 0, None, "Tokens::kFp8Block", "Shared::kNone", ROUTED),
]


def planned(weight_format: str, *, num_tokens: int = 64, **options) -> LaunchPlan:
    fields = {n: options.pop(n) for n in ("num_shared_experts", "shared_format") if n in options}
    device = H100 if weight_format == "fp8_block" else B200
    options = {"staging_by": "jax_megamoe"} | options
    layer = config(weight_format=weight_format, **fields)
    return plan_mega_moe(layer, device, num_tokens, 8, **options)


def staging(plan: LaunchPlan) -> KernelLaunch:
    (launch,) = [step for step in plan.launches if step.kernel.source == "jax_megamoe"]
    return launch


def arguments(launch: KernelLaunch) -> dict:
    """Values by name; of pointers, the operands."""
    return {
        each.name: each.operand if isinstance(each, Pointer) else each.value
        for each in launch.arguments
        if isinstance(each, Pointer | Uint32 | Float32)
    }


@pytest.mark.parametrize(("form", "source", "shared", "shared_format", "t", "s", "regions"), CASES)
def test_every_input_region_is_filled(form, source, shared, shared_format, t, s, regions):
    options = {"num_shared_experts": shared, "shared_format": shared_format}
    plan = planned(form, source=source, **options)
    launch = staging(plan)
    assert launch.kernel.template_args == ("7168", "224", t, s)
    assert plan.unstaged == ()
    bare = planned(form, source=source, staging_by="none", **options)
    assert sorted(bare.unstaged) == sorted(regions)
    values = arguments(launch)
    for name in (*ROUTED, "x_scales", "shared_l1_acts", PAGES):
        place = Operand("symmetric_buffer", plan.buffer[name].offset) if name in regions else None
        assert values[f"buf_{name}"] == place
    rows = plan.buffer[PAGES].shape[0] if PAGES in regions else 0
    assert (values["shared_sf_rows"], values["block_m"]) == (rows, plan.block_m)
    arch = {"fp8_block": "sm_90a"}.get(form, "sm_100f")
    assert (launch.kernel.arch, launch.kernel.header) == (arch, "staging.cuh")
    assert (launch.config.grid, launch.config.block) == ((64, 1, 1), (224, 1, 1))


def test_parameters():
    launch = staging(planned("mxfp4"))
    assert len(launch.kernel.parameter_types) == len(launch.arguments) == 24
    pointers = [each.endswith("*") for each in launch.kernel.parameter_types]
    assert [isinstance(each, Pointer) for each in launch.arguments] == pointers
    assert sum(parameter_block(launch)[-1]) == 15 * 8 + 9 * 4
    assert parameter_block(launch)[-1] == (152, 4)


@pytest.mark.parametrize(
    ("hidden", "threads"), [(256, 32), (2048, 256), (2816, 192), (4096, 256), (8704, 224)]
)
def test_threads_share_a_row_evenly(hidden, threads):
    launch = staging(
        plan_mega_moe(config(hidden_size=hidden), B200, 3, 8, staging_by="jax_megamoe")
    )
    assert launch.config.block == (threads, 1, 1)
    assert launch.kernel.template_args[:2] == (str(hidden), str(threads))


def test_no_tokens_need_no_arrays():
    launch = staging(planned("mxfp4", num_tokens=0, routing=Routing(num_logical=256)))
    values = arguments(launch)
    assert launch.config.grid == (1, 1, 1)
    names = ("x", "topk_idx", "topk_weights", "padding_mask")
    assert [values[name] for name in names] == [None] * 4


def test_routing_names_its_operands():
    plain = arguments(staging(planned("mxfp4")))
    assert (plain["num_logical"], plain["num_experts"], plain["max_replicas"]) == (256, 256, 0)
    routing = Routing(num_logical=224, padding_mask=True, max_replicas=33)
    values = arguments(staging(planned("mxfp4", routing=routing)))
    names = ("padding_mask", "logical_to_physical", "num_replicas")
    assert [values[name] for name in names] == [Operand(name) for name in names]
    assert [plain[name] for name in names] == [None] * 3
    assert (values["num_logical"], values["num_experts"], values["max_replicas"]) == (224, 256, 33)


def test_the_scale_of_layer_2_becomes_scratch():
    plan = planned("nvfp4", source="vllm", l2_activation_scale=0.25)
    assert plan.scratch == (("l2_alpha", (32,), "float32"),)
    values = arguments(staging(plan))
    assert values["l2_alpha"] == Operand("l2_alpha")
    assert values["w2_weight_scale_2"] == Operand("w2_weight_scale_2")
    assert (values["l2_activation_scale"], values["num_local_experts"]) == (0.25, 32)
    assert planned("nvfp4", source="sgl").scratch == ()
    assert planned("nvfp4", source="vllm", staging_by="none").scratch == ()


def kernels(plan: LaunchPlan) -> list[str]:
    return [step.kernel.symbol for step in plan.launches]


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4", "fp8_block"])
def test_sgl_stages_what_it_can(form):
    own = kernels(planned(form, staging_by=None))
    assert own[0].endswith("pre_dispatch_kernel")
    assert kernels(planned(form, staging_by="source")) == own
    routed = planned(form, staging_by=None, routing=Routing(num_logical=256))
    assert kernels(routed) == ["stage_tokens", own[1]]
    assert kernels(planned(form, staging_by="none")) == own[1:]


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("bf16", {}),
        ("mxfp4", {"source": "vllm"}),
        ("mxfp4", {"num_shared_experts": 1}),
        ("mxfp4", {"routing": Routing(num_logical=256)}),
    ],
)
def test_a_staging_kernel_that_does_not_do_it_is_refused(form, options):
    text = f"staging_by: expected jax_megamoe for this call of {form}, got source; a source's own"
    with pytest.raises(ValueError, match=text):
        planned(form, staging_by="source", **options)


def test_refused():
    text = r"staging_by: expected one of \['source', 'jax_megamoe', 'none'\], got 'triton'"
    with pytest.raises(ValueError, match=text):
        planned("mxfp4", staging_by="triton")
    with pytest.raises(
        ValueError, match="num_logical: expected at most num_experts = 256, got 300"
    ):
        planned("mxfp4", routing=Routing(num_logical=300))
