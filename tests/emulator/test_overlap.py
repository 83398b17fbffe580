"""Launches that overlap: each rule of the check on small kernels, kept and broken.

A chain is launches of one stream on one array `a`, named first, second, third; all but the first
have the attribute of programmatic stream serialization. Real kernels: `test_mutations.py`.
"""

from collections.abc import Sequence

import numpy as np
import pytest

from emulator import planned
from emulator.fixtures import needs
from emulator.machine import (
    TENSOR_TYPES,
    After,
    EmulatorError,
    Launch,
    Machine,
    aligned,
    encode_tensor_map,
)
from jax_megamoe.plan.kernel import KernelSpec, LaunchConfig
from jax_megamoe.plan.launch import Fill, KernelLaunch, LaunchPlan, Pointer
from jax_megamoe.plan.operand import SYMMETRIC_BUFFER, Operand
from jax_megamoe.plan.symmetric_buffer import BufferLayout

NAMES = ("first", "second", "third")
WAIT, TRIGGER = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
READ, WRITE = "ld.global.u32 %r9, [%rd1];", "st.global.u32 [%rd1], %r1;"
READ_CONSTANT = "ld.global.nc.u32 %r9, [%rd1];"
FOR_0 = "setp.ne.s32 %p1, %r1, 0; @%p1 bra {0};\n{1}\n{0}:"
FOR_LATER_WARPS = "setp.lt.s32 %p2, %r1, 32; @%p2 bra {0};\n{1}\n{0}:"


@pytest.fixture(autouse=True)
def compiler():
    needs()


def only(lanes: str, label: str, *statements: str) -> str:
    """Statements of thread 0, or of all but the first warp."""
    return lanes.format(label, "\n".join(statements))


def kernel(*statements: str) -> str:
    """`a` in %rd1, a map of it in %rd2; thread and CTA in %r1, %r2; shared memory in %r3, %r4."""
    body = "\n".join(statements)
    return f""".version 9.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 a, .param .align 64 .b8 map[128])
{{
.reg .pred %p<9>; .reg .b32 %r<19>; .reg .b64 %rd<9>;
.shared .align 128 .b8 s[512];
ld.param.u64 %rd1, [a]; cvta.to.global.u64 %rd1, %rd1;
mov.b64 %rd2, map; cvta.param.u64 %rd2, %rd2;
mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, s; add.s32 %r4, %r3, 128;
{body}
ret;
}}
"""


class Chain:
    """Launches of a stream on one array."""

    def __init__(self, **settings: float) -> None:
        self.machine = Machine(**settings)
        address = self.machine.region(aligned(512), "a")
        box = dict(dims=[16, 32], strides=[16], box=[16, 1], swizzle=0)
        tensor = encode_tensor_map(address, TENSOR_TYPES["uint8"], **box)
        self.parameters = [address.to_bytes(8, "little"), tensor]

    def launch(
        self, name: str, *texts: str, early: bool = True, grid: int = 1, cluster: int = 1
    ) -> None:
        """A launch of 64 threads a CTA; of several texts: one of each rank."""
        shape = ((grid, 1, 1), (64, 1, 1), (cluster, 1, 1))
        launches = [
            Launch(text, self.parameters, *shape, rank=rank) for rank, text in enumerate(texts)
        ]
        self.machine.launch(launches, After(name, early))

    def run(self, steps: Sequence[Sequence[str]], **shape: int) -> None:
        """The first launch is an ordinary one of one CTA."""
        for name, statements in zip(NAMES, steps, strict=False):
            first = name == "first"
            self.launch(name, kernel(*statements), early=not first, **({} if first else shape))


def reads(by: str, of: str, how: str = "before griddepcontrol.wait") -> str:
    return rf"overlap: {by} reads a\+0 {how}: {of}, which wrote it, may still run .*PTX line \d+"


BEHIND_ITS_WAIT = "after a griddepcontrol.wait that does not cover it"
UNORDERED = "by ld.global.nc, which no wait orders"

