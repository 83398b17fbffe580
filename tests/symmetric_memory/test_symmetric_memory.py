"""Symmetric memory on a fake driver: what is allocated, mapped and registered, and what is left."""

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from fake_cuda import (
    GRANULARITY,
    TOTAL,
    FakeDevice,
    FakeDriver,
    FakeRegistry,
    fake_devices,
    open_descriptors,
)
from jax.sharding import Mesh

from jax_megamoe import symmetric_memory
from jax_megamoe.symmetric_memory import SymmetricMemory, groups_of
from jax_megamoe.symmetric_memory.cuda import CudaDriver, CudaError, HandleType
from jax_megamoe.symmetric_memory.processes import TIMEOUT_VARIABLE

FOLDER = Path(__file__).parent
KEY, NUM_BYTES = "ep/1", 5000


class Setting:
    """A SymmetricMemory with its driver and registry."""

    def __init__(self, **driver: Any) -> None:
        self.driver = FakeDriver(**driver)
        self.registry = FakeRegistry()
        self.memory = SymmetricMemory(lambda: self.driver, lambda: self.registry)

    def allocate(self, groups: Any, num_bytes: int = NUM_BYTES) -> None:
        self.memory.allocate(KEY, num_bytes, groups)

    def held(self) -> list[int]:
        """How many handles, mappings and registrations are alive."""
        return [len(self.driver.handles), len(self.driver.mappings), len(self.registry.buffers)]


def cpu_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    return Mesh(np.array(jax.devices("cpu")[: np.prod(shape)]).reshape(shape), names)


def ids(groups: Any) -> list[list[int]]:
    return [[device.id for device in group] for group in groups]


def test_groups_are_the_axis_at_each_index_of_the_others() -> None:
    mesh = cpu_mesh((2, 4), ("data", "ep"))
    assert ids(groups_of(mesh, "ep")) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert ids(groups_of(mesh, "data")) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_the_last_of_several_axes_varies_fastest() -> None:
    mesh = cpu_mesh((2, 2, 2), ("a", "b", "c"))
    assert ids(groups_of(mesh, ("a", "c"))) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert ids(groups_of(mesh, ("c", "a"))) == [[0, 4, 1, 5], [2, 6, 3, 7]]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_every_rank_has_a_zeroed_buffer_and_its_peers_addresses(num_ranks: int) -> None:
    here = Setting()
    here.allocate([fake_devices(num_ranks)])
    bases = [here.registry.buffers[KEY, rank][0] for rank in range(num_ranks)]
    assert len(set(bases)) == num_ranks
    for rank, base in enumerate(bases):
        assert here.registry.buffers[KEY, rank] == (base, bases, rank, NUM_BYTES)
        assert ctypes.string_at(base, NUM_BYTES) == bytes(NUM_BYTES)
        assert len(here.driver.mappings[base]) == 2 * GRANULARITY
    maps = [call for call in here.driver.calls if call[0] == "map"]
    assert [call[-1] for call in maps] == [tuple(range(num_ranks))] * num_ranks
    assert here.held() == [0, num_ranks, num_ranks]
    assert here.memory.keys() == [KEY]
    here.memory.close()


def test_a_mesh_with_a_further_axis_makes_groups_that_do_not_meet() -> None:
    here, devices = Setting(), fake_devices(8)
    groups = ids(groups_of(cpu_mesh((4, 2), ("ep", "data")), "ep"))
    assert groups == [[0, 2, 4, 6], [1, 3, 5, 7]]
    here.allocate([[devices[each] for each in group] for group in groups])
    for group in groups:
        bases = [here.registry.buffers[KEY, each][0] for each in group]
        for rank, each in enumerate(group):
            assert here.registry.buffers[KEY, each] == (bases[rank], bases, rank, NUM_BYTES)
    maps = [call[-1] for call in here.driver.calls if call[0] == "map"]
    assert maps == [(0, 2, 4, 6)] * 4 + [(1, 3, 5, 7)] * 4
    here.memory.close()


