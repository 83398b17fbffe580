"""The machine on small kernels written in PTX: what they compute, and what it refuses."""

import jax
import ml_dtypes
import numpy as np
import pytest

from emulator.fixtures import needs
from emulator.machine import EmulatorError, Launch, Machine, TensorMap, encode_tensor_map, run

WORDS = ".reg .pred %p<5>; .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .f32 %f<9>;"
START = "ld.param.u64 %rd1, [a]; cvta.to.global.u64 %rd1, %rd1; mov.u32 %r1, %tid.x;"


@pytest.fixture(autouse=True)
def compiler():
    needs()


def kernel(*statements: str, shared: str = "") -> str:
    """A kernel of one pointer, in %rd1; %r1 is the thread."""
    body = "\n".join([WORDS, shared, START, *statements])
    head = ".version 9.0\n.target sm_100a\n.address_size 64\n.visible .entry k(.param .u64 a)"
    return f"{head}\n{{\n{body}\nret;\n}}\n"


STORE_THREAD = [
    "mul.wide.u32 %rd2, %r1, 4;",
    "add.s64 %rd2, %rd1, %rd2;",
    "st.global.u32 [%rd2], %r1;",
]


def test_grids_blocks_and_divergence():
    text = kernel(
        "mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mad.lo.s32 %r1, %r2, %r3, %r1;",
        "and.b32 %r4, %r1, 3; setp.eq.s32 %p1, %r4, 1; mov.b32 %r5, %r1;",
        "@%p1 bra ODD; add.s32 %r5, %r5, 100; bra.uni JOIN;",
        "ODD: neg.s32 %r5, %r5;",
        "JOIN: mul.wide.u32 %rd2, %r1, 4; add.s64 %rd2, %rd1, %rd2; st.global.s32 [%rd2], %r5;",
    )
    (got,) = run(text, [np.zeros(128, np.int32)], grid=2, block=64)
    i = np.arange(128)
    np.testing.assert_array_equal(got, np.where(i % 4 == 1, -i, i + 100))


@pytest.mark.parametrize("seed", range(4))
def test_shared_memory_and_a_barrier_in_any_order_of_warps(seed):
    text = kernel(
        "mov.u32 %r2, s; mad.lo.s32 %r3, %r1, 4, %r2; st.shared.u32 [%r3], %r1; bar.sync 0;",
        "sub.s32 %r4, 127, %r1; mad.lo.s32 %r4, %r4, 4, %r2; ld.shared.u32 %r1, [%r4];",
        "mov.u32 %r5, %tid.x; mul.wide.u32 %rd2, %r5, 4; add.s64 %rd2, %rd1, %rd2;",
        "st.global.u32 [%rd2], %r1;",
        shared=".shared .align 4 .b32 s[128];",
    )
    (got,) = run(text, [np.zeros(128, np.uint32)], block=128, settings={"seed": seed})
    np.testing.assert_array_equal(got, np.arange(128)[::-1])


