"""Folders and files that are not what they should be: an error that names the file."""

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import checkpoint_files as files
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import PREFIX
from safetensors import SafetensorError, safe_open

from jax_megamoe.weights.checkpoint.header import read_header
from jax_megamoe.weights.checkpoint.load import load_experts
from jax_megamoe.weights.checkpoint.tensors import HeldTensor

E, H, INTER = 4, 256, 128
UP = f"{PREFIX}.2.up_proj"


@pytest.fixture
def folder(tmp_path: Path, rng: np.random.Generator) -> Path:
    return files.write_folder(tmp_path / "m", files.per_expert(files.floats(rng, E, H, INTER)))


def load(checkpoint: Any, **kwargs: Any) -> Any:
    config = files.make_config("bf16", E, H, INTER)
    return load_experts(config, checkpoint, **(dict(prefix=PREFIX, progress=False) | kwargs))


def test_paths(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="checkpoint: expected a folder or a file, got"):
        load(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"expected a folder with \*\.safetensors files"):
        load(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"prefix: expected the beginning of names in .*'layers"):
        load(folder, prefix="layers.3.experts")


def test_missing_shard(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError,
        match=rf"{PREFIX}\.\S+ in \S+: expected the file model-00002-of-00002\.safetensors, which",
    ):
        load(folder)