def test_what_is_called_in_which_order() -> None:
    here = Setting()
    here.allocate([fake_devices(2)])
    assert here.driver.names() == (
        ["synchronize"] * 2 + ["create"] * 2 + ["map"] * 2 + ["zero", "synchronize"] * 2
        + ["release"] * 2
    )  # fmt: skip
    kinds = {call[-1] for call in here.driver.calls if call[0] == "create"}
    assert kinds == {HandleType.NONE}
    here.driver.calls.clear()
    here.memory.close()
    assert here.driver.names() == ["synchronize"] * 2 + ["unmap"] * 2


def test_a_second_call_does_nothing() -> None:
    here = Setting()
    here.allocate([fake_devices(2)])
    calls, buffers = len(here.driver.calls), dict(here.registry.buffers)
    here.allocate([fake_devices(2)])
    assert (len(here.driver.calls), here.registry.buffers) == (calls, buffers)
    here.memory.close()


def test_keys_may_be_asked_for_while_buffers_come_and_go() -> None:
    here = Setting()
    here.memory.allocate("held", 1, [fake_devices(1)])
    wrong: list[object] = []

    def change() -> None:
        for index in range(200):
            here.memory.allocate(f"new {index}", 1, [fake_devices(1)])
        for index in range(200):
            here.memory.close(f"new {index}")

    thread = threading.Thread(target=change)
    thread.start()
    while thread.is_alive():
        try:
            if here.memory.keys("held") != ["held"]:
                wrong.append("not found")
        except RuntimeError as error:
            wrong.append(error)
    thread.join()
    assert (wrong, here.memory.keys()) == ([], ["held"])
    here.memory.close()


def test_what_is_allocated_is_found_while_another_key_waits() -> None:
    """An allocation may wait for other processes for long: no lookup waits for it."""
    here = Setting()
    here.allocate([fake_devices(1)])
    begun, done = threading.Event(), threading.Event()

    def prepare() -> None:
        begun.set()
        assert done.wait(60)

    arguments: dict[str, Any] = {"groups": [fake_devices(1)], "prepare": prepare}
    thread = threading.Thread(target=here.memory.allocate, args=("new", 1), kwargs=arguments)
    thread.start()
    assert begun.wait(60)
    here.allocate([fake_devices(1)])
    assert here.memory.keys() == [KEY]
    done.set()
    thread.join()
    assert here.memory.keys() == [KEY, "new"]
    here.memory.close()


@pytest.mark.parametrize(
    ("num_bytes", "count", "got"),
    [(6000, 2, r"6000 over \[\[0, 1\]\]"), (NUM_BYTES, 1, r"5000 over \[\[0\]\]")],
)
def test_one_key_has_one_size_and_place(num_bytes: int, count: int, got: str) -> None:
    here = Setting()
    here.allocate([fake_devices(2)])
    text = r"'ep/1': expected 5000 bytes over devices \[\[0, 1\]\], as allocated, got " + got
    with pytest.raises(ValueError, match=text + "; close it first, or use another key"):
        here.allocate([fake_devices(count)], num_bytes)
    here.memory.close()
    here.allocate([fake_devices(count)], num_bytes)
    here.memory.close()


def test_closing_twice_and_closing_what_is_not_there() -> None:
    here = Setting()
    here.memory.close()
    here.allocate([fake_devices(2)])
    here.memory.allocate("other", 1, [fake_devices(2)])
    here.memory.close("no such key")
    here.memory.close(KEY)
    assert here.memory.keys() == ["other"]
    here.memory.close(KEY)
    here.memory.close()
    here.memory.close()
    assert here.held() == [0, 0, 0]


