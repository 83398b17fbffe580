"""One of two processes that allocate symmetric buffers together, each on a fake device: prints the
outcome of each case as JSON. Arguments: rank, port of the coordinator."""

import ctypes
import json
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
from fake_cuda import FakeDevice, FakeDriver, FakeRegistry, open_descriptors

from jax_megamoe import MoEConfig, symmetric_memory
from jax_megamoe.launch import deep_gemm
from jax_megamoe.symmetric_memory import SymmetricMemory, peer
from jax_megamoe.symmetric_memory.cuda import HandleType

KEY, NUM_BYTES = "ep/2", 5000
RANK = int(sys.argv[1])
GROUPS: Any = [[FakeDevice(0, 0, 0), FakeDevice(1, 1, 0)]]


def exchange(driver: FakeDriver, num_bytes: int = NUM_BYTES, **options: Any) -> dict[str, Any]:
    """Allocates, writes to the own buffer and reads the other's; then frees."""
    registry = FakeRegistry()
    memory = SymmetricMemory(lambda: driver, lambda: registry)
    before = open_descriptors()
    try:
        memory.allocate(options.pop("key", KEY), num_bytes, GROUPS, **options)
    except Exception as error:
        outcome = {"type": type(error).__name__, "text": str(error)}
    else:
        base, peers, rank, size = registry.buffers[KEY, 0]
        other = peers[1 - RANK]
        symmetric_memory.meet("read", GROUPS)
        zeroed = ctypes.string_at(other, size) == bytes(size)
        symmetric_memory.meet("write", GROUPS)
        ctypes.memset(base, 65 + RANK, size)
        symmetric_memory.meet("written", GROUPS)
        seen = ctypes.string_at(other, size).decode()
        symmetric_memory.meet("close", GROUPS)
        memory.close()
        own = peers[RANK] == base
        kinds = [call[-1].name for call in driver.calls if call[0] == "create"]
        outcome = dict(zeroed=zeroed, seen=sorted(set(seen)), own=own, rank=rank, kinds=kinds)
    left = [len(driver.handles), len(driver.mappings), len(registry.buffers)]
    return outcome | {"left": left, "descriptors": open_descriptors() - before}


def late() -> dict[str, Any]:
    """Only rank 1 comes."""
    if RANK == 0:
        return {}
    try:
        symmetric_memory.meet("first launch", GROUPS, timeout=0.2)
    except TimeoutError as error:
        return {"text": str(error)}
    raise AssertionError


def configs() -> dict[str, Any]:
    """The processes have configs that differ in max_num_tokens, and therefore keys and sizes."""
    sizes = {"num_experts": 16, "top_k": 4, "hidden_size": 1024, "intermediate_size": 512}
    config = MoEConfig(**sizes, max_num_tokens=128 << RANK, weight_format="fp8_block")
    memory = SymmetricMemory(FakeDriver, FakeRegistry)
    symmetric_memory.allocate, allocate = memory.allocate, symmetric_memory.allocate
    deep_gemm.compiler.find_source = lambda name: SimpleNamespace(version="1")
    try:
        deep_gemm.find_route(config, GROUPS, "ep")
    except ValueError as error:
        return {"text": str(error), "keys": memory.keys()}
    finally:
        symmetric_memory.allocate = allocate
    raise AssertionError


def unprepared() -> None:
    """What rank 1 cannot do before it allocates."""
    if RANK:
        raise OSError("no compiler")


def other_host(driver: FakeDriver) -> dict[str, Any]:
    """The processes believe that they are on two hosts."""
    place, peer.place = peer.place, lambda: f"host {RANK}"
    try:
        return exchange(driver)
    finally:
        peer.place = place


class LateDriver(FakeDriver):
    """Rank 1 fails to import, while rank 0 has not begun to; it begins a moment later."""

    def import_handle(self, shared: int | bytes, kind: HandleType) -> int:
        if RANK:
            symmetric_memory.meet("refused", GROUPS)
        return super().import_handle(shared, kind)

    def map(self, handle: int, num_bytes: int, ordinals: Sequence[int]) -> int:
        if len(self.mappings) == RANK == 0:  # its own memory, the first that it maps
            symmetric_memory.meet("refused", GROUPS)
            time.sleep(0.3)
        return super().map(handle, num_bytes, ordinals)


def refused(*, fabric: bool) -> FakeDriver:
    return LateDriver(fabric=fabric, refuse="import_handle" if RANK else "")


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "descriptor": lambda: exchange(FakeDriver()),
    "again": lambda: exchange(FakeDriver()),
    "fabric": lambda: other_host(FakeDriver(fabric=True)),
    "no_fabric": lambda: other_host(FakeDriver(fabric=RANK == 0)),
    "shortage": lambda: exchange(FakeDriver(free=RANK * (1 << 20))),
    "sizes": lambda: exchange(FakeDriver(), NUM_BYTES + RANK),
    "keys": lambda: exchange(FakeDriver(), key=f"{KEY}/{RANK}"),
    "facts": lambda: exchange(
        FakeDriver(), NUM_BYTES + RANK, facts=lambda: {"a": 1, "b": "x" * RANK}
    ),
    "configs": configs,
    "prepare": lambda: exchange(FakeDriver(), prepare=unprepared),
    "refused": lambda: exchange(refused(fabric=False)),
    "refused_fabric": lambda: other_host(refused(fabric=True)),
    "late": late,
}

jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", num_processes=2, process_id=RANK)
jax.devices()  # opens files of its own
print(json.dumps({name: run() for name, run in CASES.items()}))
symmetric_memory.meet("end", GROUPS)
