"""Planned kernels compiled for real: one in each cubin, parameters where planned.

Needs the headers of sgl-deep-gemm 0.2.5 or vllm 0.33.0 (installed, fetched, or named by
JAX_MEGAMOE_SGL_ROOT or JAX_MEGAMOE_VLLM_ROOT) and a compiler with CUDA's headers, from wheels or a
toolkit; skips without them, naming what is missing.
"""

import dataclasses
import json

import pytest

from jax_megamoe.compile import CompileError, MissingDependency, build, find_source
from jax_megamoe.compile.builder import cache_key
from jax_megamoe.compile.cache import KernelCache
from jax_megamoe.compile.compiler import COMPILERS
from jax_megamoe.compile.cubin import read_kernels
from jax_megamoe.config import Activation, MoEConfig
from jax_megamoe.plan import plan_mega_moe
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.launch import KernelLaunch, parameter_block

SM100, SM90 = DeviceSpec(100, 148), DeviceSpec(90, 132)
STAGING, MEGA = 0, -1

# Source, weight format, device, which step of the plan, architecture; bytes of parameters,
# registers.
KERNELS = [
    ("sgl", "mxfp4", SM100, MEGA, "sm_100f", 3080, 128),
    ("sgl", "mxfp8", SM100, MEGA, "sm_103a", 3080, 128),
    ("sgl", "nvfp4", SM100, MEGA, "sm_100f", 3080, 128),
    ("sgl", "bf16", SM100, MEGA, "sm_103a", 1928, 128),
    ("sgl", "fp8_block", SM90, MEGA, "sm_90a", 1664, 168),
    ("sgl", "mxfp4", SM100, STAGING, "sm_100f", 92, 24),
    ("sgl", "nvfp4", SM100, STAGING, "sm_103a", 92, 30),
    ("sgl", "fp8_block", SM90, STAGING, "sm_90a", 80, 24),
    ("vllm", "mxfp4", SM100, MEGA, "sm_103f", 2952, 128),
    ("vllm", "mxfp8", SM100, MEGA, "sm_100f", 2952, 128),
    ("vllm", "nvfp4", SM100, MEGA, "sm_103f", 2944, 128),
    ("vllm", "bf16", SM100, MEGA, "sm_100f", 1928, 128),
]


def planned(
    source: str, weight_format: str, device: DeviceSpec, step: int, arch: str
) -> KernelLaunch:
    config = MoEConfig(
        num_experts=256,
        top_k=8,
        hidden_size=7168,
        intermediate_size=2048,
        weight_format=weight_format,
        activation=Activation("swiglu", clamp=10.0),
        max_num_tokens=4096,
    )
    launch = plan_mega_moe(config, device, 64, 8, source).steps[step]
    assert isinstance(launch, KernelLaunch)
    return dataclasses.replace(launch, kernel=dataclasses.replace(launch.kernel, arch=arch))


def needs(source: str) -> None:
    """Skips a test whose kernel source is not found."""
    try:
        find_source(source)
    except MissingDependency as error:
        pytest.skip(str(error))


@pytest.fixture(params=COMPILERS)
def compiler(request):
    try:
        return COMPILERS[request.param]()
    except MissingDependency as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return KernelCache(tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize(
    ("source", "weight_format", "device", "step", "arch", "size", "registers"), KERNELS
)
def test_cubin_holds_one_kernel_with_the_planned_parameters(
    compiler, cache, source, weight_format, device, step, arch, size, registers
):
    needs(source)
    launch = planned(source, weight_format, device, step, arch)
    (kernel,) = read_kernels(build(launch.kernel, compiler=compiler, cache=cache))
    assert launch.kernel.symbol in kernel.symbol
    assert kernel.parameters == parameter_block(launch)
    assert kernel.parameter_bytes == size
    assert kernel.parameter_base == (0x210 if arch == "sm_90a" else 0x380)
    assert kernel.registers == registers
    stem = cache_key(launch.kernel, find_source(source), compiler).stem
    described = json.loads((cache.folder / f"{stem}.json").read_text())
    assert described["registers"] == registers


STAGING_KERNEL = planned("sgl", "fp8_block", SM90, STAGING, "sm_90a").kernel


def test_changed_parameters_stop_the_compilation_and_name_the_version(compiler, cache):
    needs("sgl")
    types = (*STAGING_KERNEL.parameter_types[:-1], "int")
    changed = dataclasses.replace(STAGING_KERNEL, parameter_types=types)
    version = find_source("sgl").version
    text = f"sgl {version}: the parameters of sm90_mega_moe_pre_dispatch_kernel are not those"
    with pytest.raises(CompileError, match=text):
        build(changed, compiler=compiler, cache=cache)


def test_size_that_the_kernel_refuses_is_a_compile_error(compiler, cache):
    needs("sgl")
    refused = dataclasses.replace(STAGING_KERNEL, template_args=("64", "false"))
    with pytest.raises(CompileError, match="requires per-128 SF") as caught:
        build(refused, compiler=compiler, cache=cache)
    assert "cannot compile sm90_mega_moe_pre_dispatch_kernel<64, false> of sgl" in str(caught.value)
