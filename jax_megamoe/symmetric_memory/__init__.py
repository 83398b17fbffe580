"""Symmetric buffers: one piece of memory a rank, which every rank of its group reads and writes.

The kernels of a group talk through their buffers, so all exist, zeroed and mapped on every rank,
before the first launch; C++ then finds them by key. They live outside JAX's memory pool, until
`close`.

Between the devices of one process an allocation is mapped once, for all of them. Other processes
of the host import it as a file descriptor, those of other hosts as a FABRIC handle.
"""

import contextlib
import functools
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jax_megamoe import _checks
from jax_megamoe.mesh import Axis, axis_names
from jax_megamoe.runtime import extension
from jax_megamoe.symmetric_memory.cuda import CudaDriver, Driver
from jax_megamoe.symmetric_memory.peer import Groups, PeerMemory, Registration
from jax_megamoe.symmetric_memory.processes import Team


def groups_of(mesh: Mesh, axis: Axis) -> list[list[jax.Device]]:
    """The devices of each expert-parallel group of a mesh, in rank order.

    Args:
        mesh: a mesh with devices.
        axis: the expert-parallel axis, or several: the last of them varies fastest.

    Returns:
        One group for each index of the other axes.
    """
    names = axis_names(axis)
    places = [mesh.axis_names.index(name) for name in names]
    last = np.moveaxis(mesh.devices, places, range(-len(places), 0))
    size = int(np.prod([mesh.shape[name] for name in names]))
    return last.reshape(-1, size).tolist()


def meet(name: str, groups: Groups, *, timeout: float | None = None) -> None:
    """Waits until every process with a device in `groups` is here: before the first launch of a
    kernel, so that no rank waits inside it for one that still compiles.

    Args:
        name: the same in every process; uses of one name are counted.
        groups: the devices of each expert-parallel group in rank order.
        timeout: seconds; None for the environment variable JAX_MEGAMOE_MEET_TIMEOUT, else half an
            hour.

    Raises:
        RuntimeError: there are several processes and jax.distributed was not initialised.
        TimeoutError: processes that did not come, by name.
    """
    if _takes_part(groups):
        Team(name, _members(groups), timeout).share("come", lambda: None)


class _Buffer(NamedTuple):
    """The buffers of one key in this process. Closing `memory` waits for the devices and frees."""

    num_bytes: int
    groups: list[list[int]]
    registrations: list[Registration]
    memory: contextlib.ExitStack