def test_index_that_is_wrong(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = f"{UP}.weight"
    wrong = "model-00001-of-00002.safetensors"
    if content["weight_map"][name] == wrong:
        wrong = "model-00002-of-00002.safetensors"
    content["weight_map"][name] = wrong
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"{name} in {wrong}: expected that tensor, got"):
        load(folder)
    del content["weight_map"][name]
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"{name} in \S+: expected the index to name that file"):
        load(folder)
    index.write_text("[]")
    with pytest.raises(ValueError, match="expected a JSON object with weight_map"):
        load(folder)
    (folder / "other.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="expected one safetensors index, got"):
        load(folder)


def test_tensor_in_two_files(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    extra = {f"{UP}.weight": np.zeros((INTER, H), np.float32)}
    files.write_file(folder / "more.safetensors", extra)
    with pytest.raises(
        ValueError, match=rf"{UP}\.weight: expected one tensor of that name, got one in model-"
    ):
        load(folder)


def test_broken_files(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "model.safetensors"
    good = files.write_file(path, files.per_expert(files.floats(rng, E, H, INTER))).read_bytes()
    path.write_bytes(good[:-7])
    with pytest.raises(ValueError, match=r"in model\.safetensors: expected a file of at least"):
        load(path)
    path.write_bytes(good + b"more")
    with pytest.raises(ValueError, match=r"expected \d+ bytes, to the end of its last tensor, got"):
        load(path)
    path.write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"model\.safetensors: expected a safetensors file"):
        load(path)
    path.write_bytes(good[:8] + b"x" + good[9:])
    with pytest.raises(ValueError, match=r"model\.safetensors: expected a JSON header"):
        load(path)


def entry(dtype: object, shape: object, *offsets: object) -> dict[str, object]:
    return dict(dtype=dtype, shape=shape, data_offsets=[*offsets])


ONE = entry("F32", [1], 0, 4)

HEADERS = {
    "twice": ('{"a": %s, "a": %s}' % ((json.dumps(ONE),) * 2), "a JSON header, got 'a' twice in"),
    "list": ([], "a header of tensors, got list"),
    "no tensor": ({"a": 3}, "a in m: expected dtype, shape and data_offsets, got int"),
    "metadata": ({"__metadata__": {"v": 1}}, "__metadata__ of m: expected strings by name"),
    "dtype": ({"a": entry(4, [1], 0, 4)}, "dtype of a in m: expected a string, got int"),
    "no dtype": ({"a": {}}, "dtype of a in m: expected a string, got None"),
    "negative size": ({"a": entry("F32", [-1], 0, 4)}, r"shape of a in m: expected a list of int"),
    "float size": ({"a": entry("F32", [1.0], 0, 4)}, r"shape of a in m: .* got \[1\.0\]"),
    "true size": ({"a": entry("F32", [True], 0, 4)}, r"shape of a in m: .* got \[True\]"),
    "string size": ({"a": entry("F32", ["x" * 9, 2**62], 0, 4)}, "shape of a in m: expected a l"),
    "overflow": ({"a": entry("F32", [2**62, 2, 0], 0, 0)}, "shape of a in m: expected fewer than"),
    "bytes": ({"a": entry("F32", [2], 0, 4)}, r"a in m: expected 8 bytes for F32 \[2\], got 4"),
    "half a byte": (
        {"a": entry("F4", [3], 0, 2)},
        r"a in m: expected 1\.5 bytes for F4",
    ),
    "negative offset": (
        {"a": entry("F32", [1], -4, 0)},
        "data_offsets of a in m: expected two",
    ),
    "backwards": ({"a": entry("F32", [1], 4, 0)}, "data_offsets of a in m: expected two integers"),
    "three offsets": ({"a": entry("F32", [1], 0, 2, 4)}, "data_offsets of a in m: expected two i"),
    "hole": (
        {"a": entry("F32", [1], 4, 8)},
        "begin of a in m: expected 0, where the ten",
    ),
    "overlap": (
        {"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 4, 8)},
        "begin of b in m: expected 8, where the tensor before it ends, got 4",
    ),
    "beyond": ({"a": entry("Q4", [2**40], 0, 2**40)}, "a in m: expected a file of at least 109951"),
    "deep": ("[" * 100_000, "a JSON header, got lists or objects nested too deep"),
    "digits": ('{"a": %s}' % ("9" * 5000), "a JSON header, got Exceeds the limit"),
    "constant": ('{"a": NaN}', "a JSON header, got the constant NaN"),
    "surrogate": ('{"\\ud800": {}}', r"a name in m: expected Unicode, got '\\ud800'"),
    "latin": (b'{"caf\xe9": {}}', "m: expected a JSON header, got no UTF-8 at byte 5"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_the_format_does_not_have(tmp_path: Path, case: str) -> None:
    header, text = HEADERS[case]
    path = write_header(tmp_path / "m", header, bytes(8))
    with pytest.raises(ValueError, match=text) as caught:
        read_header(path)
    assert len(str(caught.value)) < 3000
    if case not in ("twice", "beyond"):  # allowed by JSON; no such dtype
        with pytest.raises(SafetensorError):
            safe_open(path, "np")


def test_huge_counts_cost_nothing(tmp_path: Path) -> None:
    """A shape of strings used to be multiplied by its count: gigabytes from a small file."""
    path = write_header(tmp_path / "m", {"a": entry("F32", ["x" * 1000, 10**9], 0, 4)})
    tracemalloc.start()
    with pytest.raises(ValueError, match="shape of a in m: expected a list of integers"):
        read_header(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1e6


def write_header(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, str | bytes) else json.dumps(header)
    text = text.encode() if isinstance(text, str) else text
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_dtypes_matter_when_a_tensor_is_asked_for(tmp_path: Path, rng: np.random.Generator) -> None:
    """Names of the format that are not loaded, and one that it does not have."""
    experts = files.floats(rng, E, H, INTER)
    wanted = files.per_expert(experts)
    path = files.write_file(tmp_path / "m", wanted)
    others = dict(C64=8, F6_E2M3=3, F6_E3M2=3, F8_E4M3FNUZ=4, F8_E5M2FNUZ=4, F1024=5)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    for dtype, size in others.items():
        shape = [size // 8] if dtype == "C64" else [4]
        header[f"other.{dtype}"] = entry(dtype, shape, len(data), len(data) + size)
        data += bytes(size)
    write_header(path, header, data)
    files.assert_same(load(path), load(wanted))
    tensors, _ = read_header(path)
    for dtype in others:
        text = rf"other\.{dtype} in m: expected one of the dtypes .*'F4'\], got {dtype}"
        with pytest.raises(TypeError, match=text):
            _ = tensors[f"other.{dtype}"].dtype


def test_pairs_of_values(tmp_path: Path) -> None:
    """F4 counts values in its shape, and is read as bytes, the even value in the low nibble."""
    path = write_header(tmp_path / "m", {"a": entry("F4", [2, 4], 0, 4)}, b"\x21\x43\x65\x87")
    tensor = read_header(path)[0]["a"]
    assert tensor.shape == (2, 2) and tensor.dtype == np.uint8
    np.testing.assert_array_equal(tensor.read(), [[0x21, 0x43], [0x65, 0x87]])
    np.testing.assert_array_equal(tensor.read(1), [0x65, 0x87])
    values = np.array([[0.5, 1, 1.5, 2], [3, 4, 6, -0.0]], ml_dtypes.float4_e2m1fn)
    for array in (values, jnp.asarray(values)):
        held = HeldTensor("a", array)
        assert held.shape == (2, 2) and held.dtype == np.uint8
        np.testing.assert_array_equal(held.read(), tensor.read())
        np.testing.assert_array_equal(held.read(0), tensor.read(0))
    path = write_header(tmp_path / "n", {"a": entry("F4", [2, 3], 0, 3)}, bytes(3))
    text = r"a in n: expected E2M1 values in pairs along the last axis, got shape \[2, 3\]"
    with pytest.raises(ValueError, match=text):
        _ = read_header(path)[0]["a"].shape


@pytest.mark.parametrize(
    "shard",
    ["../m/other", "/etc/passwd", "a/../../m", "", ".", "..", "x\0y", "x" * 300, 7, None, ["a"]],
)
def test_index_that_leads_out_of_its_folder(folder: Path, shard: object) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][f"{UP}.weight"] = shard
    index.write_text(json.dumps(content))
    text = rf"{UP}\.weight in {index.name}: expected a file in the index's folder, got"
    with pytest.raises(ValueError, match=text):
        load(folder)


def test_index_of_folders_and_links(folder: Path, tmp_path: Path) -> None:
    """A shard in a folder below; and links out of the folder, as Hugging Face's cache has them."""
    want = load(folder)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    (folder / "below").mkdir()
    for name in set(content["weight_map"].values()):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
        (folder / name).unlink()
        (folder / "below" / name).symlink_to(tmp_path / name)
    content["weight_map"] = {name: f"below/{at}" for name, at in content["weight_map"].items()}
    index.write_text(json.dumps(content))
    files.assert_same(load(folder), want)


def test_index_that_is_no_index(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    text = index.read_text()
    for content, message in [
        (text[: len(text) // 2], r"model\.safetensors\.index\.json: expected JSON, got"),
        (text.replace('"weight_map"', '"weight_map": {}, "weight_map"'), "'weight_map' twice in"),
        ('{"weight_map": []}', r"a JSON object with weight_map: .*got keys \['weight_map'\]"),
        ('{"weight_map": {"\\ud800": "a"}}', r"a name in \S+: expected Unicode"),
        ('{"weight_map": {"a": "\\ud800"}}', r"a name in \S+: expected Unicode"),
        ("null", "a JSON object with weight_map: .*got None"),
        ("3", "a JSON object with weight_map: .*got int"),
    ]:
        index.write_text(content)
        with pytest.raises(ValueError, match=message):
            load(folder)
    with index.open("wb") as file:
        file.truncate(10**10)
    with pytest.raises(ValueError, match=r"expected JSON of at most 100000000 bytes, got 10000000"):
        load(folder)


LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4976698672\n"


def test_pointers_of_git_lfs(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    shard = folder / "model-00001-of-00002.safetensors"
    for path, what in ((shard, "a safetensors file"), (index, "JSON")):
        path.write_text(LFS)
        got = rf"got a Git LFS pointer of {len(LFS)} bytes; run `git lfs pull`"
        with pytest.raises(ValueError, match=rf"{path.name}: expected {what}, {got}"):
            load(folder)


def test_no_regular_file(tmp_path: Path) -> None:
    """A pipe would be waited for, a device read for ever."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ValueError, match=rf"{path.name}: expected a regular file, got mode"):
            load(path)


def test_replaced_after_its_header_was_read(tmp_path: Path) -> None:
    path = files.write_file(tmp_path / "m", dict(a=np.arange(8, dtype=np.int32)))
    tensor = read_header(path)[0]["a"]
    other = files.write_file(tmp_path / "other", dict(a=np.zeros(8, np.int32)))
    other.replace(path)
    np.testing.assert_array_equal(tensor.read(), np.arange(8))
    path.unlink()
    np.testing.assert_array_equal(tensor.read(3), 3)


@pytest.mark.parametrize("damage", ["cut", "write"])
def test_written_after_its_header_was_read(tmp_path: Path, damage: str) -> None:
    path = files.write_file(tmp_path / "m", dict(a=np.arange(8, dtype=np.int32)))
    tensor = read_header(path)[0]["a"]
    size = path.stat().st_size
    with path.open("r+b") as file:
        if damage == "cut":
            file.truncate(size - 4)
        else:
            file.seek(size - 4)
            file.write(b"1234")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))  # however coarse the clock is
    text = f"m: expected the file of {size} bytes that was opened, got one of .* written since"
    with pytest.raises(ValueError, match=text):
        tensor.read()
