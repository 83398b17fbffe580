"""codegen.py: the text that instantiates one kernel."""

import dataclasses
from pathlib import Path

from fake_toolchain import SPEC

from jax_megamoe.compile.codegen import generate
from jax_megamoe.compile.sources import KernelSource
from jax_megamoe.plan.grouped import humming, tiles
from jax_megamoe.plan.grouped.product import Product

SOURCE = KernelSource("sgl", "9.9.9", Path("/include"), "0")


def test_text_includes_checks_and_instantiates_the_kernel():
    text = generate(SPEC, SOURCE)
    assert text.startswith("#include <deep_gemm/impls/kernel.cuh>\n")
    check = "cuda::std::is_same_v<decltype(&kernel<64, true>), void (*)(void*, uint32_t)>"
    assert f"static_assert({check},\n" in text
    assert '"sgl 9.9.9: the parameters of kernel are not those that jax_megamoe passes; ' in text
    assert "reinterpret_cast<void*>(&kernel<64, true>)" in text


def test_macros_come_before_the_header():
    spec = dataclasses.replace(SPEC, prelude="#define QUIET 1\n")
    start = "#define QUIET 1\n#include <deep_gemm/impls/kernel.cuh>\n"
    assert generate(spec, SOURCE).startswith(start)


def test_classes_come_between_the_header_and_the_kernel():
    product = Product(arch=90, weights="mxfp4", inputs="bf16", num_experts=8, n=256, k=128)
    spec = humming.kernel(product, tiles.choose(product, 8, 132))
    text = generate(spec, KernelSource("humming", "0.1.20", Path("/include"), "0"))
    places = (
        "#define HUMMING_USE_TMA",
        "#include <humming/",
        "struct Layer",
        "humming<Op, Problem",
    )
    assert sorted(places, key=text.index) == list(places)


def test_a_source_without_a_namespace_uses_none():
    source = KernelSource("humming", "0.1.20", Path("/include"), "0")
    assert "using namespace" not in generate(SPEC, source)
    assert "using namespace deep_gemm;" in generate(SPEC, SOURCE)


def test_structs_passed_by_value_are_checked_once_each():
    layouts = {
        "deep_gemm::layout::SymBuffer<8>": (592, 8),
        "cute::TmaDescriptor": (128, 128),
        "deep_gemm::EpilogueOperatorArgs": (48, 8),
    }
    spec = dataclasses.replace(SPEC, parameter_types=("void*", *layouts, *layouts))
    text = generate(spec, SOURCE)
    assert text.count("static_assert(") == 4
    for name, (size, alignment) in layouts.items():
        check = f"sizeof({name}) == {size} && alignof({name}) == {alignment}"
        assert f"static_assert({check},\n" in text


def test_text_depends_on_nothing_of_the_machine():
    elsewhere = KernelSource("sgl", "9.9.9", Path("/elsewhere"), "1")
    assert generate(SPEC, SOURCE) == generate(SPEC, elsewhere)
