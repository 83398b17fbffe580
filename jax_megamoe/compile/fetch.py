"""Kernel sources in the cache folder: the headers of a pinned wheel, downloaded with pip.

The contract:

- A wheel is used only with the SHA-256 that `pins` has for it, and only its headers, its licences
  and its metadata are kept.
- A tree ``sources/NAME-VERSION`` appears whole: unpacked in a temporary folder beside it, then
  renamed. Its manifest lists the SHA-256 of every file, and a tree that differs from it is refused.
- A file lock lets one process download while the others wait and then find the tree.
- Whatever goes wrong, nothing stays of a download; what a killed process left goes with the next.
"""

import contextlib
import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Generator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from jax_megamoe._checks import message, one_of
from jax_megamoe.compile.cache import cache_folder, check_folder, make_folder
from jax_megamoe.compile.errors import BuildError, MissingDependency
from jax_megamoe.compile.pins import DISTRIBUTIONS, Distribution, Wheel

_MANIFEST = "manifest.json"
_POLL_SECONDS = 0.1
# pip resolves for this Python, whichever runs it: the wheels are for every one.
_PYTHON = "3.12"


class Fetched(NamedTuple):
    """A source in the cache: its version, its folder, and whether it was there before."""

    version: str
    folder: Path
    already: bool


