"""cache.py: an entry is whole or absent, made once, and read where nothing can be written."""

import errno
import itertools
import json
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor

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
    with ThreadPoolExecutor(8) as pool:
        got = [pool.submit(lambda: KernelCache(cache.folder).get(KEY, build)) for _ in range(8)]
    assert [each.result() for each in got] == [CUBIN] * 8
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


def give_away(path, monkeypatch):
    """Another user owns `path`, or this process is another user."""
    try:
        os.chown(path, 54321, -1)
    except PermissionError:
        monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_only_this_user_may_open_what_is_made(tmp_path, umask):
    before = os.umask(umask)
    try:
        KernelCache(tmp_path / "new" / "cache").get(KEY, Builder())
    finally:
        os.umask(before)
    for folder in (tmp_path / "new", tmp_path / "new" / "cache"):
        assert folder.stat().st_mode & 0o777 == 0o700
    written = [path for path in (tmp_path / "new/cache").iterdir() if path.suffix != ".lock"]
    assert {path.stat().st_mode & 0o777 for path in written} == {0o600}


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o500])
def test_others_may_read_a_folder(cache, mode):
    cache.get(KEY, Builder())
    cache.folder.chmod(mode)
    assert KernelCache(cache.folder).load(KEY) == CUBIN


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_may_write_is_refused(cache, mode):
    cache.get(KEY, Builder())
    cache.folder.chmod(mode)
    expected = (
        rf"^{cache.folder}: expected a folder that only user {os.getuid()} or root may write, as "
        rf"its files are run, got mode {mode:04o}; if its contents are yours: chmod go-w "
    )
    for use in (
        lambda: cache.load(KEY),
        lambda: cache.load_any(KEY.kernel, "nvrtc"),
        lambda: cache.get(KEY, Builder()),
        lambda: cache.get(Key("f" * 32, "nvrtc", "b" * 32), Builder()),
    ):
        with pytest.raises(BuildError, match=expected):
            use()


def test_a_folder_of_another_user_is_refused(cache, monkeypatch):
    cache.get(KEY, Builder())
    give_away(cache.folder, monkeypatch)
    with pytest.raises(BuildError, match=f"got one of user {cache.folder.stat().st_uid}; if its"):
        cache.load(KEY)


def test_a_link_is_as_good_as_where_it_leads(cache, tmp_path):
    cache.get(KEY, Builder())
    (tmp_path / "link").symlink_to(cache.folder)
    assert KernelCache(tmp_path / "link").load(KEY) == CUBIN
    cache.folder.chmod(0o777)
    with pytest.raises(BuildError, match="got mode 0777"):
        KernelCache(tmp_path / "link").load(KEY)


@pytest.mark.parametrize("how", ["owner", "mode"])
def test_an_entry_that_others_may_have_written_is_rebuilt(cache, monkeypatch, how):
    build = Builder()
    cache.get(KEY, build)
    if how == "owner":
        give_away(entry(cache), monkeypatch)
        cache.folder.chmod(0o700)
    else:
        entry(cache).chmod(0o620)
    if how == "mode" or os.getuid() == 0:
        assert cache.load(KEY) is None
        assert cache.get(KEY, build) == CUBIN
        assert build.calls == 2
        assert cache.load(KEY) == CUBIN


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