def test_nothing_is_freed_while_a_graph_holds_an_address() -> None:
    here = Setting()
    here.allocate([fake_devices(2)])
    buffers = dict(here.registry.buffers)
    here.registry.pinned = {1}
    with pytest.raises(RuntimeError, match="pinned"):
        here.memory.close(KEY)
    assert (here.registry.buffers, here.held()) == (buffers, [0, 2, 2])
    assert "unmap" not in here.driver.names()
    here.registry.pinned = set()
    here.memory.close(KEY)
    assert here.held() == [0, 0, 0]


def test_a_failure_anywhere_leaves_nothing() -> None:
    whole = Setting()
    whole.allocate([fake_devices(2)])
    last = len(whole.driver.calls) - 2  # the two handles released at the end
    whole.memory.close()
    before = open_descriptors()
    for index in range(last):
        here = Setting(fail_at=index)
        with pytest.raises(RuntimeError, match="CUDA_ERROR_UNKNOWN"):
            here.allocate([fake_devices(2)])
        assert (here.held(), here.memory.keys()) == ([0, 0, 0], [])
        assert open_descriptors() == before
        here.driver.fail_at = None
        here.allocate([fake_devices(2)])
        here.memory.close()


def test_closing_frees_even_where_the_device_failed() -> None:
    here = Setting()
    here.allocate([fake_devices(2)])
    here.driver.fail_at = len(here.driver.calls)
    with pytest.raises(CudaError, match="synchronize: CUDA_ERROR_UNKNOWN"):
        here.memory.close()
    assert (here.held(), here.memory.keys()) == ([0, 0, 0], [])


def test_a_failed_registration_leaves_nothing() -> None:
    here = Setting()
    here.registry.taken = {2}
    with pytest.raises(ValueError, match="taken"):
        here.allocate([fake_devices(4)])
    assert here.held() == [0, 0, 0]


def test_too_little_memory_says_what_to_change() -> None:
    here = Setting(free=GRANULARITY)
    text = (
        rf"symmetric buffer 'ep/1' on device 0: expected {2 * GRANULARITY} free bytes, got "
        rf"{GRANULARITY} of {TOTAL}; lower max_num_tokens, or leave room beside JAX's pool: "
        r"XLA_CLIENT_MEM_FRACTION \(0\.75 by default\) below 0\.99, set before JAX starts"
    )
    with pytest.raises(RuntimeError, match=text):
        here.allocate([fake_devices(2)])
    assert here.held() == [0, 0, 0]


def test_more_than_the_device_has_is_no_matter_of_jax() -> None:
    with pytest.raises(RuntimeError, match=rf"of {TOTAL}; lower max_num_tokens$"):
        Setting().allocate([fake_devices(1)], TOTAL + 1)


def test_devices_of_two_kinds_are_refused() -> None:
    groups = [[FakeDevice(0, 0, 0), FakeDevice(1, 0, 1, core_count=78)]]
    text = (
        r"groups\[0\]: expected devices of one kind, got \{'rank 0': '132 SMs of sm_90', "
        r"'rank 1': '78 SMs of sm_90'\}; the buffer's layout depends on it"
    )
    with pytest.raises(ValueError, match=text):
        Setting().allocate(groups)


def test_devices_that_do_not_reach_each_other_are_refused() -> None:
    here = Setting(unreachable=[(1, 2)])
    text = (
        r"groups\[0\]: expected devices that reach each other's memory, atomics included "
        r"\(NVLink\), got none between CUDA devices 1 and 2"
    )
    with pytest.raises(NotImplementedError, match=text):
        here.allocate([fake_devices(4)])
    assert here.held() == [0, 0, 0]


def test_devices_of_two_groups_need_not_reach_each_other() -> None:
    here, devices = Setting(unreachable=[(0, 2), (0, 3), (1, 2), (1, 3)]), fake_devices(4)
    here.allocate([devices[:2], devices[2:]])
    here.memory.close()