RULES: dict[str, tuple[list[list[str]], str]] = {
    "read behind the wait": ([[WRITE], [WAIT, READ]], ""),
    "read before the wait": ([[WRITE], [READ, WAIT]], reads("second", "first")),
    "read without a wait": ([[WRITE], [READ]], reads("second", "first")),
    "write behind the wait": ([[READ], [WAIT, WRITE]], ""),
    "write before the wait": (
        [[READ], [WRITE]],
        r"overlap: second writes a\+0 before griddepcontrol.wait: first, which read it, may still",
    ),
    "both read": ([[READ], [READ]], ""),
    "other bytes": ([[WRITE], ["st.global.u32 [%rd1+4], %r1;"]], ""),
    "atomic before the wait": (
        [[WRITE], ["red.global.add.u32 [%rd1], 1;"]],
        reads("second", "first"),
    ),
    "the launch between lets the third start after its wait": (
        [[WRITE], [WAIT, TRIGGER], [READ]],
        "",
    ),
    "its exit lets the third start": ([[WRITE], [WAIT], [READ]], ""),
    "it lets the third start before its wait": (
        [[WRITE], [TRIGGER, WAIT], [READ]],
        reads("third", "first"),
    ),
    "the third waits for it, and so for the first": ([[WRITE], [TRIGGER, WAIT], [WAIT, READ]], ""),
    "it never waits": (
        [[WRITE], [TRIGGER], [WAIT, READ]],
        reads("third", "first", BEHIND_ITS_WAIT),
    ),
    "a thread that did not wait lets the third start": (
        [[WRITE], [only(FOR_LATER_WARPS, "W", WAIT), only(FOR_0, "T", TRIGGER)], [READ]],
        reads("third", "first"),
    ),
    "constant load of what a launch may still store": (
        [[TRIGGER, WRITE], [WAIT, READ_CONSTANT]],
        reads("second", "first", UNORDERED),
    ),
    "plain load of it": ([[TRIGGER, WRITE], [WAIT, READ]], ""),
    "constant load behind a launch that stored all before": ([[WRITE], [WAIT, READ_CONSTANT]], ""),
    "constant load of what is older than the launch ahead": (
        [[TRIGGER, WRITE], [WAIT], [WAIT, READ_CONSTANT]],
        "",
    ),
}


@pytest.mark.parametrize("what", RULES)
def test_rule(what):
    steps, message = RULES[what]
    if message:
        with pytest.raises(EmulatorError, match=message):
            Chain().run(steps)
    else:
        Chain().run(steps)


def test_of_several_ctas_one_that_waits_before_its_end_suffices():
    waits_in_cta_1 = "setp.eq.s32 %p1, %r2, 0; @%p1 bra END;" + WAIT + "END:"
    Chain().run([[WRITE], [waits_in_cta_1], [READ]], grid=2)
    with pytest.raises(EmulatorError, match=reads("third", "first")):
        Chain().run([[WRITE], [], [READ]], grid=2)


def test_ordinary_launch_starts_when_all_before_it_have_ended():
    chain = Chain()
    chain.run([[WRITE], [TRIGGER]])
    chain.launch("third", kernel(READ, WRITE), early=False)
    with pytest.raises(EmulatorError, match=reads("fourth", "third")):
        chain.launch("fourth", kernel(READ))


def test_ranks_count_as_one():
    """What one rank's launch does not wait for is not waited for."""
    for other, message in ((WAIT, ""), ("", reads("third", "first", BEHIND_ITS_WAIT))):
        chain = Chain()
        chain.run([[WRITE]])
        chain.launch("second", kernel(WAIT), kernel(other))
        if message:
            with pytest.raises(EmulatorError, match=message):
                chain.launch("third", kernel(WAIT, READ))
        else:
            chain.launch("third", kernel(WAIT, READ))


def test_first_launch_may_not_start_early_and_chains_are_short():
    with pytest.raises(EmulatorError, match="first is the first launch and may not start early"):
        Chain().launch("first", kernel())
    chain = Chain()
    chain.launch("0", kernel(), early=False)
    for i in range(1, 8):
        chain.launch(str(i), kernel(WAIT))
    with pytest.raises(EmulatorError, match="8: more than 8 launches that overlap"):
        chain.launch("8", kernel())


BARRIER = "mbarrier.init.shared::cta.b64 [%r3], {};"
ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [%r3];"
AWAIT = "L: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r3], 0; @!%p4 bra L;"
BULK = (
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 16;\n"
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r4], [%rd1+256], 16, "
    "[%r3];"
)
CLUSTER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
OTHERS_READ = only(FOR_LATER_WARPS, "R", READ)
WAIT_0 = only(FOR_0, "A", WAIT)
INIT_1 = only(FOR_0, "I", BARRIER.format(1)) + "bar.sync 0;"

