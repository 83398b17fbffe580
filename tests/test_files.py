"""_files.py: files appear whole or not at all, whoever writes too, whatever ends the writer."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jax_megamoe import _files

WRITER = """
import os, sys
from pathlib import Path
from jax_megamoe._files import replaced
with replaced(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    sys.stdin.read()
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_replaced_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with _files.replaced(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
        [part] = set(names(tmp_path)) - {"f"}
        assert part.startswith(".f.") and part.endswith(".part")
    assert path.read_bytes() == b"new" and names(tmp_path) == ["f"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~current_umask()
    _files.write(path, "text \u00e9", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text(encoding="utf-8") == "text \u00e9"


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_error_leaves_what_was_there(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with pytest.raises(type(error)), _files.replaced(path) as file:
        file.write(b"half")
        raise error
    assert path.read_bytes() == b"old" and names(tmp_path) == ["f"]


def test_long_and_strange_names(tmp_path: Path) -> None:
    for name in ("n" * 255, "\u00e9" * 127, "a[b]*?.safetensors"):
        path = tmp_path / name
        _files.write(path, b"1")
        _files.write(path, b"2")
        assert path.read_bytes() == b"2"
    assert len(names(tmp_path)) == 3


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=r": expected a file to write, got a folder"):
        _files.write(tmp_path, b"1")
    assert names(tmp_path) == []


def test_devices_and_pipes_are_refused(tmp_path: Path) -> None:
    """A pipe stands for /dev/null, which a test had better not try."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    link = tmp_path / "link"
    link.symlink_to(pipe)
    for path in (pipe, link):
        with pytest.raises(OSError, match=r"expected a regular file to write, got mode prw"):
            _files.write(path, "text")
    assert pipe.is_fifo() and link.is_symlink() and len(list(tmp_path.iterdir())) == 2


def test_links_in_a_circle(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert not _files.is_same_file(loop, tmp_path / "other")
    assert _files.is_same_file(loop, loop)


def test_writers_at_the_same_time(tmp_path: Path) -> None:
    """Threads of one process, one file: each writes its own, and the last one's stays."""
    path = tmp_path / "f"
    together = threading.Barrier(8)
    failed: list[BaseException] = []

    def write(content: bytes) -> None:
        try:
            for _ in range(10):
                together.wait(20)
                with _files.replaced(path) as file:
                    for _ in range(4):
                        file.write(content)
                        file.flush()
        except BaseException as error:
            failed.append(error)
            together.abort()

    contents = [bytes([i]) * 1000 for i in range(8)]
    threads = [threading.Thread(target=write, args=(each,)) for each in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert path.read_bytes() in [4 * each for each in contents]
    assert names(tmp_path) == ["f"]


def test_remains_of_a_killed_writer_go_with_the_next(tmp_path: Path) -> None:
    path = tmp_path / "f"
    command = [sys.executable, "-c", WRITER, str(path)]
    environment = os.environ | {"PYTHONPATH": str(Path(_files.__file__).parents[1])}
    streams = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    processes = [subprocess.Popen(command, env=environment, **streams) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == b"writing\n"
    killed, alive = processes
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert len(names(tmp_path)) == 2
    _files.write(path, b"mine")
    # What the other still writes stays.
    assert len(names(tmp_path)) == 2 and path.read_bytes() == b"mine"
    alive.communicate()
    assert alive.returncode == 0
    assert path.read_bytes() == b"half" and names(tmp_path) == ["f"]


def test_same_files(tmp_path: Path) -> None:
    path, other = tmp_path / "f", tmp_path / "g"
    path.write_bytes(b"1")
    assert not _files.is_same_file(path, other)
    assert _files.is_same_file(other, tmp_path / "x" / ".." / "g")
    other.symlink_to(path)
    assert _files.is_same_file(path, other)
    other.unlink()
    other.hardlink_to(path)
    assert _files.is_same_file(path, other)
