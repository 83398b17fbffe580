"""The driver calls behind a symmetric buffer: CUDA's virtual memory, through cuda-bindings.

Devices are meant by CUDA's ordinal, memory by integers: a handle names an allocation, an address a
mapping of it.
"""

import contextlib
import enum
import importlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from jax_megamoe._checks import message
from jax_megamoe.compile.errors import CUDA_EXTRA

OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
REFUSALS = (
    "CUDA_ERROR_NOT_PERMITTED",
    "CUDA_ERROR_NOT_SUPPORTED",
    "CUDA_ERROR_INVALID_DEVICE",
    "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
)
"""Codes of what a machine cannot do, as against what went wrong this time."""


class HandleType(enum.Enum):
    """What other processes can import an allocation from; the value is the driver's number."""

    NONE = 0
    POSIX_FD = 1
    """A file descriptor: processes of one host."""
    FABRIC = 8
    """64 bytes, good for every process of an NVLink domain: needs an IMEX channel."""


class CudaError(RuntimeError):
    """A driver call failed; `code` is the error's name."""

    def __init__(self, call: str, code: str) -> None:
        super().__init__(f"{call}: {code}")
        self.code = code


class Driver(Protocol):
    """What allocating a symmetric buffer asks of CUDA. Every call may raise CudaError."""

    def supports_fabric(self, ordinal: int) -> bool:
        """Whether the device's memory can be exported as FABRIC."""
        ...

    def pci_bus_id(self, ordinal: int) -> str:
        """Where the device sits in this host."""
        ...

    def ordinal_at(self, pci_bus_id: str) -> int | None:
        """The device at a place, None if this process cannot see it."""
        ...

    def can_reach(self, ordinal: int, peer: int) -> bool:
        """Whether loads, stores and atomics of one device work on another's memory."""
        ...

    def memory_info(self, ordinal: int) -> tuple[int, int]:
        """Free and total bytes of the device."""
        ...

    def granularity(self, ordinal: int, kind: HandleType) -> int:
        """Allocations are multiples of this, bytes."""
        ...

    def create(self, ordinal: int, num_bytes: int, kind: HandleType) -> int:
        """Allocates memory on the device; returns its handle."""
        ...

    def release(self, handle: int) -> None:
        """Drops a handle. The memory lives on as long as a mapping or an exported handle."""
        ...

    def export(self, handle: int, kind: HandleType) -> int | bytes:
        """A file descriptor, which the caller closes, or 64 bytes."""
        ...

    def import_handle(self, shared: int | bytes, kind: HandleType) -> int:
        """A handle from what `export` gave in another process."""
        ...

    def map(self, handle: int, num_bytes: int, ordinals: Sequence[int]) -> int:
        """Maps memory for the devices to read and write; returns its address."""
        ...

    def unmap(self, address: int, num_bytes: int) -> None:
        """The inverse of `map`."""
        ...

    def zero(self, ordinal: int, address: int, num_bytes: int) -> None:
        """Clears memory of the device, when its turn comes."""
        ...

    def synchronize(self, ordinal: int) -> None:
        """Waits for everything that the device was given to do."""
        ...


