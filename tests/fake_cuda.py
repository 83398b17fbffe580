"""What stands for CUDA in tests of symmetric memory: devices, a driver on shared memory files, and
a registry in the place of the compiled module's.

Memory is real: an allocation is a memfd, an address one of an mmap of it, an exported handle a
file descriptor that another process can take and map.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jax_megamoe.symmetric_memory.cuda import OUT_OF_MEMORY, CudaError, HandleType
from jax_megamoe.symmetric_memory.processes import take_descriptor

GRANULARITY = 4096
TOTAL = 1 << 20
GARBAGE = b"\xab"


@dataclass(frozen=True)
class FakeDevice:
    """What the package reads of a CUDA device."""

    id: int
    process_index: int = 0
    local_hardware_id: int | None = None
    core_count: int = 132
    compute_capability: str = "9.0"
    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"


def fake_devices(count: int) -> list[Any]:
    """Devices of this process."""
    return [FakeDevice(index, 0, index) for index in range(count)]


@dataclass
class FakeDriver:
    """A `Driver` on files.

    Attributes:
        free: bytes of each device to allocate.
        fabric: whether devices support it.
        unreachable: pairs of devices without peer access.
        fail_at: index in `calls` of a call that fails; None for none.
        refuse: a function that the machine does not support.
        calls: name and arguments of every call so far.
        handles, mappings: those alive; a handle's file descriptor, an address's mapping.
    """

    free: int = TOTAL
    fabric: bool = False
    unreachable: Sequence[tuple[int, int]] = ()
    fail_at: int | None = None
    refuse: str = ""
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    handles: dict[int, int] = field(default_factory=dict)
    mappings: dict[int, mmap.mmap] = field(default_factory=dict)

    def _log(self, *call: Any) -> None:
        self.calls.append(call)
        if len(self.calls) - 1 == self.fail_at:
            raise CudaError(call[0], "CUDA_ERROR_UNKNOWN")
        if call[0] == self.refuse:
            raise CudaError(call[0], "CUDA_ERROR_NOT_SUPPORTED")

    def _handle(self, descriptor: int) -> int:
        handle = 1000 + len(self.calls)
        self.handles[handle] = descriptor
        return handle

    def names(self) -> list[str]:
        """The calls that change something, in order."""
        queries = {"supports_fabric", "pci_bus_id", "ordinal_at", "can_reach", "granularity"}
        return [call[0] for call in self.calls if call[0] not in queries]

    def supports_fabric(self, ordinal: int) -> bool:
        self._log("supports_fabric", ordinal)
        return self.fabric

    def pci_bus_id(self, ordinal: int) -> str:
        self._log("pci_bus_id", ordinal)
        return f"0000:{ordinal:02x}:00.0"

    def ordinal_at(self, pci_bus_id: str) -> int | None:
        self._log("ordinal_at", pci_bus_id)
        return int(pci_bus_id.split(":")[1], 16)

    def can_reach(self, ordinal: int, peer: int) -> bool:
        self._log("can_reach", ordinal, peer)
        return (ordinal, peer) not in self.unreachable

    def memory_info(self, ordinal: int) -> tuple[int, int]:
        self._log("memory_info", ordinal)
        return self.free, TOTAL

    def granularity(self, ordinal: int, kind: HandleType) -> int:
        self._log("granularity", ordinal, kind)
        return GRANULARITY

    def create(self, ordinal: int, num_bytes: int, kind: HandleType) -> int:
        self._log("create", ordinal, num_bytes, kind)
        if num_bytes > self.free:
            raise CudaError("cuMemCreate", OUT_OF_MEMORY)
        descriptor = os.memfd_create("symmetric")
        os.write(descriptor, GARBAGE * num_bytes)
        return self._handle(descriptor)

    def release(self, handle: int) -> None:
        self._log("release", handle)
        os.close(self.handles.pop(handle))

    def export(self, handle: int, kind: HandleType) -> int | bytes:
        self._log("export", handle, kind)
        if kind is HandleType.FABRIC:
            return f"{os.getpid()} {self.handles[handle]}".encode().ljust(64, b"\0")
        return os.dup(self.handles[handle])

    def import_handle(self, shared: int | bytes, kind: HandleType) -> int:
        self._log("import_handle", shared, kind)
        if isinstance(shared, bytes):
            assert len(shared) == 64
            return self._handle(take_descriptor(*map(int, shared.strip(b"\0").split())))
        return self._handle(os.dup(shared))

    def map(self, handle: int, num_bytes: int, ordinals: Sequence[int]) -> int:
        self._log("map", handle, num_bytes, tuple(ordinals))
        mapping = mmap.mmap(self.handles[handle], num_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self.mappings[address] = mapping
        return address

    def unmap(self, address: int, num_bytes: int) -> None:
        self._log("unmap", address, num_bytes)
        self.mappings.pop(address).close()

    def zero(self, ordinal: int, address: int, num_bytes: int) -> None:
        self._log("zero", ordinal, address, num_bytes)
        self.mappings[address][:num_bytes] = bytes(num_bytes)

    def synchronize(self, ordinal: int) -> None:
        self._log("synchronize", ordinal)


@dataclass
class FakeRegistry:
    """The compiled module's registry.

    Attributes:
        buffers: (base, peer_bases, rank, num_bytes) by (key, device ordinal).
        pinned: devices on which a CUDA graph holds the address.
        taken: devices on which a registration fails.
    """

    buffers: dict[tuple[str, int], tuple[int, list[int], int, int]] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)
    taken: set[int] = field(default_factory=set)

    def register_symmetric_buffer(self, key: str, device_ordinal: int, *buffer: Any) -> None:
        if device_ordinal in self.taken or (key, device_ordinal) in self.buffers:
            raise ValueError("taken")
        self.buffers[key, device_ordinal] = buffer

    def unregister_symmetric_buffer(self, key: str, device_ordinal: int) -> None:
        if device_ordinal in self.pinned:
            raise RuntimeError("pinned")
        del self.buffers[key, device_ordinal]


def open_descriptors() -> int:
    """How many file descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208