def fetch_source(
    name: str,
    version: str | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Fetched:
    """Downloads the headers of a kernel source, unless the cache has them.

    Args:
        name: a key of `DISTRIBUTIONS`.
        version: the distribution's; None: the one that this package plans for.
        on_progress: called with the bytes downloaded and all bytes of the wheel.

    Raises:
        ValueError: an unknown name or version.
        BuildError: no wheel from pip, another one than the pinned, or no cache folder that can be
            written; says what to do.
    """
    one_of("source", name, DISTRIBUTIONS)
    pinned = DISTRIBUTIONS[name]
    one_of(f"version of {name}", version or pinned.version, [pinned.version])
    tree = _tree(name)
    if not _fault(tree):
        return Fetched(pinned.version, tree, already=True)
    wheel = pinned.wheels.get(platform.machine()) or pinned.wheels["x86_64"]
    try:
        with _locked(tree):
            # Another process may have been faster.
            if already := not _fault(tree):
                return Fetched(pinned.version, tree, already)
            with tempfile.TemporaryDirectory(dir=tree.parent, prefix=f".{tree.name}.") as folder:
                path = _download(name, pinned, wheel, Path(folder), on_progress)
                _check_hash(name, path, wheel)
                _place(_unpack(pinned, path), tree)
    except (OSError, NotImplementedError) as error:
        # NotImplementedError: a file system without locks.
        hint = "set JAX_MEGAMOE_CACHE to a folder that can be written, with room for the wheel"
        expected = f"a folder for {wheel.num_bytes / 1e6:.0f} MB"
        raise MissingDependency(message(str(tree.parent), expected, error, hint)) from error
    return Fetched(pinned.version, tree, already=False)


def fetched_source(name: str) -> Fetched | None:
    """The source as the cache has it; None if it was not fetched.

    A tree is read and compared with its manifest once a process.

    Raises:
        MissingDependency: a tree that lacks files, or has others than were fetched.
        BuildError: others may write it; see `check_folder`.
    """
    try:
        tree = _tree(name)
    except BuildError:  # no home
        return None
    if not tree.exists():
        return None
    for folder in (cache_folder(), tree.parent, tree):
        check_folder(folder)
    _check_tree(name, tree)
    return Fetched(DISTRIBUTIONS[name].version, tree, already=True)


def _tree(name: str) -> Path:
    return cache_folder() / "sources" / f"{name}-{DISTRIBUTIONS[name].version}"


@functools.cache
def _check_tree(name: str, tree: Path) -> None:
    if fault := _fault(tree):
        expected = f"the files of {_MANIFEST} in {tree}"
        hint = f"`python -m jax_megamoe sources fetch {name}` replaces it"
        raise MissingDependency(message(f"kernel source {name}", expected, fault, hint))


def _fault(tree: Path) -> str:
    """What is wrong with a tree; empty if nothing."""
    try:
        manifest: dict[str, dict[str, str]] = json.loads((tree / _MANIFEST).read_text())
        digests = dict(manifest["files"])
        entries = {path.relative_to(tree).as_posix(): path for path in tree.rglob("*")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"no intact {_MANIFEST}"
    # A link could lead to headers that nobody checked, a folder holds what is checked itself.
    found = {name for name, path in entries.items() if path.is_symlink() or not path.is_dir()}
    if missing := digests.keys() - found:
        return f"no {min(missing)}"
    if added := found - digests.keys() - {_MANIFEST}:
        return f"an added {min(added)}"
    for file, expected in digests.items():
        try:
            content = b"" if entries[file].is_symlink() else entries[file].read_bytes()
        except OSError:
            return f"no {file}"
        if hashlib.sha256(content).hexdigest() != expected:
            return f"other contents of {file}"
    return ""


@contextlib.contextmanager
def _locked(tree: Path) -> Generator[None]:
    """Makes the tree's parent, and holds the tree's lock; leaves no lock file."""
    make_folder(tree.parent)
    lock = tree.parent / f".{tree.name}.lock"
    try:
        with FileLock(lock):
            try:
                for path in tree.parent.glob(f".{tree.name}.*/"):
                    shutil.rmtree(path, ignore_errors=True)
                yield
            finally:
                lock.unlink(missing_ok=True)
    finally:
        with contextlib.suppress(OSError):
            tree.parent.rmdir()  # if it is empty


def _download(
    name: str,
    pinned: Distribution,
    wheel: Wheel,
    folder: Path,
    on_progress: Callable[[int, int], None],
) -> Path:
    """The wheel that pip puts into `folder`, where pip's own temporary files are too."""
    requirement = f"{pinned.name}=={pinned.version}"
    command = [sys.executable, "-m", "pip", "download", requirement, "--dest", str(folder)]
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"]
    command += ["--progress-bar=off", "--disable-pip-version-check"]
    command += ["--platform", wheel.platform, "--python-version", _PYTHON]
    log = folder / "pip.log"
    with log.open("wb") as output:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        environment = os.environ | {"TMPDIR": str(folder)}
        with subprocess.Popen(command, env=environment, **streams) as process:
            try:
                done = 0
                while process.poll() is None:
                    done = max(done, _downloaded(folder))
                    on_progress(min(done, wheel.num_bytes), wheel.num_bytes)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(_POLL_SECONDS)
            finally:
                process.kill()
    path = next(folder.glob("*.whl"), None)
    if process.returncode or path is None:
        lines = log.read_text(errors="replace").splitlines()
        said = [line for line in lines if "ERROR" in line] or lines[-1:] or ["nothing"]
        got = f"status {process.returncode}: " + " ".join(said)[-1000:]
        hint = (
            "it needs pip (python -m ensurepip) and the package index or, without network, "
            "PIP_NO_INDEX=1 and PIP_FIND_LINKS=a folder with the wheel; or set "
            f"{pinned.variable} to an unpacked one"
        )
        expected = f"the wheel of {requirement} for {wheel.platform} from pip download"
        raise MissingDependency(message(f"kernel source {name}", expected, got, hint))
    on_progress(wheel.num_bytes, wheel.num_bytes)
    return path


def _downloaded(folder: Path) -> int:
    """Bytes of the largest wheel under a folder in which pip is at work."""
    try:
        return max((path.stat().st_size for path in folder.rglob("*.whl")), default=0)
    except OSError:
        return 0  # moved meanwhile


def _check_hash(name: str, path: Path, wheel: Wheel) -> None:
    with path.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != wheel.sha256:
        expected = f"SHA-256 {wheel.sha256} ({wheel.num_bytes} bytes)"
        found = f"{got} ({path.stat().st_size} bytes)"
        hint = f"it is not used; see which index or mirror pip takes {name} from (pip config list)"
        raise MissingDependency(message(path.name, expected, found, hint))


def _unpack(pinned: Distribution, path: Path) -> Path:
    """A folder beside a wheel with its headers, licences and metadata, and their manifest."""
    kept = (f"{pinned.headers / pinned.kept}/*", "*.dist-info/licenses/*", "*.dist-info/METADATA")
    folder = path.with_name("tree")
    with zipfile.ZipFile(path) as archive:
        names = [n for n in archive.namelist() if any(fnmatch(n, pattern) for pattern in kept)]
        archive.extractall(folder, names)
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    digests = {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }
    (folder / _MANIFEST).write_text(json.dumps({"wheel": path.name, "files": digests}, indent=1))
    return folder


def _place(unpacked: Path, tree: Path) -> None:
    """Renames a folder to the tree; a damaged tree goes into the folder's parent."""
    if tree.exists():
        tree.rename(unpacked.with_name("damaged"))
    unpacked.rename(tree)
