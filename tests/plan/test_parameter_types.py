"""Every planned kernel against its header: its parameters' C++ types, and a limit of its body.

Needs a compiler and the headers of the kernel source (installed, or JAX_MEGAMOE_SGL_ROOT and
JAX_MEGAMOE_VLLM_ROOT); skips by name without them. Where parameters lie in a compiled kernel is
tested in tests/compile/test_kernels.py.
"""

import pytest
from problems import B200, FAMILIES, every_launch, example, launch_of

from jax_megamoe.compile import CompileError, MissingDependency, build, find_source
from jax_megamoe.compile.builder import default_compiler
from jax_megamoe.compile.cache import KernelCache
from jax_megamoe.compile.compiler import Compiler
from jax_megamoe.compile.sources import KernelSource
from jax_megamoe.plan import families, limits
from jax_megamoe.plan.kernel import KernelSpec


def toolchain(name: str) -> tuple[KernelSource, Compiler]:
    """A kernel source and a compiler; skips the test without them."""
    try:
        return find_source(name), default_compiler()
    except MissingDependency as error:
        pytest.skip(str(error))


def assertions(kernel: KernelSpec) -> str:
    """C++ that compiles where a kernel's parameters are as planned, and only then.

    The bodies of kernels are not instantiated: one compilation takes them all.
    """
    address = f"decltype(&{kernel.symbol}<{', '.join(kernel.template_args)}>)"
    function = f"void (*)({', '.join(kernel.parameter_types)})"
    changed = f"void (*)({', '.join((*kernel.parameter_types[:-1], 'double'))})"
    return f"""
        #include <{kernel.header}>
        #include <cuda/std/type_traits>
        using namespace deep_gemm;
        static_assert(cuda::std::is_same_v<{address}, {function}>, "{kernel.symbol}");
        static_assert(not cuda::std::is_same_v<{address}, {changed}>, "anything would do");
    """


@pytest.mark.parametrize("name", families.sources())
def test_parameters_have_the_types_of_the_headers(name):
    source, compiler = toolchain(name)
    kernels = [each.kernel for each in every_launch().values() if each.kernel.source == name]
    compiler.compile("".join(map(assertions, kernels)), "sm_100f", source.include_dirs)


# The largest hidden size of a family with 128 tokens on 8 ranks is 9216.
LIMITED = {"sgl": FAMILIES[0], "vllm": FAMILIES[7]}


@pytest.mark.parametrize("name", LIMITED)
def test_the_largest_hidden_size_is_the_headers(name, tmp_path):
    family, compiler = LIMITED[name], toolchain(name)[1]
    wide = example(family, hidden_size=9728, num_tokens=128)
    with pytest.raises(CompileError, match="Hidden is too large"):
        kernel = launch_of(family, wide).kernel
        build(kernel, compiler=compiler, cache=KernelCache(tmp_path))
    (broken,) = limits.sm100_violations(family.traits, wide, B200)
    assert "hidden_size: expected at most 9216, got 9728" in str(broken)
    allowed = example(family, hidden_size=9216, num_tokens=128)
    assert not list(limits.sm100_violations(family.traits, allowed, B200))
