"""Recorded kernels of sgl-deep-gemm compiled for real: one kernel each, parameters where planned.

Needs the headers of sgl-deep-gemm 0.2.5 (installed, or JAX_MEGAMOE_SGL_ROOT) and a compiler with
CUDA's headers, from wheels or from CUDA_HOME; skips by name without them.
"""

import dataclasses
import functools
import gzip
import json
from pathlib import Path

import pytest

from jax_megamoe.compile import CompileError, MissingDependency, build, find_source
from jax_megamoe.compile.builder import cache_key
from jax_megamoe.compile.cache import KernelCache
from jax_megamoe.compile.compiler import COMPILERS
from jax_megamoe.compile.cubin import Parameter, read_kernels
from jax_megamoe.plan.kernel import KernelSpec

GOLDEN = Path(__file__).parents[1] / "golden"

# Family of tests/golden, architecture, bytes of the parameter block, registers.
KERNELS = [
    ("fp8_fp4_mega_moe", "sm_100f", 3080, 128),
    ("fp8_fp4_mega_moe", "sm_103a", 3080, 128),
    ("bf16_mega_moe", "sm_100f", 1928, 128),
    ("bf16_mega_moe", "sm_103a", 1928, 128),
    ("sm90_fp8_mega_moe", "sm_90a", 1664, 168),
    ("pre_dispatch", "sm_100f", 92, 24),
    ("pre_dispatch", "sm_103a", 92, 24),
    ("pre_dispatch_sm90", "sm_90a", 80, 24),
]

FLOATS = ("l1_alphas", "l2_alphas", "l2_act_scales", "post_expert_norm_weight", "topk_weights")
POINTERS = {
    "y": "void*",
    "cumulative_local_expert_recv_stats": "int*",
    **dict.fromkeys((*FLOATS, "l1_weights_sf", "l2_weights_sf", "expert_scales"), "const float*"),
    "sm_locality_domains": "const uint8_t*",
    "trace": "uint64_t*",
    "x": "const __nv_bfloat16*",
    "topk_idx": "const int32_t*",
    "buf_x_scales": "float*",
    "buf_topk_idx": "int64_t*",
    "buf_topk_weights": "float*",
}
STAGING_POINTERS = {
    "pre_dispatch": {"buf_x": "void*", "buf_x_sf": "int32_t*"},
    "pre_dispatch_sm90": {"buf_x": "__nv_fp8_e4m3*", "buf_x_sf": "float*"},
}
# Bytes and alignment of an argument, by its kind in the records.
PLACES = {"ptr": (8, 8), "u32": (4, 4), "f32": (4, 4), "sym": (592, 8), "tmap": (128, 128)}


@functools.cache
def record(family: str) -> dict:
    with gzip.open(GOLDEN / f"launches_sgl_{family}.jsonl.gz", "rt") as lines:
        return next(found for found in map(json.loads, lines) if "rejected" not in found)


def kinds(family: str) -> list[tuple[str, str]]:
    """Name and kind of each recorded argument."""
    arguments = record(family)["outputs"]["launches"][0]["args"]
    return [(a["name"], next(kind for kind in PLACES if kind in a)) for a in arguments]


def spec(family: str, arch: str) -> KernelSpec:
    launch = record(family)["outputs"]["launches"][0]
    pointers = POINTERS | STAGING_POINTERS.get(family, {})
    ranks = record(family)["inputs"]["num_ranks"]
    by_kind = {
        "u32": "uint32_t",
        "f32": "float",
        "sym": f"layout::SymBuffer<{ranks}>",
        "tmap": "cute::TmaDescriptor",
    }
    types = tuple(by_kind.get(kind) or pointers[name] for name, kind in kinds(family))
    return KernelSpec(
        "sgl", arch, launch["include"], launch["entry"], tuple(launch["template_args"]), types
    )


def places(family: str, base: int) -> tuple[Parameter, ...]:
    """Where C's alignment puts each argument; tensor maps align to 128 in the constant bank."""
    found, end = [], base
    for _, kind in kinds(family):
        size, alignment = PLACES[kind]
        start = -(-end // alignment) * alignment
        found.append(Parameter(start - base, size))
        end = start + size
    return tuple(found)


@pytest.fixture(params=COMPILERS)
def compiler(request):
    try:
        find_source("sgl")
        return COMPILERS[request.param]()
    except MissingDependency as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return KernelCache(tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize(("family", "arch", "num_bytes", "registers"), KERNELS)
def test_cubin_holds_one_kernel_with_the_planned_parameters(
    compiler, cache, family, arch, num_bytes, registers
):
    planned = spec(family, arch)
    (kernel,) = read_kernels(build(planned, compiler=compiler, cache=cache))
    assert planned.symbol in kernel.symbol
    assert kernel.parameter_bytes == num_bytes
    assert kernel.parameter_base == (0x210 if arch == "sm_90a" else 0x380)
    assert kernel.parameters == places(family, kernel.parameter_base)
    assert kernel.registers == registers
    stem = cache_key(planned, find_source("sgl"), compiler).stem
    described = json.loads((cache.folder / f"{stem}.json").read_text())
    assert described["registers"] == registers
    assert (described["spill_store_bytes"], described["spill_load_bytes"]) == (0, 0)


def test_changed_parameters_stop_the_compilation_and_name_the_version(compiler, cache):
    planned = spec("pre_dispatch_sm90", "sm_90a")
    changed = dataclasses.replace(planned, parameter_types=(*planned.parameter_types[:-1], "int"))
    version = find_source("sgl").version
    text = f"sgl {version}: the parameters of sm90_mega_moe_pre_dispatch_kernel are not those"
    with pytest.raises(CompileError, match=text):
        build(changed, compiler=compiler, cache=cache)


def test_size_that_the_kernel_refuses_is_a_compile_error(compiler, cache):
    planned = spec("pre_dispatch_sm90", "sm_90a")
    refused = dataclasses.replace(planned, template_args=("64", "false"))
    with pytest.raises(CompileError, match="requires per-128 SF") as caught:
        build(refused, compiler=compiler, cache=cache)
    assert "cannot compile sm90_mega_moe_pre_dispatch_kernel<64, false> of sgl" in str(caught.value)
