"""Symmetric memory on real GPUs: in one process over all of them, and in two that share the first.

Run: python tests/gpu/check_symmetric_memory.py. Needs cuda-bindings and the built package. Prints
a line for each thing that was right; exits with 1 at the first that was not.
"""

import os
import socket
import subprocess
import sys
from typing import Any

os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.3")

import jax
import numpy as np
from cuda.bindings import driver as cuda

from jax_megamoe import symmetric_memory
from jax_megamoe.runtime import extension
from jax_megamoe.symmetric_memory import SymmetricMemory

KEY, NUM_BYTES = "check", 100_000_003
WORDS = 1024
SPAN = NUM_BYTES // 4 - WORDS  # the last whole words of the buffer


class Registry:
    """The compiled module's registry, which remembers what was registered."""

    def __init__(self) -> None:
        self.buffers: dict[int, tuple[int, list[int], int]] = {}

    def register_symmetric_buffer(self, key: str, ordinal: int, *buffer: Any) -> None:
        extension.module().register_symmetric_buffer(key, ordinal, *buffer)
        self.buffers[ordinal] = buffer[:3]

    def unregister_symmetric_buffer(self, key: str, ordinal: int) -> None:
        extension.module().unregister_symmetric_buffer(key, ordinal)
        del self.buffers[ordinal]


def call(function: str, *arguments: Any) -> Any:
    code, *results = getattr(cuda, function)(*arguments)
    check(code == 0, f"{function} gave {code}")
    return results[0] if len(results) == 1 else results


def check(right: bool, what: str) -> None:
    if not right:
        print(f"WRONG {what}", flush=True)
        sys.exit(1)


def ok(what: str) -> None:
    print(f"ok {what}", flush=True)


def enter(ordinal: int) -> None:
    """Makes a device's context the current one."""
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", ordinal)))


def free_bytes(ordinal: int) -> int:
    enter(ordinal)
    return call("cuMemGetInfo")[0]


def read(ordinal: int, address: int, count: int = WORDS) -> np.ndarray:
    """Words at an address, as a device sees them."""
    enter(ordinal)
    words = np.full(count, -1, np.int32)
    call("cuMemcpyDtoH", words.ctypes.data, address, words.nbytes)
    return words


def write(ordinal: int, address: int, value: int) -> None:
    enter(ordinal)
    call("cuMemsetD32", address, value, WORDS)
    call("cuCtxSynchronize")


def one_process() -> None:
    devices = jax.local_devices()
    registry = Registry()
    memory = SymmetricMemory(open_registry=lambda: registry)
    memory.allocate("warm-up", 1, [devices])
    memory.close()
    before = [free_bytes(device.local_hardware_id) for device in devices]
    memory.allocate(KEY, NUM_BYTES, [devices])
    memory.allocate(KEY, NUM_BYTES, [devices])
    ordinals = [device.local_hardware_id for device in devices]
    for rank, ordinal in enumerate(ordinals):
        base, peers, registered = registry.buffers[ordinal]
        check(registered == rank and peers[rank] == base, f"registration of rank {rank}")
        check(not read(ordinal, base, NUM_BYTES // 4).any(), f"zeros on device {ordinal}")
    ok(f"allocated and zeroed on {len(devices)} devices")
    for rank, ordinal in enumerate(ordinals):
        write(ordinal, registry.buffers[ordinal][0] + 4 * SPAN, 100 + rank)
    for ordinal in ordinals:
        for peer, address in enumerate(registry.buffers[ordinal][1]):
            seen = read(ordinal, address + 4 * SPAN)
            check((seen == 100 + peer).all(), f"device {ordinal} reads {seen[:4]} of rank {peer}")
    ok("every device reads what each rank wrote")
    memory.close()
    memory.close()
    after = [free_bytes(ordinal) for ordinal in ordinals]
    check(after == before and not registry.buffers, f"free bytes {before} before, {after} after")
    ok("closed, all memory back")
    memory.allocate(KEY, NUM_BYTES, [devices])
    check(not read(ordinals[0], registry.buffers[ordinals[0]][0]).any(), "zeros the second time")
    memory.close()
    ok("allocated again")
    try:
        memory.allocate(KEY, 1 << 42, [devices])
    except RuntimeError as error:
        check(f"expected {1 << 42} free bytes, got " in str(error), str(error))
        ok(f"too much: {error}")
    else:
        check(False, "4 TiB allocated")
    try:
        memory.allocate(KEY, free_bytes(ordinals[0]) + (64 << 20), [devices[:1]])
    except RuntimeError as error:
        check("XLA_CLIENT_MEM_FRACTION" in str(error), str(error))
        ok(f"more than JAX left: {error}")
    else:
        check(False, "more than the free bytes allocated")
    check([free_bytes(ordinal) for ordinal in ordinals] == before, "memory back after a failure")
    ok("nothing left of a failure")


def two_processes(me: int, port: str) -> None:
    jax.distributed.initialize(
        f"127.0.0.1:{port}", num_processes=2, process_id=me, local_device_ids=[0]
    )
    groups = [sorted(jax.devices(), key=lambda device: device.process_index)]
    registry = Registry()
    memory = SymmetricMemory(open_registry=lambda: registry)
    memory.allocate("warm-up", 1, groups)
    memory.close()
    files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    memory.allocate(KEY, NUM_BYTES, groups)
    check(len(os.listdir("/proc/self/fd")) == files, "file descriptors left open")  # noqa: PTH208
    ordinal = jax.local_devices()[0].local_hardware_id
    base, peers, rank = registry.buffers[ordinal]
    check(rank == me and peers[me] == base and peers[1 - me] != base, f"registration {peers}")
    for address in peers:
        check(not read(ordinal, address, NUM_BYTES // 4).any(), "zeros")
    symmetric_memory.meet("zeros", groups)
    write(ordinal, base + 4 * SPAN, 1000 + me)
    symmetric_memory.meet("own", groups)
    seen = read(ordinal, peers[1 - me] + 4 * SPAN)
    check((seen == 1001 - me).all(), f"process {me} reads {seen[:4]} of the other")
    write(ordinal, peers[1 - me], 2000 + me)
    symmetric_memory.meet("other", groups)
    seen = read(ordinal, base)
    check((seen == 2001 - me).all(), f"process {me} reads {seen[:4]} from the other")
    if me == 0:
        memory.close()
    symmetric_memory.meet("closed", groups)
    if me == 1:
        seen = read(ordinal, peers[0] + 4 * SPAN)
        check((seen == 1000).all(), f"the other's memory after it closed: {seen[:4]}")
        memory.close()
    ok(f"process {me} and the other read and write each other's memory")
    symmetric_memory.meet("end", groups)


def main() -> None:
    if len(sys.argv) > 1:
        two_processes(int(sys.argv[1]), sys.argv[2])
        return
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
    # Before this process fills the first GPU with its pool.
    pair = [subprocess.Popen([sys.executable, __file__, str(rank), port]) for rank in range(2)]
    check([each.wait() for each in pair] == [0, 0], "two processes")
    one_process()


if __name__ == "__main__":
    main()
