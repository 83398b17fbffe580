"""Memory that all ranks of a group reach: allocated by each, exported, imported, mapped."""

import contextlib
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jax_megamoe import _checks
from jax_megamoe.runtime.devices import device_spec
from jax_megamoe.symmetric_memory.cuda import OUT_OF_MEMORY, REFUSALS, CudaError, Driver, HandleType
from jax_megamoe.symmetric_memory.processes import lend_descriptors, place, take_descriptor

Groups = Sequence[Sequence[jax.Device]]

_FABRIC_HINT = (
    "ranks on several hosts need an NVLink domain (such as an NVL72) with an IMEX channel for this "
    "user: /dev/nvidia-caps-imex-channels/channel0"
)


class _Seat(NamedTuple):
    """A rank of a group."""

    group: int
    rank: int


class _Member(NamedTuple):
    """Who sits there, as its process describes it."""

    process: int
    place: str
    process_id: int
    arch: int
    num_sms: int
    supports_fabric: bool
    pci_bus_id: str


class Registration(NamedTuple):
    """A rank of this process in the terms of `register_symmetric_buffer`, after the key."""

    device_ordinal: int
    base: int
    peer_bases: list[int]
    rank: int
    num_bytes: int


class PeerMemory:
    """The memory behind one key, as this process makes and maps it: one call of each method.

    In order: `describe`, `agree`, `create`, `map`, `registrations`. What `describe` and `create`
    return goes to every process with devices in the groups, whose answers the next one takes.
    """

    def __init__(
        self,
        open_driver: Callable[[], Driver],
        key: str,
        num_bytes: int,
        groups: Groups,
        memory: contextlib.ExitStack,
        temporary: contextlib.ExitStack,
    ) -> None:
        """
        Args:
            open_driver: returns the driver, the same at every call.
            key: names the buffers in messages.
            num_bytes: of each rank's memory.
            groups: the devices of each group in rank order.
            memory: gets what frees the mappings.
            temporary: gets what closes handles and file descriptors, which nobody needs once all
                processes have mapped everything.
        """
        self._driver = open_driver
        self._key = key
        self._num_bytes = num_bytes
        self._groups = groups
        self._memory = memory
        self._temporary = temporary
        self._ordinals = {
            _Seat(index, rank): device.local_hardware_id
            for index, group in enumerate(groups)
            for rank, device in enumerate(group)
            if device.process_index == jax.process_index()
        }
        self._members: dict[_Seat, _Member] = {}
        self._kinds: list[HandleType] = []
        self._handles: dict[_Seat, int] = {}
        self._addresses: dict[_Seat, int] = {}

    def describe(self) -> dict[str, Any]:
        """This process and its devices.

        Raises:
            NotImplementedError: a device is not CUDA's.
            ImportError: cuda-bindings or the driver is missing.
        """
        seats = []
        for seat, ordinal in self._ordinals.items():
            spec = device_spec(self._groups[seat.group][seat.rank])
            fabric = self._driver().supports_fabric(ordinal)
            where = self._driver().pci_bus_id(ordinal)
            seats.append([list(seat), [spec.arch, spec.num_sms, fabric, where]])
        host = [place(), os.getpid()]
        return {"host": host, "seats": seats}

    def agree(self, described: dict[int, dict[str, Any]]) -> None:
        """Checks that the groups can work; raises the same in every process.

        Raises:
            ValueError: a group mixes kinds of devices.
            NotImplementedError: a group spans hosts without FABRIC between them.
        """
        for process, each in described.items():
            for seat, facts in each["seats"]:
                self._members[_Seat(*seat)] = _Member(process, *each["host"], *facts)
        self._kinds = [self._handle_type(index) for index in range(len(self._groups))]

    def create(self) -> list[Any]:
        """Allocates for the ranks of this process.

        Returns:
            [group, rank], bytes and what to import (None, file descriptor, hex digits) of each.

        Raises:
            NotImplementedError: a device cannot reach a peer's memory.
            RuntimeError: too little memory.
        """
        self._check_reach()
        for ordinal in self._ordinals.values():
            self._driver().synchronize(ordinal)
        if HandleType.POSIX_FD in self._kinds:
            self._temporary.enter_context(lend_descriptors())
        created = []
        for seat, ordinal in self._ordinals.items():
            kind = self._kinds[seat.group]
            unit = self._driver().granularity(ordinal, kind)
            size = -(-self._num_bytes // unit) * unit
            handle = self._allocate(ordinal, size, kind)
            self._temporary.callback(self._driver().release, handle)
            self._handles[seat] = handle
            created.append([list(seat), size, self._export(handle, kind)])
        return created

    def map(self, created: dict[int, list[Any]]) -> None:
        """Maps every rank of this process's groups, and zeroes the own memory.

        Raises:
            NotImplementedError: the devices may not map a peer's memory.
            RuntimeError: another error of the driver, or no file descriptor from a process.
        """
        for where, size, shared in itertools.chain.from_iterable(created.values()):
            seat = _Seat(*where)
            ordinals = [each for own, each in self._ordinals.items() if own.group == seat.group]
            if ordinals:
                self._map(seat, size, shared, ordinals)
        for ordinal in self._ordinals.values():
            self._memory.callback(self._driver().synchronize, ordinal)
        for seat, ordinal in self._ordinals.items():
            self._driver().zero(ordinal, self._addresses[seat], self._num_bytes)
            self._driver().synchronize(ordinal)

    def registrations(self) -> list[Registration]:
        """What C++ needs to know of each rank of this process."""
        return [
            Registration(
                ordinal,
                self._addresses[seat],
                [
                    self._addresses[other]
                    for other in sorted(self._members)
                    if other.group == seat.group
                ],
                seat.rank,
                self._num_bytes,
            )
            for seat, ordinal in self._ordinals.items()
        ]

    def _name(self) -> str:
        return f"symmetric buffer {self._key!r}"

    def _handle_type(self, group: int) -> HandleType:
        members = {f"rank {s.rank}": m for s, m in self._members.items() if s.group == group}
        kinds = {rank: f"{m.num_sms} SMs of sm_{m.arch}" for rank, m in members.items()}
        if len(set(kinds.values())) > 1:
            hint = "the buffer's layout depends on it: use equal devices"
            expected = "devices of one kind"
            raise ValueError(_checks.message(f"groups[{group}]", expected, kinds, hint))
        if len({member.process for member in members.values()}) == 1:
            return HandleType.NONE
        if len({member.place for member in members.values()}) == 1:
            return HandleType.POSIX_FD
        without = [rank for rank, member in members.items() if not member.supports_fabric]
        if without:
            expected = "processes of one host and container, or FABRIC handles"
            got = f"no FABRIC support on {', '.join(without)}"
            raise NotImplementedError(
                _checks.message(f"groups[{group}]", expected, got, _FABRIC_HINT)
            )
        return HandleType.FABRIC

    def _check_reach(self) -> None:
        """Refuses pairs of devices that this process can see and that cannot work together."""
        for seat, ordinal in self._ordinals.items():
            for other, member in self._members.items():
                same_host = member.place == self._members[seat].place
                if other.group != seat.group or not same_host:
                    continue
                peer = self._driver().ordinal_at(member.pci_bus_id)
                if peer in (None, ordinal) or self._driver().can_reach(ordinal, peer):
                    continue
                expected = "devices that reach each other's memory, atomics included (NVLink)"
                got = f"none between CUDA devices {ordinal} and {peer}"
                raise NotImplementedError(_checks.message(f"groups[{seat.group}]", expected, got))

    def _allocate(self, ordinal: int, size: int, kind: HandleType) -> int:
        try:
            return self._driver().create(ordinal, size, kind)
        except CudaError as error:
            if error.code == OUT_OF_MEMORY:
                raise self._shortage(ordinal, size) from error
            if kind is HandleType.FABRIC and error.code in REFUSALS:
                expected = "memory to export as FABRIC"
                name = f"{self._name()} on device {ordinal}"
                raise NotImplementedError(
                    _checks.message(name, expected, error, _FABRIC_HINT)
                ) from error
            raise

    def _shortage(self, ordinal: int, size: int) -> RuntimeError:
        free, total = self._driver().memory_info(ordinal)
        hint = "lower max_num_tokens"
        if size < total:
            fraction = int(100 * (total - size) / total) / 100
            hint += (
                ", or leave room beside JAX's pool: XLA_CLIENT_MEM_FRACTION (0.75 by default) "
                f"below {fraction:.2f}, set before JAX starts"
            )
        name = f"{self._name()} on device {ordinal}"
        expected = f"{size} free bytes"
        return RuntimeError(_checks.message(name, expected, f"{free} of {total}", hint))

    def _export(self, handle: int, kind: HandleType) -> int | str | None:
        if kind is HandleType.NONE:
            return None
        shared = self._driver().export(handle, kind)
        if isinstance(shared, bytes):
            return shared.hex()
        self._temporary.callback(os.close, shared)
        return shared

    def _map(self, seat: _Seat, size: int, shared: Any, ordinals: list[int]) -> None:
        handle = self._handles.get(seat)
        try:
            if handle is None:
                handle = self._import(seat, shared)
                self._temporary.callback(self._driver().release, handle)
            address = self._driver().map(handle, size, ordinals)
        except CudaError as error:
            expected = f"memory that devices {ordinals} can map"
            hint = _FABRIC_HINT if self._kinds[seat.group] is HandleType.FABRIC else ""
            name = f"{self._name()}, rank {seat.rank} of groups[{seat.group}]"
            error_type = NotImplementedError if error.code in REFUSALS else RuntimeError
            raise error_type(_checks.message(name, expected, error, hint)) from error
        self._memory.callback(self._driver().unmap, address, size)
        self._addresses[seat] = address

    def _import(self, seat: _Seat, shared: int | str) -> int:
        kind = self._kinds[seat.group]
        if isinstance(shared, str):
            return self._driver().import_handle(bytes.fromhex(shared), kind)
        descriptor = take_descriptor(self._members[seat].process_id, shared)
        try:
            return self._driver().import_handle(descriptor, kind)
        finally:
            os.close(descriptor)
