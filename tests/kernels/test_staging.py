"""The staging kernel on the host, bit for bit against `staging.stage`, and compiled for GPUs.

tests/gpu/check_staging.py runs the same on a GPU.
"""

import dataclasses

import numpy as np
import pytest
import staged
from kernels.on_host import HostKernels

from jax_megamoe import MoEConfig, ReplicaMap, replica_map
from jax_megamoe.compile import MissingDependency, build
from jax_megamoe.compile.cache import KernelCache
from jax_megamoe.compile.compiler import COMPILERS
from jax_megamoe.compile.cubin import read_kernels
from jax_megamoe.plan import plan_mega_moe
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.launch import KernelLaunch, LaunchPlan, parameter_block
from jax_megamoe.plan.staging import Routing

SM100, SM90 = DeviceSpec(100, 148), DeviceSpec(90, 132)
PATTERN = 0xA5
# Weight format, source, shared experts, their format.
FORMS = [
    ("mxfp4", "sgl", 0, None),
    ("mxfp8", "vllm", 1, None),
    ("nvfp4", "sgl", 0, None),
    ("nvfp4", "vllm", 0, None),
    ("nvfp4", "vllm", 1, "mxfp8"),
    ("nvfp4", "vllm", 1, "bf16"),
    ("bf16", "sgl", 1, None),
    ("fp8_block", "sgl", 0, None),
]
IDS = [" ".join(map(str, form[:2] + form[3:])) for form in FORMS]


def config(form: tuple, **fields) -> MoEConfig:
    weight_format, _, num_shared_experts, shared_format = form
    sizes = {
        "num_experts": 8,
        "top_k": 3,
        "hidden_size": 512,
        "intermediate_size": 256,
        "max_num_tokens": 129,
        "weight_format": weight_format,
        "num_shared_experts": num_shared_experts,
        "shared_format": shared_format,
    }
    return MoEConfig(**(sizes | fields))


def planned(
    form: tuple, num_tokens: int, *, routing: Routing | None = None, **fields
) -> LaunchPlan:
    device = SM90 if form[0] == "fp8_block" else SM100
    return plan_mega_moe(
        config(form, **fields),
        device,
        num_tokens,
        2,
        form[1],
        routing=routing,
        staging_by="jax_megamoe",
        l2_activation_scale=0.37,
    )


def staging_step(plan: LaunchPlan) -> KernelLaunch:
    (step,) = [
        step
        for step in plan.steps
        if isinstance(step, KernelLaunch) and step.kernel.source == "jax_megamoe"
    ]
    return step


WIDTHS = (256, 512, 2816)


@pytest.fixture(scope="module")
def on_host(tmp_path_factory) -> HostKernels:
    plans = [planned(form, 1, hidden_size=512) for form in FORMS]
    plans += [planned(FORMS[4], 1, hidden_size=hidden) for hidden in WIDTHS]
    specs = [staging_step(plan).kernel for plan in plans]
    return HostKernels(specs, tmp_path_factory.mktemp("kernels"))


def assert_staged(on_host, form, num_tokens, *, mask=False, eplb=None, **fields) -> None:
    """Runs the kernel on hard inputs and compares the buffer from ``x`` on, all of it."""
    layer = config(form, **fields)
    replicas = 0 if eplb is None else eplb.logical_to_physical.shape[1]
    routing = Routing(num_logical=layer.logical_experts, padding_mask=mask, max_replicas=replicas)
    plan = planned(form, num_tokens, routing=routing, **fields)
    bits = staged.hard_tokens(num_tokens, layer.hidden_size, seed=num_tokens)
    ids, weights, padding = staged.hard_routing(layer, num_tokens)
    w2_scale = np.linspace(1e-3, 2, layer.num_experts // 2, dtype=np.float32)
    arrays = {
        "x": bits.astype(np.uint16),
        "topk_ids": ids,
        "topk_weights": weights,
        "padding_mask": padding,
        "w2_weight_scale_2": w2_scale,
        "l2_alpha": np.zeros_like(w2_scale),
    }
    if eplb is not None:
        arrays["logical_to_physical"] = np.asarray(eplb.logical_to_physical)
        arrays["num_replicas"] = np.asarray(eplb.num_replicas)
    start = plan.buffer["x"].offset
    got = np.full(plan.buffer.num_bytes - start, PATTERN, np.uint8)
    want = got.copy()
    on_host.launch(staging_step(plan), arrays, got, start)
    expected = staged.staged_on_host(
        layer,
        form[1],
        bits,
        (ids, weights),
        padding_mask=padding if mask else None,
        eplb=eplb,
    )
    staged.fill_buffer(want, plan, expected)
    assert staged.first_difference(got, want, plan.buffer) == ""
    alpha = w2_scale * np.float32(0.37) if plan.scratch else np.zeros_like(w2_scale)
    np.testing.assert_array_equal(arrays["l2_alpha"], alpha)


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 129])
@pytest.mark.parametrize("form", FORMS, ids=IDS)
def test_buffer_is_what_stage_says(on_host, form, num_tokens):
    assert_staged(on_host, form, num_tokens, mask=num_tokens != 7)


@pytest.mark.parametrize("hidden_size", WIDTHS)
def test_rows_of_any_width(on_host, hidden_size):
    assert_staged(on_host, FORMS[4], 21, hidden_size=hidden_size)


def replicas() -> ReplicaMap:
    return replica_map(np.array([0, 1, 2, 3, 4, 2, 2, 4]), 5)


@pytest.mark.parametrize("eplb", [None, replicas()], ids=["initial map", "map"])
def test_replicas(on_host, eplb):
    assert_staged(on_host, FORMS[0], 129, mask=True, eplb=eplb, num_logical_experts=5)


@pytest.mark.parametrize("block_m", [16, 64, 192, 240])
def test_scale_pages_of_every_tile_height(on_host, block_m):
    """Heights that this config's calls do not have: the kernel takes the height as a number."""
    form = FORMS[1]
    plan = planned(form, 129)
    step = staging_step(plan)
    arguments = tuple(
        dataclasses.replace(each, value=block_m) if each.name == "block_m" else each
        for each in step.arguments
    )
    plan = dataclasses.replace(plan, block_m=block_m)
    layer = config(form)
    bits, (ids, weights, _) = staged.hard_tokens(129, 512), staged.hard_routing(layer, 129)
    arrays = {"x": bits.astype(np.uint16), "topk_ids": ids, "topk_weights": weights}
    start = plan.buffer["x"].offset
    got = np.full(plan.buffer.num_bytes - start, PATTERN, np.uint8)
    want = got.copy()
    on_host.launch(dataclasses.replace(step, arguments=arguments), arrays, got, start)
    staged.fill_buffer(want, plan, staged.staged_on_host(layer, form[1], bits, (ids, weights)))
    assert staged.first_difference(got, want, plan.buffer) == ""


ARCHS = {"sgl": "sm_100f", "vllm": "sm_103a"}


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("form", FORMS, ids=IDS)
def test_compiled_parameters_are_where_planned(form, compiler, tmp_path):
    try:
        made_by = COMPILERS[compiler]()
    except MissingDependency as error:
        pytest.skip(str(error))
    step = staging_step(planned(form, 64))
    arch = "sm_90a" if form[0] == "fp8_block" else ARCHS[form[1]]
    step = dataclasses.replace(step, kernel=dataclasses.replace(step.kernel, arch=arch))
    (kernel,) = read_kernels(build(step.kernel, compiler=made_by, cache=KernelCache(tmp_path)))
    assert kernel.parameters == parameter_block(step)