class SymmetricMemory:
    """The symmetric buffers of a process, by key.

    Threads may call any methods at once. `keys`, and `allocate` for a key that is allocated, never
    wait. Another `allocate`, which may wait for other processes, and `close` take turns. Launches
    may run beside all of them: `close` waits for a launch that found its buffer and frees after it;
    a later launch raises. A call over several ranks is a launch on each, so end such calls (with
    `jax.block_until_ready`) before `close`: a rank that is refused leaves the others waiting in the
    kernel.
    """

    def __init__(
        self,
        open_driver: Callable[[], Driver] = CudaDriver,
        open_registry: Callable[[], Any] = extension.module,
    ) -> None:
        """Opens nothing before the first allocation.

        Args:
            open_driver: returns what stands for CUDA.
            open_registry: returns what has the functions `register_symmetric_buffer` and
                `unregister_symmetric_buffer` of the compiled module.
        """
        self._open_driver = functools.cache(open_driver)
        self._open_registry = open_registry
        # Never changed, only replaced (with `_lock` held), so that readers need no lock: one may
        # be held for as long as another process takes.
        self._buffers: Mapping[str, _Buffer] = {}
        self._lock = threading.RLock()

    def allocate(
        self,
        key: str,
        num_bytes: int,
        groups: Groups,
        *,
        facts: Callable[[], Mapping[str, object]] = dict,
        prepare: Callable[[], object] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Gives every rank of every group a zeroed buffer that its whole group can reach.

        Every process with a device in `groups` calls it, with the same arguments and in the same
        order among calls for these groups, while no MegaMoE kernel runs. The processes compare
        their arguments first. It returns when all ranks are ready, and at once where the key is
        allocated. If it raises, this process holds nothing of it.

        Args:
            key: names the buffers; the same on every rank.
            num_bytes: of each buffer.
            groups: the devices of each expert-parallel group in rank order (see `groups_of`).
            facts: returns what else must be equal in every process, by name; compared as text.
                Called if there are several processes.
            prepare: called once the processes agree, before anything is allocated; if it raises in
                one process, the others raise too.
            timeout: as for `meet`.

        Raises:
            ValueError: an argument or a fact differs between processes, with each one's value; the
                key was allocated with other bytes or groups; a device in two places; devices of
                different kinds in a group.
            NotImplementedError: a device is not CUDA's, or cannot reach a peer's memory.
            ImportError: cuda-bindings, the driver or the compiled module is missing.
            RuntimeError: too little memory, with the bytes needed and free; no jax.distributed;
                another process failed.
            TimeoutError: processes that did not come, by name.
        """
        _checks.integer("num_bytes", num_bytes, minimum=1)
        ids = [[device.id for device in group] for group in groups]
        flat = [each for group in ids for each in group]
        if len(set(flat)) < len(flat):
            raise ValueError(_checks.message("groups", "each device once", f"devices {ids}"))
        if not _takes_part(groups):
            return
        if key not in self._buffers:
            with self._lock:
                if key not in self._buffers:
                    team = _team_for_buffer(key, ids, groups, timeout)
                    team.agree(lambda: {**facts(), "num_bytes": num_bytes, "key": key})
                    if prepare is not None:
                        team.share("prepare", lambda: bool(prepare()))
                    buffer = self._allocate(team, key, num_bytes, groups)
                    self._buffers = {**self._buffers, key: buffer}
                    return
        held = self._buffers.get(key)
        if held is not None and (num_bytes, ids) != (held.num_bytes, held.groups):
            expected = f"{held.num_bytes} bytes over devices {held.groups}, as allocated"
            got = f"{num_bytes} over {ids}"
            hint = "close it first, or use another key"
            raise ValueError(_checks.message(f"symmetric buffer {key!r}", expected, got, hint))

    def keys(self, start: str = "") -> list[str]:
        """The keys beginning with `start` under which this process has buffers."""
        return [key for key in self._buffers if key.startswith(start)]

    def close(self, key: str | None = None) -> None:
        """Frees this process's buffers under `key`, or all of them; does nothing where none are.

        Waits for this process's launches and devices. Memory that other processes have mapped lives
        until they close it too, so their order does not matter; a launch after this finds no
        buffer.

        Raises:
            RuntimeError: a live executable with CUDA graphs holds an address; nothing was freed of
                that key.
        """
        with self._lock:
            for name in tuple(self._buffers) if key is None else (key,):
                held = self._buffers.get(name)
                if held is not None:
                    self._unregister(name, held.registrations)
                    self._buffers = {k: v for k, v in self._buffers.items() if k != name}
                    held.memory.close()

    def _allocate(self, team: Team, key: str, num_bytes: int, groups: Groups) -> _Buffer:
        with (
            contextlib.ExitStack() as temporary,
            contextlib.ExitStack() as memory,
            contextlib.ExitStack() as names,
        ):
            ours = PeerMemory(self._open_driver, key, num_bytes, groups, memory, temporary)
            ours.agree(team.share("describe its devices", ours.describe))
            created = team.share("allocate", ours.create)
            # Where this fails in one process, its memory goes; another may still be importing it.
            team.share("map the others' memory", lambda: ours.map(created), keeps=True)
            registrations = ours.registrations()
            team.share("register", lambda: self._register(key, registrations, names))
            names.pop_all()
            ids = [[device.id for device in group] for group in groups]
            return _Buffer(num_bytes, ids, registrations, memory.pop_all())

    def _register(
        self, key: str, registrations: Sequence[Registration], names: contextlib.ExitStack
    ) -> None:
        registry = self._open_registry()
        for each in registrations:
            registry.register_symmetric_buffer(key, *each)
            names.callback(registry.unregister_symmetric_buffer, key, each.device_ordinal)

    def _unregister(self, key: str, registrations: Sequence[Registration]) -> None:
        """All of them, or none if one may not go yet."""
        registry = self._open_registry()
        with contextlib.ExitStack() as undo:
            for each in registrations:
                registry.unregister_symmetric_buffer(key, each.device_ordinal)
                undo.callback(registry.register_symmetric_buffer, key, *each)
            undo.pop_all()


def _team_for_buffer(
    key: str, ids: Sequence[Sequence[int]], groups: Groups, timeout: float | None
) -> Team:
    """The processes of a buffer. They meet by their devices, since each may bring another key."""
    places = hashlib.sha256(str(ids).encode()).hexdigest()
    name = f"symmetric buffer {key!r}"
    return Team(f"symmetric buffers of {places}", _members(groups), timeout, name=name)


def _takes_part(groups: Groups) -> bool:
    me = jax.process_index()
    return any(device.process_index == me for group in groups for device in group)


def _members(groups: Groups) -> dict[int, str]:
    """What to call each process with a device in `groups`, by process index."""
    seats: dict[int, list[str]] = {}
    for index, group in enumerate(groups):
        for rank, device in enumerate(group):
            seats.setdefault(device.process_index, []).append(f"groups[{index}][{rank}]")
    return {
        process: f"process {process} ({', '.join(seats[process])})" for process in sorted(seats)
    }


_here = SymmetricMemory()
allocate = _here.allocate
keys = _here.keys
close = _here.close
