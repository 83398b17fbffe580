"""Runs checks in processes of their own, so that a hang costs a timeout and no more."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

SECONDS_AFTER_FAILURE = 5.0
"""How long the other processes of a job may go on after one failed."""
SECONDS_TO_DIE = 30.0


@dataclass
class Tally:
    """What the checks of all jobs came to.

    Attributes:
        passed: how many passed.
        failed: a line for each that did not, and for each process that did not end well.
    """

    passed: int = 0
    failed: list[str] = field(default_factory=list)


@contextlib.contextmanager
def check(name: str) -> Iterator[list[str]]:
    """Prints ``ok name``, or ``FAILED name`` and why. Yields a list of remarks for that line."""
    remarks: list[str] = []
    start = time.perf_counter()
    try:
        yield remarks
    except Exception as error:
        print(f"FAILED {name}: {type(error).__name__}: {error}"[:2000], flush=True)
    else:
        said = ", ".join([f"{time.perf_counter() - start:.1f} s", *remarks])
        print(f"ok {name} ({said})", flush=True)


def run(
    name: str,
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    tally: Tally,
    timeout: float,
) -> None:
    """Runs processes side by side and passes on what they print; `check`'s lines are counted.

    Args:
        name: of the job, for messages.
        commands: the command line of each process.
        environments: what to add to the environment of each.
        tally: gets the outcome.
        timeout: seconds, after which all are killed.
    """
    start = time.monotonic()
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **extra, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for command, extra in zip(commands, environments, strict=True)
    ]
    print(f"-- {name}", flush=True)
    readers = [
        threading.Thread(target=_pass_on, args=(name, index, process, tally))
        for index, process in enumerate(processes)
    ]
    for reader in readers:
        reader.start()
    deadline = start + timeout
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            deadline = min(deadline, time.monotonic() + SECONDS_AFTER_FAILURE)
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    for index, process in enumerate(processes):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            said = f"{name}, process {index}: killed after {time.monotonic() - start:.0f} s"
            tally.failed.append(said)
            print(f"FAILED {said}", flush=True)
        elif process.returncode:
            tally.failed.append(f"{name}, process {index}: status {process.returncode}")
    for process, reader in zip(processes, readers, strict=True):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_DIE)
        reader.join(SECONDS_AFTER_FAILURE)
    print(f"-- {name}: {time.monotonic() - start:.1f} s", flush=True)


def _pass_on(name: str, index: int, process: subprocess.Popen[str], tally: Tally) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        sys.stdout.write(f"[{index}] {line}")
        sys.stdout.flush()
        if line.startswith("ok "):
            tally.passed += 1
        elif line.startswith("FAILED "):
            tally.failed.append(f"{name}, process {index}: {line.rstrip()}")


def finish(tally: Tally) -> None:
    """Prints the outcome and exits, with status 1 if anything failed or nothing passed."""
    for line in tally.failed:
        print(line, flush=True)
    failed = f", {len(tally.failed)} failed" if tally.failed else ""
    print(f"{tally.passed} checks passed{failed}", flush=True)
    raise SystemExit(bool(tally.failed) or not tally.passed)


def visible_gpus() -> list[str]:
    """What to name each GPU in CUDA_VISIBLE_DEVICES, without opening any."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [each for each in named.split(",") if each]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    lines = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    return [str(index) for index in range(len(lines))]
