"""The staging kernel on the host, bit for bit against `staging.stage`, and compiled for GPUs.

tests/gpu/check_staging.py does the same on a GPU.
"""

import dataclasses

import numpy as np
import pytest
import staged
from kernels.on_host import HostKernels
from staged import FORMS, Form

from jax_megamoe import ReplicaMap, replica_map
from jax_megamoe.compile import MissingDependency, build
from jax_megamoe.compile.cache import KernelCache
from jax_megamoe.compile.compiler import COMPILERS
from jax_megamoe.compile.cubin import read_kernels
from jax_megamoe.plan.launch import parameter_block

WIDE = Form("nvfp4", "vllm", 1, "mxfp8")
WIDTHS = (256, 2816)


@pytest.fixture(scope="module")
def on_host(tmp_path_factory) -> HostKernels:
    plans = [staged.plan_of(form, 1) for form in FORMS]
    plans += [staged.plan_of(WIDE, 1, hidden_size=hidden) for hidden in WIDTHS]
    kernels = [plan.steps[0].kernel for plan in plans]
    return HostKernels(kernels, tmp_path_factory.mktemp("kernels"))


def assert_staged(on_host: HostKernels, case: staged.Case) -> None:
    """Runs the kernel and compares the buffer from its region ``x`` on, all of it."""
    got = np.full_like(case.want, staged.PATTERN)
    on_host.launch(case.step, case.arrays, got, case.start)
    assert staged.first_difference(got, case.want, case.plan.buffer) == ""
    np.testing.assert_array_equal(case.arrays["l2_alpha"], case.l2_alpha)


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 129])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_buffer_is_what_stage_says(on_host, form, num_tokens):
    assert_staged(on_host, staged.hard_case(form, num_tokens, mask=num_tokens != 7))


@pytest.mark.parametrize("hidden_size", WIDTHS)
def test_rows_of_any_width(on_host, hidden_size):
    assert_staged(on_host, staged.hard_case(WIDE, 21, hidden_size=hidden_size))


REPLICAS = replica_map(np.array([0, 1, 2, 3, 4, 2, 2, 4]), 5)
OUT_OF_RANGE = ReplicaMap(
    np.array([[0, -1], [8, -1], [99, -7], [-1, 3], [4, 2**30]], np.int32),
    np.array([1, 1, 2, 3, 0], np.int32),
)
"""Slots that do not exist, one of a negative number; three replicas in two places; no replica."""


@pytest.mark.parametrize(
    "eplb", [None, REPLICAS, OUT_OF_RANGE], ids=["initial map", "map", "out of range"]
)
def test_replicas(on_host, eplb):
    case = staged.hard_case(FORMS[0], 129, mask=True, eplb=eplb, num_logical_experts=5)
    assert_staged(on_host, case)


@pytest.mark.parametrize("block_m", [16, 64, 192, 240])
def test_scale_pages_of_every_tile_height(on_host, block_m):
    """Heights that this config's calls do not have: the kernel takes the height as a number."""
    assert_staged(on_host, staged.hard_case(FORMS[1], 129, block_m=block_m))


ARCHS = {"sgl": "sm_100f", "vllm": "sm_103a"}


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_compiled_parameters_are_where_planned(form, compiler, tmp_path):
    try:
        made_by = COMPILERS[compiler]()
    except MissingDependency as error:
        pytest.skip(str(error))
    (step,) = staged.plan_of(form, 64).steps
    arch = "sm_90a" if form.weight_format == "fp8_block" else ARCHS[form.source]
    step = dataclasses.replace(step, kernel=dataclasses.replace(step.kernel, arch=arch))
    (kernel,) = read_kernels(build(step.kernel, compiler=made_by, cache=KernelCache(tmp_path)))
    assert kernel.parameters == parameter_block(step)