WRONG = {
    "write beyond an array": (
        ["st.global.u32 [%rd1+128], %r1;"],
        r"global write of 4 bytes at 0x\w+: argument 0\+128 \(size 128\)",
    ),
    "null pointer": (
        ["mov.b64 %rd1, 0; ld.global.u32 %r2, [%rd1];"],
        "global read of 4 bytes at 0x0: no region",
    ),
    "misaligned": (["ld.global.u32 %r2, [%rd1+2];"], "misaligned read of 4 bytes"),
    "shared memory of another size": (
        ["mov.u32 %r2, s; st.shared.u32 [%r2+16], %r1;"],
        "shared access of 4 bytes at offset 16 of 16",
    ),
    "mbarrier never initialised": (
        ["mov.u32 %r2, s; mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r2], 0;"],
        "mbarrier at offset 0 not initialised",
    ),
    "arrivals beyond the count": (
        ["mov.u32 %r2, s; mbarrier.init.shared::cta.b64 [%r2], 3;",
         "mbarrier.arrive.shared::cta.b64 _, [%r2], 5;"],
        "mbarrier: 5 arrivals .pending 3 of 3, transactions 0, phase 0.",
    ),
    "division by zero": (["div.u32 %r1, %r1, 0;"], "division by zero"),
    "lanes outside a member mask": (
        ["vote.sync.ballot.b32 %r2, %p1, 1;"],
        "executed by lanes ffffffff outside its member mask 00000001",
    ),
    "barrier count": (["bar.sync 1, 48;"], "barrier 1: the count 48 is not a multiple of a warp"),
    "trap": (["trap;"], "trap"),
    "tensor map that is none": (
        ["mov.u32 %r2, s; mbarrier.init.shared::cta.b64 [%r2], 1;",
         "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
         "[%r2], [%rd1, {0, 0}], [%r2];"],
        "no tensor map at",
    ),
    "tensor memory of an odd size": (
        ["mov.u32 %r2, s; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 48;"],
        "tcgen05.alloc of 48 columns",
    ),
    "tensor memory not returned": (
        ["mov.u32 %r2, s; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 64;"],
        "rank 0 CTA 0 ended with 64 columns of tensor memory allocated",
    ),
    "tensor memory that nobody allocated": (
        ["tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r2}, [%r1];"],
        "addresses|columns are allocated",
    ),
    "bulk copy of an odd size": (
        ["mov.u32 %r2, s; cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 8;"],
        "all must be multiples of 16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_error_names_the_place(what):
    statements, message = WRONG[what]
    shared = ".shared .align 128 .b8 s[8];"
    with pytest.raises(EmulatorError, match=message) as caught:
        run(kernel(*statements, shared=shared), [np.zeros(32, np.uint32)])
    if what != "tensor memory not returned":
        assert "rank 0 CTA 0 warp 0, PTX line" in str(caught.value)


def test_operands_are_read_only_where_they_are_said_to_be():
    machine = Machine()
    array = np.zeros(64, np.uint32)
    address = machine.region(array, "weights", writable=False)
    launch = Launch(kernel(*STORE_THREAD), [address.to_bytes(8, "little")], (1, 1, 1), (32, 1, 1))
    with pytest.raises(EmulatorError, match=r"write to read-only weights\+0"):
        machine.launch([launch])


def test_reads_before_writes_are_noted_and_refused_if_strict():
    text = kernel("ld.global.u32 %r2, [%rd1]; st.global.u32 [%rd1+4], %r2;")
    run(text, [np.zeros(4, np.uint32)], track=True)
    with pytest.raises(EmulatorError, match="read of global memory that was never written"):
        run(text, [np.zeros(4, np.uint32)], track=True, settings={"strict": 1})


def test_deadlock_says_where_every_warp_is():
    text = kernel(
        "mov.u32 %r2, s; setp.eq.s32 %p1, %r1, 0;",
        "@%p1 mbarrier.init.shared::cta.b64 [%r2], 2; bar.sync 0;",
        "W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra W;",
        shared=".shared .align 8 .b8 s[8];",
    )
    with pytest.raises(EmulatorError) as caught:
        run(text, [np.zeros(4, np.uint32)], block=64, settings={"stall_rounds": 50})
    text = str(caught.value)
    assert text.startswith("deadlock: no progress in 51 rounds")
    for warp in (0, 1):
        assert f"warp  {warp} lanes ffffffff running for mbarrier: pending 2 of 2" in text
    assert "BarrierTest" in text or "Branch" in text


@pytest.mark.parametrize("delay", [0, 0.9])
def test_box_of_a_tensor_map_comes_swizzled_and_filled(delay):
    """The box's first row is the tensor's last, which no swizzle moves; the second lies beyond."""
    text = """.version 9.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out, .param .u64 in, .param .align 64 .b8 map[128])
{
.reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
.shared .align 1024 .b8 box[256]; .shared .align 8 .b8 bar[8];
mov.u32 %r1, %tid.x; setp.ne.s32 %p1, %r1, 0; mov.u32 %r2, box; mov.u32 %r3, bar;
@%p1 bra WAIT;
mbarrier.init.shared::cta.b64 [%r3], 1;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 256;
mov.b64 %rd1, map; cvta.param.u64 %rd1, %rd1;
cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
  [%r2], [%rd1, {0, 2}], [%r3];
WAIT: bar.warp.sync -1;
L: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0; @!%p2 bra L;
ld.param.u64 %rd2, [out]; mul.wide.u32 %rd3, %r1, 8; add.s64 %rd2, %rd2, %rd3;
mad.lo.s32 %r4, %r1, 8, %r2; ld.shared.u64 %rd4, [%r4]; st.global.u64 [%rd2], %rd4;
ret;
}
"""
    tensor = np.arange(3 * 128, dtype=np.uint8).reshape(3, 128)
    box = TensorMap(1, "uint8", dims=[128, 3], strides=[128], box=[128, 2], swizzle=128)
    got, _ = run(text, [np.zeros(256, np.uint8), tensor, box], settings={"delay": delay})
    rows = got.reshape(2, 8, 16)
    np.testing.assert_array_equal(rows[0].reshape(-1), tensor[2])  # row 0: chunk c at c ^ 0
    assert not rows[1].any()


ONE_DIMENSION = dict(dims=[256], strides=[], box=[64])
TWO_DIMENSIONS = dict(dims=[64, 8], strides=[64], box=[64, 2])
LOAD = "shared::cluster.global.mbarrier::complete_tx::bytes"
STORE = "global.shared::cta.bulk_group"


@pytest.mark.parametrize(
    ("copy", "shape", "message"),
    [
        (f"1d.{LOAD} [%r2], [%rd1, {{16}}], [%r3];", ONE_DIMENSION, ""),
        (f"1d.{LOAD} [%r2], [%rd1, {{-16}}], [%r3];", ONE_DIMENSION, ""),
        (f"1d.{LOAD} [%r2], [%rd1, {{8}}], [%r3];", ONE_DIMENSION,
         "at element 8, not a multiple of 16 bytes"),
        (f"2d.{LOAD} [%r2], [%rd1, {{8, -1}}], [%r3];", TWO_DIMENSIONS, ""),
        (f"2d.{STORE} [%rd1, {{0, 7}}], [%r2];", TWO_DIMENSIONS, ""),
        (f"2d.{STORE} [%rd1, {{0, -1}}], [%r2];", TWO_DIMENSIONS,
         "store at coordinate -1 of dimension 1, below zero"),
    ],
)  # fmt: skip
def test_coordinates_that_an_h200_refuses(copy, shape, message):
    """Illegal instructions there, as the conformance set showed; the accepted ones beside them."""
    text = f""".version 9.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 tensor, .param .align 64 .b8 map[128])
{{
.reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
.shared .align 1024 .b8 box[256]; .shared .align 8 .b8 bar[8];
mov.u32 %r1, %tid.x; setp.ne.s32 %p1, %r1, 0; mov.u32 %r2, box; mov.u32 %r3, bar;
@%p1 bra END;
mbarrier.init.shared::cta.b64 [%r3], 1;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 128;
mov.b64 %rd1, map; cvta.param.u64 %rd1, %rd1;
cp.async.bulk.tensor.{copy}
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
END: ret;
}}
"""
    arguments = [np.zeros(512, np.uint8), TensorMap(0, "uint8", **shape)]
    if message:
        with pytest.raises(EmulatorError, match=message):
            run(text, arguments)
    else:
        run(text, arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(address=8), "alignment of the address"),
        (dict(strides=[24]), "strides"),
        (dict(box=[512, 2]), "box"),
        (dict(box=[128, 2], swizzle=2), "inner box beyond the swizzle"),
        (dict(box=[8, 2]), "the inner box is a multiple of 16 bytes"),
        (dict(type=14, box=[64, 2], swizzle=0), "the inner box of 16U4_ALIGN16B is 128"),
        (dict(dims=[0, 4]), "dimensions"),
        (dict(interleave=1), "interleaved layouts are not emulated"),
        (dict(type=99), "element type"),
        (dict(fill=1), "fill"),
    ],
)
def test_tensor_map_that_the_driver_refuses(changes, message):
    arguments = dict(address=1024, type=0, dims=[256, 4], strides=[256], box=[32, 2], swizzle=1)
    encode_tensor_map(**arguments)
    with pytest.raises(EmulatorError, match=message):
        encode_tensor_map(**(arguments | changes))