def test_a_mapping_that_the_machine_refuses() -> None:
    text = (
        r"symmetric buffer 'ep/1', rank 0 of groups\[0\]: expected memory that devices \[0\] can "
        "map, got map: CUDA_ERROR_NOT_SUPPORTED"
    )
    with pytest.raises(NotImplementedError, match=text):
        Setting(refuse="map").allocate([fake_devices(1)])


def test_other_devices_than_cudas_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="device: expected a CUDA device"):
        Setting().allocate([[jax.devices("cpu")[0]]])


def test_bad_arguments() -> None:
    device = fake_devices(1)
    with pytest.raises(
        ValueError, match=r"groups: expected each device once, got devices \[\[0, 0"
    ):
        Setting().allocate([device * 2])
    with pytest.raises(ValueError, match="num_bytes: expected an integer >= 1, got 0"):
        Setting().allocate([device], 0)


def test_a_process_without_a_device_in_the_groups_has_nothing_to_do() -> None:
    here = Setting()
    here.allocate([[FakeDevice(0, 1), FakeDevice(1, 2)]])
    symmetric_memory.meet("elsewhere", [[FakeDevice(0, 1)]])  # type: ignore[list-item]
    assert (here.driver.calls, here.memory.keys()) == ([], [])


def test_several_processes_need_jax_distributed() -> None:
    text = (
        "jax.distributed: expected an initialised client, for devices of several processes, got "
        r"None; call jax\.distributed\.initialize\(\) before anything else of JAX"
    )
    with pytest.raises(RuntimeError, match=text):
        Setting().allocate([[FakeDevice(0, 0, 0), FakeDevice(1, 1)]])


def test_one_process_meets_itself_at_once() -> None:
    symmetric_memory.meet("first launch", [fake_devices(2)])


@pytest.mark.parametrize("seconds", ["soon", "0", "nan"])
def test_the_timeout_is_a_number(seconds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT_VARIABLE, seconds)
    text = f"JAX_MEGAMOE_MEET_TIMEOUT: expected a number of seconds > 0, got '{seconds}'"
    with pytest.raises(ValueError, match=text):
        symmetric_memory.meet("first launch", [fake_devices(1)])
    with pytest.raises(ValueError, match="timeout: expected a number of seconds > 0, got -1"):
        symmetric_memory.meet("first launch", [fake_devices(1)], timeout=-1)


def test_without_cuda_bindings_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    text = (
        r"cuda: expected cuda-bindings and an NVIDIA driver, which allocate symmetric buffers, got "
        r".*; pip install 'jax-megamoe\[cuda13\]'"
    )
    with pytest.raises(ImportError, match=text):
        SymmetricMemory().allocate(KEY, NUM_BYTES, [fake_devices(1)])


class Bindings(SimpleNamespace):
    """As much of cuda.bindings.driver as mapping takes: every call succeeds but `failing`."""

    def __init__(self, failing: str) -> None:
        names: list[str] = []
        flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
        location = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
        super().__init__(names=names, CUmemAccess_flags=flags, CUmemLocationType=location)
        self.CUmemAccessDesc = lambda: SimpleNamespace(location=SimpleNamespace())
        self._failing = failing

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> tuple[Any, ...]:
            self.names.append(name)
            error = SimpleNamespace(name="CUDA_ERROR_UNKNOWN")
            return (error if name == self._failing else 0, 64)

        return call


