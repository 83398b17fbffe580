"""DeepGEMM's products of BF16 weights, compiled: parameters and shared memory as planned.

Needs the headers of the sgl source and a compiler; skips by name without.
"""

from itertools import product

import pytest

from jax_megamoe.compile import MissingDependency, build, find_source
from jax_megamoe.compile.builder import default_compiler
from jax_megamoe.compile.cache import KernelCache
from jax_megamoe.compile.compiler import Compiler
from jax_megamoe.compile.cubin import read_kernels
from jax_megamoe.plan.grouped.deep_gemm_bf16_sm100 import Blocks
from jax_megamoe.plan.grouped.rules import SLOT_PRODUCTS
from jax_megamoe.plan.grouped.slots import Matrices
from jax_megamoe.plan.launch import parameter_block


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    try:
        find_source("sgl")
        return default_compiler()
    except MissingDependency as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("arch", SLOT_PRODUCTS)
def test_compiled_parameters_are_where_planned(arch, compiler, tmp_path):
    place = dict(rows=64, m=32, slots=512, num_sms=132)
    launch = SLOT_PRODUCTS[arch].launch(Matrices(8, 512, 256), ("a", "b", "d"), early=True, **place)
    cubin = build(launch.kernel, compiler=compiler, cache=KernelCache(tmp_path))
    (kernel,) = read_kernels(cubin)
    assert kernel.parameters == parameter_block(launch)


def test_shared_memory_on_sm100_is_enough_for_the_headers_struct(compiler):
    checks: list[str] = []
    for height, paired in product(range(32, 225, 32), (True, False)):
        tile = Blocks(height, paired)
        struct = (
            f"deep_gemm::layout::SM100BF16GemmSharedStorage<{tile.stages}, 2, 2, "
            f"{tile.loaded_rows}, 128, 64, 16, 128, cutlass::bfloat16_t>"
        )
        end = f"__builtin_offsetof(Struct{len(checks)}, tmem_ptr) + 4"
        checks.append(
            f"using Struct{len(checks)} = {struct};\n"
            f"static_assert({end} <= {tile.shared_memory} && sizeof(Struct{len(checks)}) > 65536);"
        )
    text = "#include <cstdint>\n#include <deep_gemm/layout/gemm.cuh>\n" + "\n".join(checks)
    compiler.compile(text, "sm_100f", find_source("sgl").include_dirs)
