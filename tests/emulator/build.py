"""Builds the interpreter, a shared library, once for each version of its sources."""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from filelock import FileLock

from jax_megamoe.compile.cache import cache_folder

INTERPRETER = Path(__file__).parent / "interpreter"
ROOT = Path(__file__).parents[2]
FLAGS = [
    "-std=c++20", "-O2", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC",
]  # fmt: skip


class NoCompiler(Exception):
    """There is no C++ compiler; the text says what to install."""


def folder() -> Path:
    """Where the library and PTX are kept: ``emulator`` beside the cubins' cache."""
    path = cache_folder() / "emulator"
    path.mkdir(parents=True, exist_ok=True)
    return path


def find_compiler() -> str | None:
    """$CXX, else g++ or clang++ if they are on PATH."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def sources() -> list[Path]:
    """The interpreter's translation units."""
    return sorted([*INTERPRETER.glob("*.cc"), *INTERPRETER.glob("instructions/*.cc")])


def library_path() -> Path:
    """The library, built if these sources were not built before; or $EMULATOR_LIBRARY.

    Raises:
        NoCompiler: neither $CXX nor g++ nor clang++ is there.
    """
    if named := os.environ.get("EMULATOR_LIBRARY"):
        return Path(named)
    texts = [*sources(), *sorted(INTERPRETER.glob("*.h")), INTERPRETER / "opcodes.def"]
    texts += [ROOT / "tests" / "ffi" / "driver_contexts.h", ROOT / "ffi" / "cuda_driver.h"]
    compiler = find_compiler()
    content = b"".join(path.read_bytes() for path in texts)
    key = hashlib.sha256(content + repr((compiler, FLAGS)).encode()).hexdigest()[:16]
    path = folder() / f"libcuda-{key}.so"
    if path.exists():
        return path
    if compiler is None:
        raise NoCompiler("the PTX emulator needs a C++ compiler (g++)")
    with FileLock(path.with_suffix(".lock")):  # one process builds, the others wait
        if not path.exists():
            _build(compiler, path)
    return path


def _build(compiler: str, path: Path) -> None:
    """Compiles each source, two at a time, and links them."""
    work = path.with_suffix(f".{os.getpid()}.build")
    work.mkdir()
    try:
        commands = [
            (compiler, *FLAGS, f"-I{ROOT}", "-c", str(source), "-o", str(work / f"{i}.o"))
            for i, source in enumerate(sources())
        ]
        running: list[subprocess.Popen[bytes]] = []
        for command in commands:
            running.append(subprocess.Popen(command))
            if len(running) == 2:
                _finish(running.pop(0))
        for process in running:
            _finish(process)
        objects = [str(work / f"{i}.o") for i in range(len(commands))]
        linked = work / "library.so"
        subprocess.run([compiler, "-shared", *objects, "-o", str(linked)], check=True)
        linked.rename(path)
    finally:
        shutil.rmtree(work)


def _finish(process: subprocess.Popen[bytes]) -> None:
    if process.wait():
        raise RuntimeError("the emulator does not compile; its compiler's messages are above")


@functools.cache
def library() -> ctypes.CDLL:
    """The library, loaded once a process."""
    lib = ctypes.CDLL(str(library_path()))
    lib.emulator_new.restype = ctypes.c_void_p
    lib.emulator_get.restype = ctypes.c_double
    lib.emulator_error.restype = lib.emulator_log.restype = ctypes.c_char_p
    lib.emulator_first_invalid.restype = ctypes.c_int64
    return lib