@pytest.mark.parametrize(
    ("failing", "undone"),
    [
        ("cuMemAddressReserve", []),
        ("cuMemMap", ["cuMemAddressFree"]),
        ("cuMemSetAccess", ["cuMemUnmap", "cuMemAddressFree"]),
    ],
)
def test_a_half_made_mapping_is_undone(failing: str, undone: list[str]) -> None:
    bindings = Bindings(failing)
    with pytest.raises(CudaError, match=f"^{failing}: CUDA_ERROR_UNKNOWN$"):
        CudaDriver(bindings).map(1, GRANULARITY, [0])
    assert bindings.names[bindings.names.index(failing) + 1 :] == undone


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    """What each of two processes of symmetric_processes.py reports, by case."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    paths = os.pathsep.join([str(FOLDER.parent), *filter(None, sys.path)])
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    program = [sys.executable, str(FOLDER / "symmetric_processes.py")]
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ranks = [
        subprocess.Popen([*program, str(rank), port], env=environment, **pipes) for rank in (0, 1)
    ]
    reports = []
    try:
        for each in ranks:
            out, err = each.communicate(timeout=120)
            assert each.returncode == 0, err
            reports.append(json.loads(out))
    finally:
        for each in ranks:
            each.kill()
    return reports


@pytest.mark.parametrize(
    ("case", "kind"), [("descriptor", "POSIX_FD"), ("again", "POSIX_FD"), ("fabric", "FABRIC")]
)
def test_two_processes_read_what_the_other_wrote(
    outcomes: list[dict[str, Any]], case: str, kind: str
) -> None:
    for rank, seen in enumerate(["B", "A"]):
        assert outcomes[rank][case] == dict(
            zeroed=True, seen=[seen], own=True, rank=rank, kinds=[kind], left=[0] * 3, descriptors=0
        )


REFUSED = (
    "NotImplementedError: symmetric buffer 'ep/2', rank 0 of groups[0]: expected memory that "
    "devices [0] can map, got import_handle: CUDA_ERROR_NOT_SUPPORTED"
)
SHORTAGE = "RuntimeError: symmetric buffer 'ep/2' on device 0: expected 8192 free bytes, got 0 of"
EQUAL = (
    "{}: expected the same value in every process, got {} in process 0 (groups[0][0]), {} in "
    "process 1 (groups[0][1]); all processes make the same calls, in the same order, with equal "
    "configs"
)
UNPREPARED = "OSError: no compiler"
NO_FABRIC = (
    "groups[0]: expected processes of one host and container, or FABRIC handles, got no FABRIC "
    "support on rank 1; ranks on several hosts need an NVLink domain (such as an NVL72) with an "
    "IMEX channel for this user"
)


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("sizes", ["ValueError: " + EQUAL.format("num_bytes", 5000, 5001)] * 2),
        ("keys", ["ValueError: " + EQUAL.format("key", "ep/2/0", "ep/2/1")] * 2),
        ("facts", ["ValueError: " + EQUAL.format("b", "", "x")] * 2),
        ("prepare", [f"got process 1 (groups[0][1]) raised {UNPREPARED}", UNPREPARED]),
        ("no_fabric", [f"NotImplementedError: {NO_FABRIC}"] * 2),
        ("shortage", [SHORTAGE, f"got process 0 (groups[0][0]) raised {SHORTAGE}"]),
        ("refused", [f"got process 1 (groups[0][1]) raised {REFUSED}", REFUSED]),
        ("refused_fabric", [f"got process 1 (groups[0][1]) raised {REFUSED}", REFUSED]),
    ],
)
def test_what_fails_in_one_process_fails_in_both(
    outcomes: list[dict[str, Any]], case: str, texts: list[str]
) -> None:
    for report, text in zip(outcomes, texts, strict=True):
        got = report[case]
        assert text in f"{got['type']}: {got['text']}"
        assert (got["left"], got["descriptors"]) == ([0, 0, 0], 0)


def test_configs_that_differ_are_refused_before_anything_waits(
    outcomes: list[dict[str, Any]],
) -> None:
    refused = {"text": EQUAL.format("max_num_tokens", 128, 256), "keys": []}
    assert [each["configs"] for each in outcomes] == [refused] * 2


def test_the_process_that_did_not_come_is_named(outcomes: list[dict[str, Any]]) -> None:
    assert outcomes[1]["late"]["text"] == (
        "first launch: expected 2 processes to come within 0.2 s, got no sign of process 0 "
        "(groups[0][0]); look at their logs, or set JAX_MEGAMOE_MEET_TIMEOUT to more seconds"
    )