class CudaDriver:
    """`Driver` on the CUDA driver of this machine."""

    def __init__(self, bindings: Any = None) -> None:
        """Starts the driver.

        Args:
            bindings: the module `cuda.bindings.driver`; None to import it.

        Raises:
            ImportError: cuda-bindings is not installed, or finds no driver.
            CudaError: the driver does not start.
        """
        try:
            self._cuda = bindings or importlib.import_module("cuda.bindings.driver")
            self._call("cuInit", 0)
        except CudaError:
            raise
        except (ImportError, RuntimeError) as error:
            # cuda-bindings' loader raises a RuntimeError where libcuda is not found.
            expected = "cuda-bindings and an NVIDIA driver, which allocate symmetric buffers"
            raise ImportError(message("cuda", expected, error, CUDA_EXTRA)) from error
        self._contexts: dict[int, Any] = {}

    def _call(self, function: str, *arguments: Any) -> Any:
        """The result of a driver function, a tuple if it has several."""
        code, *results = getattr(self._cuda, function)(*arguments)
        if code != 0:
            raise CudaError(function, code.name)
        return results[0] if len(results) == 1 else tuple(results)

    @contextlib.contextmanager
    def _current(self, ordinal: int) -> Iterator[None]:
        # JAX holds the primary contexts for the life of the process, and so does this.
        if ordinal not in self._contexts:
            device = self._call("cuDeviceGet", ordinal)
            self._contexts[ordinal] = self._call("cuDevicePrimaryCtxRetain", device)
        self._call("cuCtxPushCurrent", self._contexts[ordinal])
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def _kind(self, kind: HandleType) -> Any:
        return self._cuda.CUmemAllocationHandleType(kind.value)

    def _location(self, structure: Any, ordinal: int) -> Any:
        """A structure with its field `location` set to a device."""
        place = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        structure.location.type = place
        structure.location.id = ordinal
        return structure

    def _properties(self, ordinal: int, kind: HandleType) -> Any:
        properties = self._location(self._cuda.CUmemAllocationProp(), ordinal)
        properties.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = self._kind(kind)
        return properties

    def supports_fabric(self, ordinal: int) -> bool:
        names = self._cuda.CUdevice_attribute
        attribute = names.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
        device = self._call("cuDeviceGet", ordinal)
        return bool(self._call("cuDeviceGetAttribute", attribute, device))

    def pci_bus_id(self, ordinal: int) -> str:
        text = self._call("cuDeviceGetPCIBusId", 32, self._call("cuDeviceGet", ordinal))
        return text.split(b"\0")[0].decode()

    def ordinal_at(self, pci_bus_id: str) -> int | None:
        try:
            return int(self._call("cuDeviceGetByPCIBusId", pci_bus_id.encode()))
        except CudaError:
            return None

    def can_reach(self, ordinal: int, peer: int) -> bool:
        device, other = self._call("cuDeviceGet", ordinal), self._call("cuDeviceGet", peer)
        if not self._call("cuDeviceCanAccessPeer", device, other):
            return False
        names = self._cuda.CUdevice_P2PAttribute
        # The kernels count arrivals with atomics, which PCIe does not carry.
        attribute = names.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        return bool(self._call("cuDeviceGetP2PAttribute", attribute, device, other))

    def memory_info(self, ordinal: int) -> tuple[int, int]:
        with self._current(ordinal):
            return self._call("cuMemGetInfo")

    def granularity(self, ordinal: int, kind: HandleType) -> int:
        names = self._cuda.CUmemAllocationGranularity_flags
        flag = names.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return self._call("cuMemGetAllocationGranularity", self._properties(ordinal, kind), flag)

    def create(self, ordinal: int, num_bytes: int, kind: HandleType) -> int:
        return int(self._call("cuMemCreate", num_bytes, self._properties(ordinal, kind), 0))

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def export(self, handle: int, kind: HandleType) -> int | bytes:
        shared = self._call("cuMemExportToShareableHandle", handle, self._kind(kind), 0)
        return bytes(shared.data) if kind is HandleType.FABRIC else int(shared)

    def import_handle(self, shared: int | bytes, kind: HandleType) -> int:
        source: Any = shared
        if kind is HandleType.FABRIC:
            blob = self._cuda.CUmemFabricHandle()
            blob.data = shared
            source = int(blob.getPtr())  # `blob` owns the bytes and lives until the call returned
        return int(self._call("cuMemImportFromShareableHandle", source, self._kind(kind)))

    def map(self, handle: int, num_bytes: int, ordinals: Sequence[int]) -> int:
        flag = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        access = [self._location(self._cuda.CUmemAccessDesc(), each) for each in ordinals]
        for each in access:
            each.flags = flag
        with contextlib.ExitStack() as undo:
            address = int(self._call("cuMemAddressReserve", num_bytes, 0, 0, 0))
            undo.callback(self._call, "cuMemAddressFree", address, num_bytes)
            self._call("cuMemMap", address, num_bytes, 0, handle, 0)
            undo.callback(self._call, "cuMemUnmap", address, num_bytes)
            self._call("cuMemSetAccess", address, num_bytes, access, len(access))
            undo.pop_all()
        return address

    def unmap(self, address: int, num_bytes: int) -> None:
        self._call("cuMemUnmap", address, num_bytes)
        self._call("cuMemAddressFree", address, num_bytes)

    def zero(self, ordinal: int, address: int, num_bytes: int) -> None:
        with self._current(ordinal):
            self._call("cuMemsetD8", address, 0, num_bytes)

    def synchronize(self, ordinal: int) -> None:
        with self._current(ordinal):
            self._call("cuCtxSynchronize")
