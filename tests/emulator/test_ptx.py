"""The parser: what it takes, and that it refuses what it does not know, with the line."""

import numpy as np
import pytest

from emulator import ptx
from emulator.ptx.encoding import OPS, SPACES, number, split_commas

HEADER = ".version 9.0\n.target sm_100a\n.address_size 64\n"


def module(*statements: str, before: str = "") -> str:
    """A module whose kernel `k` of one parameter `p` has these statements, from line 6 on."""
    body = "\n".join(statements)
    return f"{HEADER}{before}.visible .entry k(.param .u64 p)\n{{\n{body}\nret;\n}}\n"


def parse(*statements: str, before: str = "") -> ptx.Kernel:
    return ptx.parse(module(*statements, before=before))["k"]


def names(kernel: ptx.Kernel) -> list[str]:
    opcodes = {value: name for name, value in OPS.items()}
    return [opcodes[op] for op in kernel.instructions["op"]]


UNKNOWN = {
    "an instruction": (["frobnicate.b32 %r1, %r2;"], "instruction frobnicate not supported"),
    "a qualifier": (["add.wide.s32 %r1, %r1, %r1;"], "qualifier .wide not supported"),
    "a qualifier of a load": (["ld.global.unknown.b32 %r1, [%rd1];"], "qualifier .unknown"),
    "a source too many": (["cvt.u32.u64 %r1, %rd1, %r1;"], "1 sources expected"),
    "an operand too many": (["prmt.b32 %r1, %r1, %r1, %r1, %r2;"], "operand %r2 not supported"),
    "an operand too few": (["prmt.b32 %r1, %r1, %r1;"], "too few operands"),
    "a register": (["mov.b32 %r9, %r1;"], "register %r9 not declared"),
    "a symbol": (["mov.u64 %rd1, nothing;"], "symbol nothing not declared"),
    "a directive": ([".surprise 3;"], "directive `.surprise 3` not supported"),
    "a label": (["bra nowhere;"], "label nowhere not found"),
    "a function": (["call.uni f, ();"], "call of a function that is not supported"),
    "a carry": (["add.cc.u32 %r1, %r1, %r1;"], "qualifier .cc not supported"),
    "a barrier reduction": (["barrier.cta.red.popc.u32 %r1, 0, 1;"], "reductions are not"),
    "a wait without parity": (
        ["mbarrier.try_wait.shared::cta.b64 %p1, [%r1], %rd1;"],
        ".parity expected",
    ),
    "an MMA of another shape": (
        ["wgmma.mma_async.sync.aligned.m64n8k64.f32.e4m3.e4m3 {%r1}, %rd1, %rd1, %p1, 1, 1;"],
        "shape not supported",
    ),
    "a negated operand": (
        [
            "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 "
            "{%r1, %r1, %r1, %r1}, %rd1, %rd1, %p1, 1, -1;"
        ],
        "negated or transposed operands are not supported",
    ),
    "im2col": (
        ["cp.async.bulk.tensor.3d.global.shared::cta.im2col.bulk_group [%rd1, {%r1}], [%r1];"],
        "3 coordinates expected",
    ),
    "a sparse MMA": (
        ["tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %rd1, %rd1, %r1, %p1;"],
        "qualifier .sp not supported",
    ),
}
DECLARED = [".reg .pred %p<3>; .reg .b32 %r<4>; .reg .b64 %rd<4>;"]


@pytest.mark.parametrize("what", UNKNOWN)
def test_unknown_text_is_an_error_with_its_line(what):
    statements, message = UNKNOWN[what]
    with pytest.raises(ptx.PtxError) as caught:
        parse(*DECLARED, *statements)
    assert message in str(caught.value)
    assert str(caught.value).startswith("PTX line ")
    if what != "a label":  # which is missed at the end
        assert "PTX line 7:" in str(caught.value)


