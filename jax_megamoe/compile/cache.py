"""Compiled kernels on disk, addressed by what they were made of.

The contract:

- An entry is one file: a magic number, the cubin's length and SHA-256, the cubin. `load` checks all
  three and treats anything else as absent, so a truncated or damaged entry is rebuilt and never
  used.
- Entries appear whole: written to a temporary file of the same folder, then renamed over the name.
- A file lock a key lets one process compile while the others wait and then load.
- What is in the folder runs on the GPU, so nobody else may write it: it is created with mode 0700,
  and refused while a user other than this one or root owns it, or its mode lets others write. An
  entry with such an owner or mode is absent.
- Nothing is created before the first kernel is stored. In a folder that cannot be written hits
  work, and misses are compiled each time, said once in the log.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import shlex
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from jax_megamoe._checks import message
from jax_megamoe._files import write
from jax_megamoe.compile.errors import BuildError

_MAGIC = b"JMMK\x01\0\0\0"
_HEADER = struct.Struct("<8sQ32s")
_PRIVATE = 0o700
_PRIVATE_FILE = 0o600
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_log = logging.getLogger("jax_megamoe")


@dataclass(frozen=True)
class Key:
    """What an entry was made of.

    Attributes:
        kernel: digest of the KernelSpec, the source's version and headers, and the generated text's
            version.
        compiler: the compiler's name.
        toolchain: digest of the compiler's version and flags.
    """

    kernel: str
    compiler: str
    toolchain: str

    @property
    def stem(self) -> str:
        """The entry's file name without its ending."""
        return f"{self.kernel}-{self.compiler}-{self.toolchain}"


def digest(*ingredients: str) -> str:
    """32 hexadecimal digits over the ingredients, which are kept apart, and their order."""
    return hashlib.sha256(json.dumps(ingredients).encode()).hexdigest()[:32]


def cache_folder() -> Path:
    """``$JAX_MEGAMOE_CACHE``, else ``$XDG_CACHE_HOME/jax_megamoe``, else ``~/.cache/jax_megamoe``.

    Raises:
        BuildError: the user has no home folder.
    """
    if folder := os.environ.get("JAX_MEGAMOE_CACHE"):
        return Path(folder)
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "jax_megamoe"
    try:
        return Path.home() / ".cache" / "jax_megamoe"
    except RuntimeError as error:
        raise BuildError(message("JAX_MEGAMOE_CACHE", "a folder", "none, and no home")) from error


def check_folder(folder: Path) -> None:
    """Checks that only this user and root can have put files into a folder, if there is one.

    Access control lists and the folders above are not looked at.

    Raises:
        BuildError: another user owns it, or others may write it; says how to change that.
    """
    try:
        status = folder.stat()
    except OSError:
        return  # nothing can be read there either
    if fault := _fault(status):
        raise BuildError(
            message(
                str(folder),
                f"a folder that only user {os.getuid()} or root may write, as its files are run",
                fault,
                f"if its contents are yours: chmod go-w {shlex.quote(str(folder))} (chown, if it "
                "is not yours), else remove it, or set JAX_MEGAMOE_CACHE to another folder",
            )
        )


def make_folder(folder: Path) -> None:
    """Creates a folder, and those above it that are missing, for this user alone.

    Raises:
        BuildError: it is there and `check_folder` refuses it.
        OSError: it cannot be made.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=_PRIVATE, exist_ok=True)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    check_folder(folder)


def _fault(status: os.stat_result) -> str:
    """Why somebody else may have written a file or folder; empty if nobody may."""
    if status.st_uid not in (os.getuid(), 0):
        return f"one of user {status.st_uid}"
    if status.st_mode & _OTHERS_WRITE:
        return f"mode {stat.S_IMODE(status.st_mode):04o}"
    return ""


class KernelCache:
    """A folder of compiled kernels, shared by threads and processes.

    Its methods raise BuildError where `check_folder` does.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._warned = False

    def load(self, key: Key) -> bytes | None:
        """The cubin of `key`, or None where the folder holds no intact entry."""
        check_folder(self.folder)
        return _read(self._path(key))

    def load_any(self, kernel: str, compiler: str | None) -> bytes | None:
        """The cubin of `kernel` whatever toolchain made it, `compiler` preferred; or None."""
        check_folder(self.folder)
        entries = sorted(self.folder.glob(f"{kernel}-*.kernel"))
        entries.sort(key=lambda path: path.stem.split("-")[1] != compiler)
        return next((cubin for cubin in map(_read, entries) if cubin is not None), None)

    def get(self, key: Key, build: Callable[[], tuple[bytes, dict[str, Any]]]) -> bytes:
        """The cubin of `key`; on a miss `build` makes it and a description, a JSON file beside it.

        Over all threads and processes that share the folder `build` runs once a key, unless it
        raises, or the folder cannot be written.
        """
        cubin = self.load(key)
        if cubin is not None:
            return cubin
        lock = FileLock(self.folder / f"{key.stem}.lock", thread_local=False)
        with contextlib.ExitStack() as held:
            try:
                make_folder(self.folder)
                held.enter_context(lock)
            except (OSError, NotImplementedError) as error:
                # NotImplementedError: a file system without locks.
                self._warn(error)
                return build()[0]
            cubin = self.load(key)
            if cubin is None:
                cubin, description = build()
                self._store(key, cubin, description)
        return cubin

    def _path(self, key: Key) -> Path:
        return self.folder / f"{key.stem}.kernel"

    def _store(self, key: Key, cubin: bytes, description: dict[str, Any]) -> None:
        header = _HEADER.pack(_MAGIC, len(cubin), hashlib.sha256(cubin).digest())
        try:
            text = json.dumps(description, indent=1)
            write(self.folder / f"{key.stem}.json", text, mode=_PRIVATE_FILE)
            write(self._path(key), header + cubin, mode=_PRIVATE_FILE)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "kernel cache %s cannot be written (%s): each process compiles the kernels that it "
                "lacks; set JAX_MEGAMOE_CACHE to a folder that can be",
                self.folder,
                error,
            )


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            if _fault(os.fstat(file.fileno())):
                return None
            content = file.read()
    except OSError:
        return None
    if len(content) < _HEADER.size:
        return None
    magic, length, checksum = _HEADER.unpack_from(content)
    cubin = content[_HEADER.size :]
    intact = magic == _MAGIC and len(cubin) == length
    return cubin if intact and hashlib.sha256(cubin).digest() == checksum else None