ORDERS: dict[str, tuple[list[str], bool]] = {
    "another thread's wait": ([WAIT_0, OTHERS_READ], False),
    "another thread's wait, then a barrier": ([WAIT_0, "bar.sync 0;", OTHERS_READ], True),
    "a barrier before the wait": (["bar.sync 0;", WAIT_0, OTHERS_READ], False),
    "a barrier that the waiting warp only arrives at": (
        ["setp.lt.s32 %p3, %r1, 32; @!%p3 bra O;", WAIT, "bar.arrive 1, 64; bra E;",
         "O: bar.sync 1, 64;", READ, "E:"],
        True,
    ),
    "another barrier": (
        ["setp.lt.s32 %p3, %r1, 32; @!%p3 bra O;", WAIT, "bar.arrive 1, 64; bra E;",
         "O: bar.sync 2, 32;", READ, "E: bar.sync 3;"],
        False,
    ),
    "lanes of a warp, synchronised": (
        [WAIT_0, "bar.warp.sync -1;", "setp.gt.s32 %p3, %r1, 31; @%p3 bra E;", READ, "E:"],
        True,
    ),
    "lanes of a warp": ([WAIT_0, "setp.gt.s32 %p3, %r1, 31; @%p3 bra E;", READ, "E:"], False),
    "mbarrier": ([INIT_1, only(FOR_0, "A", WAIT, ARRIVE), AWAIT, OTHERS_READ], True),
    "mbarrier before the wait": (
        [INIT_1, only(FOR_0, "A", ARRIVE, WAIT), AWAIT, OTHERS_READ],
        False,
    ),
    "copy behind the wait completes a phase": (
        [INIT_1, only(FOR_0, "A", WAIT, BULK), AWAIT, OTHERS_READ],
        True,
    ),
    "copy before the wait completes a phase": (
        [INIT_1, only(FOR_0, "A", BULK, WAIT), AWAIT, OTHERS_READ],
        False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("delay", [0, 0.7])
@pytest.mark.parametrize("what", ORDERS)
def test_threads_behind_anothers_wait(what, delay):
    statements, ordered = ORDERS[what]
    chain = Chain(delay=delay)
    if ordered:
        return chain.run([[WRITE], statements])
    with pytest.raises(EmulatorError, match=reads("second", "first")):
        chain.run([[WRITE], statements])


@pytest.mark.parametrize("barrier", [CLUSTER, ""])
def test_threads_of_a_cluster_behind_anothers_wait(barrier):
    first_waits = "setp.ne.s32 %p1, %r2, 0; @%p1 bra E;" + WAIT + "E:"
    others_read = "@!%p1 bra F;" + READ + "F:"
    steps = [[WRITE], [first_waits, barrier, others_read]]
    if barrier:
        return Chain().run(steps, grid=2, cluster=2)
    with pytest.raises(EmulatorError, match=reads("second", "first")):
        Chain().run(steps, grid=2, cluster=2)


TENSOR_LOAD = (
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[%r4], [%rd2, {0, 0}], [%r3];"
)
COPIES = {
    "cp.async": ["cp.async.ca.shared.global [%r4], [%rd1], 16;"],
    "bulk load": [BARRIER.format(1), BULK.replace("+256", "")],
    "tensor load": [BARRIER.format(1), TENSOR_LOAD],
    "bulk store": ["cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r4], 16;"],
    "tensor store": [
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd2, {0, 0}], [%r4];"
    ],
}


@pytest.mark.parametrize("delay", [0, 0.7])
@pytest.mark.parametrize("what", COPIES)
def test_copies_are_as_ordered_as_the_thread_that_issues_them(what, delay):
    stores = what.endswith("store")
    ahead, does, did = (READ, "writes", "read") if stores else (WRITE, "reads", "wrote")
    copy = only(FOR_0, "C", *COPIES[what])
    Chain(delay=delay).run([[ahead], [WAIT, copy]])
    message = (
        rf"overlap: second {does} a\+0 before griddepcontrol.wait: first, which {did} it, may still"
        r" run .*PTX line \d+ `cp.async"
    )
    with pytest.raises(EmulatorError, match=message):
        Chain(delay=delay).run([[ahead], [copy, WAIT]])


def step(name: str, early: bool) -> KernelLaunch:
    config = LaunchConfig((1, 1, 1), (32, 1, 1), programmatic_serialization=early)
    spec = KernelSpec("jax_megamoe", "sm_90a", "none.cuh", name, (), ())
    return KernelLaunch(spec, config, (Pointer("a", Operand("a")),))


def test_launch_behind_a_fill_starts_after_it(monkeypatch):
    text = kernel(READ, WRITE).replace(", .param .align 64 .b8 map[128]", "")
    text = text.replace("mov.b64 %rd2, map; cvta.param.u64 %rd2, %rd2;", "")
    monkeypatch.setattr(planned, "ptx_of", lambda spec: text)
    between = Fill(Operand(SYMMETRIC_BUFFER), 8)
    launches = step("first", False), step("second", True)

    def run(*steps):
        plan = LaunchPlan(steps, BufferLayout(0, 0, ()), 1, 8)
        return planned.run([plan], [{}], [{"a": ((1,), np.uint32)}])

    run(launches[0], between, launches[1])
    with pytest.raises(EmulatorError, match=r"second reads rank 0 a\+0 before griddepcontrol.wait"):
        run(*launches)
