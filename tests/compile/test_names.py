"""names.py: no text but a kernel's of the source reaches a compiler."""

import dataclasses
import itertools
import re

import pytest
from fake_toolchain import SPEC, FakeCompiler

from jax_megamoe.compile import DISTRIBUTIONS, builder, names
from jax_megamoe.compile.errors import CompileError
from jax_megamoe.compile.names import check_names
from jax_megamoe.compile.sources import find_source
from jax_megamoe.config import MoEConfig
from jax_megamoe.formats import WEIGHT_FORMATS
from jax_megamoe.plan import plan_mega_moe
from jax_megamoe.plan.families.flashinfer_launch import WIDE_INTERMEDIATE
from jax_megamoe.plan.families.vllm_sm100_nvfp4 import SCALE_BY_POINTER
from jax_megamoe.runtime.devices import KNOWN_DEVICES

GOOD = {
    "arch": ["sm_90a", "sm_100f", "sm_103a", "sm_90"],
    "template_args": [
        (),
        ("7168", "-1", "true", "MmaKind::MXFP8FP4", "cutlass::bfloat16_t"),
        ("0x1.c00000p+2f", "0x0p+0f", "1.5f", "cute::numeric_limits<float>::infinity()"),
    ],
    "parameter_types": [
        ("void*", "const float*", "unsigned long long*", "uint32_t", "const __nv_bfloat16*"),
        ("deep_gemm::layout::SymBuffer<8>", "cute::TmaDescriptor"),
    ],
    "prelude": [
        "",
        SCALE_BY_POINTER,
        "#define MEGAMOE_NUM_SMS 132\n",
        f"#define A 1\n{WIDE_INTERMEDIATE}",
    ],
}
BAD = {
    "arch": ["", "sm_90a -include /etc/passwd", "compute_90", "sm_90a\n"],
    "header": ["/etc/passwd", "../kernel.cuh", "deep_gemm/../../secret.cuh", "other.cuh",
               "deep_gemm/impls/kernel.cuh>\n#include </etc/passwd", "cutlass/version.h", ""],
    "symbol": ["other", "kernel>; int x; //", "kern", "", "kernel "],
    "template_args": [("1>", "2"), ("1;",), ("f(1)",), ("__asm__",  "x y"), ('"a"',), ("",),
                      ("1\n#include <a>",), ("a(b())",), ("\u0661",), ("sizeof(int)",)],
    "parameter_types": [("void*, int",), ("int) { }",), ("decltype(x)",), ("",), ("a<b<c>>",)],
    "prelude": ["#include </etc/passwd>\n", "#define A 1", "#define a 1\n", "#define A B\n",
                f"{WIDE_INTERMEDIATE}{WIDE_INTERMEDIATE}", "int x;\n", "#define A 1\\\n"],
}  # fmt: skip


def pairs(table):
    return [(field, value) for field, values in table.items() for value in values]


@pytest.mark.parametrize(("field", "value"), pairs(GOOD))
def test_what_planners_write_passes(source, field, value):
    check_names(dataclasses.replace(SPEC, **{field: value}), find_source("sgl"))


@pytest.mark.parametrize(("field", "value"), pairs(BAD))
def test_other_text_is_refused_before_a_compiler_sees_it(source, tmp_path, field, value):
    (source.parent / "secret.cuh").write_text("kernel")
    compiler = FakeCompiler(tmp_path / "calls")
    text = f"kernel specification, {field}: expected "
    hint = "; the plan is not one of this version of jax_megamoe: do not run it"
    with pytest.raises(CompileError, match=f"{re.escape(text)}.*{hint}"):
        builder.build(dataclasses.replace(SPEC, **{field: value}), compiler=compiler)
    assert compiler.num_calls == 0


def test_every_planned_kernel_passes():
    sizes = {"num_experts": 8, "top_k": 2, "hidden_size": 1024, "intermediate_size": 512}
    symbols = set()
    for form, source, name in itertools.product(WEIGHT_FORMATS, DISTRIBUTIONS, ("h200", "b200")):
        config = MoEConfig(**sizes, max_num_tokens=128, weight_format=form)
        try:
            plan = plan_mega_moe(
                config, KNOWN_DEVICES[name], 16, 2, source, staging_by="jax_megamoe"
            )
        except (NotImplementedError, ValueError):
            continue
        for step in plan.launches:
            symbols.add(step.kernel.symbol)
            assert names.fault(step.kernel) is None
    assert len(symbols) >= 5