def test_device_functions_and_odd_declarations_are_errors():
    with pytest.raises(ptx.PtxError, match="PTX line 4: device functions are not supported"):
        ptx.parse(HEADER + ".func f() { ret; }")
    with pytest.raises(
        ptx.PtxError, match=r"PTX line 4: declaration `\.tex \.b32 t` not supported"
    ):
        ptx.parse(HEADER + ".tex .b32 t;")


def test_cluster_alone_is_a_scope_and_no_state_space():
    kernel = parse(
        ".reg .b32 %r<4>; .reg .b64 %rd<2>;",
        "ld.acquire.cluster.shared::cta.u32 %r1, [%rd1];",
        "ld.acquire.cluster.global.u32 %r2, [%rd1];",
        "ld.acquire.cluster.u32 %r3, [%rd1];",
    )
    spaces = ["shared", "global", "generic"]
    assert kernel.instructions["mode"][:3].tolist() == [SPACES[name] for name in spaces]


def test_scopes_hide_registers_and_labels():
    kernel = parse(
        ".reg .b32 %r<2>;",
        "mov.b32 %r0, 1;",
        "{ .reg .b32 %r<1>; mov.b32 %r0, 2; L: bra L; }",
        "L: mov.b32 %r1, %r0;",
    )
    assert names(kernel)[:4] == ["Mov", "Mov", "Branch", "Mov"]
    assert kernel.instructions["target"][2] == 2


def test_special_registers_symbols_and_negations_are_instructions_of_their_own():
    kernel = parse(
        ".reg .pred %p<3>; .reg .b32 %r<2>; .reg .b64 %rd<2>;",
        "add.s32 %r0, %tid.x, 1;",
        "ld.param.u64 %rd1, [p];",
        "and.pred %p1, !%p2, %p1;",
    )
    assert names(kernel) == [
        "SpecialRegister", "Add", "ParameterAddress", "Load", "Not", "And", "Return", "Return",
    ]  # fmt: skip


def test_registers_that_are_never_live_together_share_a_place():
    chain = [f"add.s32 %r{i + 1}, %r{i}, 1;" for i in range(50)]
    kernel = parse(".reg .b32 %r<51>;", "mov.b32 %r0, 0;", *chain)
    assert kernel.num_registers <= 3


def test_variables_of_the_module():
    before = (
        ".global .align 4 .b32 table[3] = {1, 2, 0xff};\n"
        ".global .align 8 .u64 address = generic(table);\n"
        ".shared .align 16 .b8 fixed[40];\n.extern .shared .align 128 .b8 rest[];\n"
    )
    kernel = parse(".reg .b64 %rd<2>;", "mov.u64 %rd1, rest;", before=before)
    words = np.frombuffer(kernel.global_bytes[:12], np.uint32)
    assert words.tolist() == [1, 2, 255]
    assert kernel.global_references == [(16, "table")]
    assert (kernel.static_shared, kernel.dynamic_at) == (40, 128)


def test_parameters_are_aligned_as_c_does():
    text = (
        HEADER + ".visible .entry k(.param .u32 a, .param .align 64 .b8 m[128], .param .u64 b)"
        " .maxntid 128, 1, 1 { ret; }"
    )
    kernel = ptx.parse(text)["k"]
    assert [(p.offset, p.size) for p in kernel.parameters] == [(0, 4), (64, 128), (192, 8)]
    assert (kernel.parameter_bytes, kernel.max_threads) == (200, 128)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0f3F800000", 0x3F800000), ("0d3FF0000000000000", 0x3FF0000000000000), ("-5", -5),
        ("0x1fU", 31), ("017", 15), ("0b101", 5), ("%r1", None), ("4294967295U", 4294967295),
    ],
)  # fmt: skip
def test_literals(text, value):
    assert number(text) == value


def test_commas_inside_brackets_do_not_split():
    assert split_commas("{%r1, %r2}, [%rd1, {%r3, %r4}], 5") == [
        "{%r1, %r2}", "[%rd1, {%r3, %r4}]", "5",
    ]  # fmt: skip