@pytest.mark.parametrize("number", [1.0, 2.0, 2.0**100])
def test_zeros_times_numbers_of_any_size_are_zero(number):
    bits = int(np.float32(number).view(np.uint32)) >> 16
    text = kernel(
        f"mov.b32 %r2, 0; mov.b32 %r3, {bits << 16 | bits}; mov.f32 %f1, 0f00000000;",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f2, %f3, %f4, %f5},",
        "{%r2, %r2, %r2, %r2}, {%r3, %r3}, {%f1, %f1, %f1, %f1};",
        "mul.wide.u32 %rd2, %r1, 4; add.s64 %rd2, %rd1, %rd2; st.global.f32 [%rd2], %f2;",
    )
    (got,) = run(text, [np.ones(32, np.float32)])
    np.testing.assert_array_equal(got, np.zeros(32))


def test_e4m3_pairs_as_bfloat16():
    """Exact, subnormal numbers included; Hopper has the float16 form alone."""
    text = kernel(
        ".reg .b16 %rs<2>;", *STORE_THREAD[:2], "ld.global.u32 %r2, [%rd2];",
        "cvt.u16.u32 %rs1, %r2; cvt.rn.bf16x2.e4m3x2 %r3, %rs1; st.global.u32 [%rd2], %r3;",
    )  # fmt: skip
    codes = np.arange(256, dtype=np.uint8)
    pairs = codes.view(np.uint16).astype(np.uint32)
    (got,) = run(text, [pairs], block=128)
    want = codes.view(ml_dtypes.float8_e4m3fn).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(
        got.view(ml_dtypes.bfloat16).astype(np.float32), want.astype(np.float32)
    )


def test_subnormal_numbers_stay_on_xlas_threads():
    """They flush them to zero, and the driver's functions are called there."""
    text = kernel(
        *STORE_THREAD[:2], "ld.global.f32 %f1, [%rd2]; mul.rn.f32 %f1, %f1, 0f3F000000;",
        "st.global.f32 [%rd2], %f1;",
    )  # fmt: skip
    numbers = np.full(32, 2.0**-130, np.float32)

    def halve(_: jax.Array) -> np.ndarray:
        (got,) = run(text, [numbers])
        return got.view(np.uint32)

    like = jax.ShapeDtypeStruct((32,), np.uint32)
    got = jax.jit(lambda x: jax.pure_callback(halve, like, x))(np.zeros(1, np.float32))
    np.testing.assert_array_equal(got, (numbers / 2).view(np.uint32))


def test_unknown_settings_and_counts():
    with pytest.raises(KeyError, match="sead"):
        Machine(sead=1)
    with pytest.raises(KeyError, match="nothing"):
        Machine().count("nothing")
