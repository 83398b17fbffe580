"""What the processes of a JAX program tell each other: JSON through JAX's key-value store, and file
descriptors within a host."""

import collections
import contextlib
import ctypes
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jax_megamoe import _checks

TIMEOUT_VARIABLE = "JAX_MEGAMOE_MEET_TIMEOUT"
DEFAULT_TIMEOUT = 1800.0
"""Seconds that processes wait for each other: one may compile, or load weights, for long."""

_PIDFD_GETFD = 438  # the same on every architecture
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)

_meetings: collections.Counter[str] = collections.Counter()
_counting = threading.Lock()  # guards _meetings


class Team:
    """The processes that take part in one thing, step by step, until it is done or one failed.

    Every member creates it, in the same order among those of one topic: topics are told apart by
    their name, and uses of one topic by counting them.
    """

    def __init__(
        self, topic: str, members: Mapping[int, str], timeout: float | None, *, name: str = ""
    ) -> None:
        """
        Args:
            topic: the same in every process.
            members: what to call each process in messages, by process index; this one included.
            timeout: seconds to wait for the others in each step; None for the environment variable
                JAX_MEGAMOE_MEET_TIMEOUT, else half an hour.
            name: what messages are about, the topic by default.

        Raises:
            RuntimeError: there are other members, but jax.distributed was not initialised.
        """
        self._me = jax.process_index()
        self._members = members
        self._timeout = _timeout(timeout)
        self._client: Any = _client() if len(members) > 1 else None
        self._name = name or topic
        with _counting:
            self._path = f"jax_megamoe/{topic}/{_meetings[topic]}"
            _meetings[topic] += 1

    def share(self, step: str, work: Callable[[], Any], *, keeps: bool = False) -> dict[int, Any]:
        """Does this process's part of a step, and waits for the others.

        Args:
            step: a name, once a team.
            work: returns something that JSON can carry (lists, not tuples).
            keeps: the others' work needs what this process has; so if `work` raises here, that is
                raised on only when the others are done too, or late.

        Returns:
            What `work` returned in each process, by process index.

        Raises:
            Exception: what `work` raised here; the other processes learn of it.
            RuntimeError: it raised elsewhere.
            TimeoutError: a process did not come in time.
        """
        if self._client is None:
            return {self._me: work()}
        try:
            answer = {"value": work()}
        except Exception as error:
            self._put(step, {"error": f"{type(error).__name__}: {error}"})
            if keeps:
                with contextlib.suppress(TimeoutError, jax.errors.JaxRuntimeError):
                    self._collect(step)
            raise
        self._put(step, answer)
        answers = self._collect(step)
        failed = [
            f"{self._members[process]} raised {answer['error']}"
            for process, answer in answers.items()
            if "error" in answer
        ]
        if failed:
            expected = f"every process to {step}"
            raise RuntimeError(_checks.message(self._name, expected, "; ".join(failed)))
        return {process: answer["value"] for process, answer in answers.items()}

    def agree(self, facts: Callable[[], Mapping[str, object]]) -> None:
        """Compares what must be equal in every process, as texts, before anything depends on it.

        Args:
            facts: returns values by name, those first whose difference explains the others'. Not
                called where this process is alone.

        Raises:
            ValueError: a value differs, in every process alike: names the first such value and what
                each process has.
        """
        if self._client is None:
            return
        said = self.share("compare", lambda: {name: str(v) for name, v in facts().items()})
        names = dict.fromkeys(name for each in said.values() for name in each)
        for name in names:
            values = {process: each.get(name, "none") for process, each in said.items()}
            if len(set(values.values())) > 1:
                got = ", ".join(
                    f"{value} in {self._members[process]}" for process, value in values.items()
                )
                hint = "all processes make the same calls, in the same order, with equal configs"
                raise ValueError(
                    _checks.message(name, "the same value in every process", got, hint)
                )

    def _put(self, step: str, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self._client.key_value_set_bytes(f"{self._path}/{step}/{self._me}", data)

    def _collect(self, step: str) -> dict[int, dict[str, Any]]:
        answers, missing = {}, []
        deadline = time.monotonic() + self._timeout
        for process, name in self._members.items():
            # The late ones get a second each, so that the message names only those.
            left = max(deadline - time.monotonic(), 1.0)
            try:
                key = f"{self._path}/{step}/{process}"
                data = self._client.blocking_key_value_get_bytes(key, round(1000 * left))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                missing.append(name)
            else:
                answers[process] = json.loads(data)
        if missing:
            expected = f"{len(self._members)} processes to {step} within {self._timeout:g} s"
            hint = f"look at their logs, or set {TIMEOUT_VARIABLE} to more seconds"
            got = f"no sign of {', '.join(missing)}"
            raise TimeoutError(_checks.message(self._name, expected, got, hint))
        return answers


def _timeout(seconds: float | None) -> float:
    value = os.environ.get(TIMEOUT_VARIABLE) if seconds is None else seconds
    try:
        given = DEFAULT_TIMEOUT if value in (None, "") else float(value)
    except ValueError:
        given = 0.0
    if not given > 0:
        name = "timeout" if seconds is not None else TIMEOUT_VARIABLE
        raise ValueError(_checks.message(name, "a number of seconds > 0", repr(value)))
    return given


def _client() -> Any:
    """JAX's client of the key-value store."""
    from jax._src import distributed  # noqa: PLC0415 (no public name; rarely needed)

    client = distributed.global_state.client
    if client is None:
        expected = "an initialised client, for devices of several processes"
        hint = "call jax.distributed.initialize() before anything else of JAX"
        raise RuntimeError(_checks.message("jax.distributed", expected, None, hint))
    return client


def place() -> str:
    """Names where this process runs: equal for two that can hand each other file descriptors."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


@contextlib.contextmanager
def lend_descriptors() -> Iterator[None]:
    """Lets other processes of this user take file descriptors of this one for a while."""
    libc = ctypes.CDLL(None)
    # Only kernels with Yama know the call, and only they need it.
    libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_PTRACER, 0, 0, 0, 0)


def take_descriptor(process_id: int, descriptor: int) -> int:
    """A copy of another process's file descriptor, which the caller closes.

    Raises:
        RuntimeError: the kernel refuses it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        process = os.pidfd_open(process_id)
        try:
            taken = libc.syscall(_PIDFD_GETFD, process, descriptor, 0)
        finally:
            os.close(process)
        if taken < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    except OSError as error:
        raise RuntimeError(
            _checks.message(
                f"process {process_id}",
                "its file descriptor by pidfd_getfd",
                error,
                "run all processes of a host as one user and in one container, started with "
                "--cap-add=SYS_PTRACE, on Linux 5.6 or newer",
            )
        ) from error
    return taken
