"""cache.py: an entry is whole or absent, made once, and read where nothing can be written."""

import errno
import itertools
import json
import logging
import os
import threading
import time

import pytest

from jax_megamoe.compile import cache as cache_module
from jax_megamoe.compile.cache import KernelCache, Key, cache_folder, digest
from jax_megamoe.compile.errors import BuildError

KEY = Key("a" * 32, "nvrtc", "b" * 32)
CUBIN = bytes(range(256)) * 4


class Builder:
    """Answers CUBIN and counts how often it was asked."""

    def __init__(self, seconds=0.0):
        self.calls = 0
        self.seconds = seconds

    def __call__(self):
        self.calls += 1
        time.sleep(self.seconds)
        return CUBIN, {"registers": 168}


@pytest.fixture
def cache(tmp_path):
    return KernelCache(tmp_path / "cache")


def entry(cache):
    return cache.folder / f"{KEY.stem}.kernel"


def test_entry_is_made_once_and_loaded_after(cache):
    build = Builder()
    assert not cache.folder.exists()
    assert [cache.get(KEY, build) for _ in range(3)] == [CUBIN] * 3
    assert build.calls == 1
    assert KernelCache(cache.folder).load(KEY) == CUBIN
    described = json.loads((cache.folder / f"{KEY.stem}.json").read_text())
    assert described == {"registers": 168}
    assert {path.suffix for path in cache.folder.iterdir()} == {".kernel", ".json", ".lock"}


DAMAGE = {
    "empty": lambda content: b"",
    "header cut": lambda content: content[:20],
    "no cubin": lambda content: content[:48],
    "last byte gone": lambda content: content[:-1],
    "a byte more": lambda content: content + b"\0",
    "a bit flipped": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "checksum changed": lambda content: content[:16] + bytes(32) + content[48:],
    "other magic": lambda content: b"\x7fELF" + content[4:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_entry_is_rebuilt_and_never_used(cache, damage):
    build = Builder()
    cache.get(KEY, build)
    whole = entry(cache).read_bytes()
    entry(cache).write_bytes(DAMAGE[damage](whole))
    assert cache.load(KEY) is None
    assert cache.load_any(KEY.kernel, "nvrtc") is None
    assert cache.get(KEY, build) == CUBIN
    assert build.calls == 2
    assert entry(cache).read_bytes() == whole


def test_threads_share_one_build(cache):
    build = Builder(seconds=0.1)
    got = []
    threads = [
        threading.Thread(target=lambda: got.append(KernelCache(cache.folder).get(KEY, build)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [CUBIN] * 8
    assert build.calls == 1


def test_failed_build_stores_nothing_and_frees_the_lock(cache):
    def fail():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cache.get(KEY, fail)
    assert cache.load(KEY) is None
    assert cache.get(KEY, Builder()) == CUBIN


def test_failed_write_leaves_no_temporary_file(cache, monkeypatch, caplog):
    def full(self, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache_module.Path, "replace", full)
    with caplog.at_level(logging.WARNING, "jax_megamoe"):
        assert cache.get(KEY, Builder()) == CUBIN
    assert "No space left on device" in caplog.text
    assert [path.suffix for path in cache.folder.iterdir()] == [".lock"]


def read_only(monkeypatch):
    """Every open for writing fails as on a read-only file system, root or not."""
    really_open = os.open

    def refuse(path, flags, *arguments, **keywords):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return really_open(path, flags, *arguments, **keywords)

    monkeypatch.setattr(os, "open", refuse)


def test_read_only_folder_serves_hits_and_says_once_that_misses_are_compiled(
    cache, monkeypatch, caplog
):
    cache.get(KEY, Builder())
    before = {path: path.read_bytes() for path in cache.folder.iterdir()}
    read_only(monkeypatch)
    build = Builder()
    with caplog.at_level(logging.WARNING, "jax_megamoe"):
        assert cache.get(KEY, build) == CUBIN
        assert (build.calls, caplog.messages) == (0, [])
        for other in ("c", "d"):
            assert cache.get(Key(other * 32, "nvrtc", "b" * 32), build) == CUBIN
    assert build.calls == 2
    (message,) = caplog.messages
    assert message.startswith(f"kernel cache {cache.folder} cannot be written (")
    assert "Read-only file system" in message
    assert "set JAX_MEGAMOE_CACHE to a folder that can be" in message
    assert {path: path.read_bytes() for path in cache.folder.iterdir()} == before


def test_folder_that_is_a_file_is_named(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    cache = KernelCache(tmp_path / "file" / "cache")
    with caplog.at_level(logging.WARNING, "jax_megamoe"):
        assert cache.get(KEY, Builder()) == CUBIN
    assert f"kernel cache {cache.folder} cannot be written" in caplog.text


def test_any_toolchain_will_do_the_named_compiler_first(cache):
    def store(compiler, toolchain, cubin):
        cache.get(Key(KEY.kernel, compiler, toolchain), lambda: (cubin, {}))

    assert cache.load_any(KEY.kernel, "nvrtc") is None
    store("nvcc", "0" * 32, b"by nvcc")
    assert cache.load_any(KEY.kernel, "nvrtc") == b"by nvcc"
    store("nvrtc", "1" * 32, b"by nvrtc")
    assert cache.load_any(KEY.kernel, "nvrtc") == b"by nvrtc"
    assert cache.load_any(KEY.kernel, "nvcc") == b"by nvcc"
    assert cache.load_any("e" * 32, "nvcc") is None


def test_digest_keeps_ingredients_apart():
    lists = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("c", "ab"), ('a","b', "c")]
    for one, other in itertools.combinations(lists, 2):
        assert digest(*one) != digest(*other)
    assert digest("ab", "c") == digest("ab", "c")


def test_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("JAX_MEGAMOE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache/jax_megamoe"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert str(cache_folder()) == "/xdg/jax_megamoe"
    monkeypatch.setenv("JAX_MEGAMOE_CACHE", "/ours")
    assert str(cache_folder()) == "/ours"


def test_no_home_names_the_variable(monkeypatch):
    def no_home(cls):
        raise RuntimeError("Could not determine home directory.")

    for variable in ("JAX_MEGAMOE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(cache_module.Path, "home", classmethod(no_home))
    with pytest.raises(BuildError, match="JAX_MEGAMOE_CACHE: expected a folder, got none, and no"):
        cache_folder()
