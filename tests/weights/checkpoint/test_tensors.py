"""Folders and files that are not what they should be: an error that names the file."""

import json
from pathlib import Path
from typing import Any

import checkpoint_files as files
import numpy as np
import pytest
from checkpoint_files import PREFIX

from jax_megamoe.weights.checkpoint.load import load_experts

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
    path.write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"model\.safetensors: expected a safetensors file"):
        load(path)
    path.write_bytes(good[:8] + b"x" + good[9:])
    with pytest.raises(ValueError, match=r"model\.safetensors: expected a JSON header"):
        load(path)
    one = entry("F32", [1], 0, 4)
    write_header(path, f'{{"a": {one}, "a": {one}}}')
    with pytest.raises(ValueError, match=r"expected each tensor once, got 'a' twice"):
        load(path)
    write_header(path, f'{{"a": {entry("Q4", [1], 0, 4)}}}')
    with pytest.raises(TypeError, match=r"a in model\.safetensors: expected one of the dtypes"):
        load(path)
    write_header(path, f'{{"a": {entry("F32", [2], 0, 4)}}}')
    with pytest.raises(ValueError, match=r"a in \S+: expected 8 bytes for float32 \[2\], got 4"):
        load(path)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> str:
    return json.dumps(dict(dtype=dtype, shape=shape, data_offsets=[begin, end]))


def write_header(path: Path, header: str) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(64))
