"""Humming's grouped products compiled for every architecture: parameters and memory as planned.

The unit itself asserts the size of the kernel's shared memory. Needs Humming's headers and a
compiler; skips by name without.
"""

import pytest

from jax_megamoe.compile import MissingDependency, build, find_source
from jax_megamoe.compile.builder import default_compiler
from jax_megamoe.compile.cache import KernelCache
from jax_megamoe.compile.cubin import read_kernels
from jax_megamoe.plan.grouped import humming, tiles
from jax_megamoe.plan.grouped.product import KNOWN_ARCHS, Product
from jax_megamoe.plan.launch import parameter_block

RECIPES = {
    80: ("mxfp8", "bf16", "none"),
    89: ("fp8_block", "fp8_f32_128", "none"),
    90: ("mxfp4", "fp8_f32_128", "channel"),
    100: ("mxfp4", "bf16", "none"),
    120: ("nvfp4", "bf16", "tensor"),
}
"""Weights, rows and second scale: a different recipe on each architecture."""


@pytest.mark.parametrize("arch", KNOWN_ARCHS)
def test_compiled_parameters_are_where_planned(arch, tmp_path):
    try:
        find_source("humming")
        compiler = default_compiler()
    except MissingDependency as error:
        pytest.skip(str(error))
    weights, inputs, second = RECIPES[arch]
    product = Product(
        arch=arch,
        weights=weights,
        inputs=inputs,
        num_experts=128,
        n=1536,
        k=2048,
        second_scale=second,
    )
    names = humming.Operands(
        a="a",
        c="c",
        w="w",
        w_scale="scale",
        a_scale=None if inputs == "bf16" else "a_scale",
        w_scale_2=None if second == "none" else "second",
    )
    chosen = tiles.choose(product, 512, 132)
    launch = humming.launch(product, chosen, names, rows=64, top_k=8, num_sms=132)
    cubin = build(launch.kernel, compiler=compiler, cache=KernelCache(tmp_path))
    (kernel,) = read_kernels(cubin)
    assert kernel.parameters == parameter_block(launch)
