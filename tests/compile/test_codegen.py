"""codegen.py: the text that instantiates one kernel."""

from pathlib import Path

from jax_megamoe.compile.codegen import generate
from jax_megamoe.compile.sources import KernelSource
from tests.compile.fake_toolchain import SPEC

SOURCE = KernelSource("sgl", "9.9.9", Path("/include"), "0")


def test_text_includes_checks_and_instantiates_the_kernel():
    text = generate(SPEC, SOURCE)
    assert text.startswith("#include <deep_gemm/impls/kernel.cuh>\n")
    assert "using Kernel = void (*)(void*, uint32_t);" in text
    assert "static_assert(cuda::std::is_same_v<decltype(&kernel<64, true>), Kernel>," in text
    assert '"sgl 9.9.9: the parameters of kernel are not those that jax_megamoe passes; ' in text
    assert "reinterpret_cast<void*>(&kernel<64, true>)" in text


def test_text_depends_on_nothing_of_the_machine():
    elsewhere = KernelSource("sgl", "9.9.9", Path("/elsewhere"), "1")
    assert generate(SPEC, SOURCE) == generate(SPEC, elsewhere)
