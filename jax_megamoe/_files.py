"""Files: foreign ones are read through one descriptor and within bounds, own ones appear whole.

What a foreign file says wrong is a ValueError that names the file, whatever is wrong with it.
"""

import contextlib
import fcntl
import json
import os
import secrets
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jax_megamoe import _checks

MAX_JSON = 100_000_000
"""Largest JSON text that is read, in bytes: the limit of a safetensors header."""

_LFS = b"version https://git-lfs.github.com/spec/"
_MAX_READ = 1 << 30
"""Bytes of one system call, which may be asked for less than 2^31."""
_ALIGNMENT = 64
"""Of a buffer that a CPU device takes without a copy."""


class OpenFile:
    """A regular file that is opened once, so that all reads are of one file.

    A file that is renamed over it goes unnoticed: the first one is read to its end. One that is
    written in place is noticed by its size or time of change.

    Args:
        path: the file.

    Attributes:
        path: the file.
        size: in bytes.

    Raises:
        ValueError: a folder, a pipe, a device.
        FileNotFoundError, PermissionError, OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # O_NONBLOCK: a pipe without a writer would be waited for.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        weakref.finalize(self, os.close, self._descriptor)
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            got = f"mode {stat.filemode(found.st_mode)}"
            raise ValueError(_checks.message(path.name, "a regular file", got))
        self.size = found.st_size
        self._changed = found.st_mtime_ns

    def read(self, offset: int, size: int) -> np.ndarray:
        """`size` bytes from `offset`, uint8 [size], aligned so that a CPU device takes them.

        Threads may read at the same time.

        Raises:
            ValueError: the file ends before, or was written since it was opened.
        """
        if offset + size > self.size:
            expected = f"a file of at least {offset + size} bytes"
            raise ValueError(_checks.message(self.path.name, expected, self.size))
        data = aligned(size)
        done = 0
        while done < size:
            piece: Any = data[done : done + _MAX_READ]
            got = os.preadv(self._descriptor, [piece], offset + done)
            if not got:
                break
            done += got
        now = os.fstat(self._descriptor)
        if done < size or (now.st_size, now.st_mtime_ns) != (self.size, self._changed):
            expected = f"the file of {self.size} bytes that was opened"
            got = f"one of {now.st_size} bytes, written since"
            hint = "load it once nothing writes to it"
            raise ValueError(_checks.message(self.path.name, expected, got, hint))
        return data

    def check_not_a_pointer(self, expected: str) -> None:
        """Raises ValueError for what Git LFS leaves where it did not fetch the file itself."""
        if self.read(0, min(self.size, len(_LFS))).tobytes() == _LFS:
            got = f"a Git LFS pointer of {self.size} bytes"
            raise ValueError(_checks.message(self.path.name, expected, got, "run `git lfs pull`"))


def read_json(path: Path, *, constants: bool = False) -> Any:
    """The content of a JSON file of at most `MAX_JSON` bytes, each name once in its object.

    Args:
        path: the file.
        constants: see `parse_json`.

    Raises:
        ValueError: anything else; the message names the file.
        FileNotFoundError, PermissionError, OSError: it cannot be opened.
    """
    file = OpenFile(path)
    if file.size > MAX_JSON:
        expected = f"JSON of at most {MAX_JSON} bytes"
        raise ValueError(_checks.message(path.name, expected, file.size))
    file.check_not_a_pointer("JSON")
    text = file.read(0, file.size).tobytes()
    return parse_json(text, path.name, "JSON", constants=constants)


def parse_json(text: bytes, where: str, expected: str, *, constants: bool = False) -> Any:
    """The value of a JSON text; objects as dicts, each name once.

    Args:
        text: UTF-8.
        where: what messages name.
        expected: what messages call the text.
        constants: NaN and infinity are allowed, as in what Python wrote.

    Raises:
        ValueError: not UTF-8, not JSON, NaN or infinity, nested deeper than Python recurses, an
            integer of more digits than Python converts, or a name twice in one object.
    """
    constant = float if constants else _no_such_constant
    try:
        return json.loads(text.decode(), object_pairs_hook=_each_once, parse_constant=constant)
    except RecursionError as error:
        got = "lists or objects nested too deep"
        raise ValueError(_checks.message(where, expected, got)) from error
    except ValueError as error:
        raise ValueError(_checks.message(where, expected, _said(error))) from error


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"{name!r} twice in one object")
            seen.add(name)
    return unique


def _no_such_constant(name: str) -> Any:
    raise ValueError(f"the constant {name}")


def _said(error: ValueError) -> str:
    """The error's text; a UnicodeDecodeError's own would hold the whole input."""
    if isinstance(error, UnicodeDecodeError):
        return f"no UTF-8 at byte {error.start}"
    return str(error)


@contextlib.contextmanager
def replaced(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` when the block ends without an error.

    Until then it has a name of its own beside `path`, ``.NAME.RANDOM.part``, which no other thread
    or process uses, and the writer holds its lock. A killed writer's lock is free: the next writer
    of `path` removes what it left. The bytes are on the disk before the name changes.

    Args:
        path: the file.
        mode: who may read and write it, less what the process's umask forbids.

    Raises:
        OSError: the folder cannot be written, or is full; `path` is as it was, or is a
            folder, a device or a pipe.
    """
    if path.is_dir():
        raise IsADirectoryError(_checks.message(str(path), "a file to write", "a folder"))
    if path.exists() and not path.is_file():  # root would put a file in place of /dev/null
        got = f"mode {stat.filemode(path.stat().st_mode)}"
        raise OSError(_checks.message(str(path), "a regular file to write", got))
    # 255 bytes are the most that a name may have.
    stem = os.fsdecode(os.fsencode(f".{path.name}")[:200])
    for left in path.parent.glob(f"{_escaped(stem)}.*.part"):
        _remove_if_dead(left)
    file, part = _created(path.parent, stem, mode)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write(path: Path, content: str | bytes, *, mode: int = 0o666) -> None:
    """Writes a whole file through `replaced`; text as UTF-8."""
    with replaced(path, mode=mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def _created(folder: Path, stem: str, mode: int) -> tuple[BinaryIO, Path]:
    """A new file under a lock, and its path."""
    while True:
        part = folder / f"{stem}.{secrets.token_hex(8)}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = os.fdopen(os.open(part, flags, mode), "wb")
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:
                return file, part
        except BaseException:
            part.unlink(missing_ok=True)
            file.close()
            raise
        # Another writer took it for a dead one's before it was locked.
        file.close()


def _remove_if_dead(part: Path) -> None:
    with contextlib.suppress(OSError), part.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        part.unlink()


def _escaped(text: str) -> str:
    """A name for `Path.glob` that matches itself alone."""
    return "".join(f"[{each}]" if each in "*?[" else each for each in text)


def is_same_file(a: Path, b: Path) -> bool:
    """Whether writing one would change the other: one file by whatever path, or one path."""
    with contextlib.suppress(OSError):
        if a.samefile(b):
            return True
    try:
        return a.resolve() == b.resolve()
    except (OSError, RuntimeError):  # links in a circle
        return a.absolute() == b.absolute()


def aligned(size: int) -> np.ndarray:
    """Uninitialised bytes, uint8 [size], on a boundary that a CPU device takes without a copy."""
    octets = np.empty(size + _ALIGNMENT, np.uint8)
    start = -octets.ctypes.data % _ALIGNMENT
    return octets[start : start + size]
