"""Damaged safetensors files, indexes and converted files: read as their formats say, or one kind of
error.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_files as files
import numpy as np
import pytest
from checkpoint_files import PREFIX
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

import jax_megamoe as mm
from jax_megamoe.weights.checkpoint.header import DTYPES, read_header
from jax_megamoe.weights.checkpoint.tensors import Checkpoint

FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
CONFIG = files.make_config("bf16", 2, 128, 128)
PLACE = Path("m.safetensors")
KNOWN = {*DTYPES, "F4", "F6_E2M3", "F6_E3M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "C64"}

WORDS = st.sampled_from(
    ["F32", "BF16", "F4", "F6_E2M3", "C64", "Q4", "dtype", "shape", "data_offsets", "weight_map"]
)
INTEGERS = st.sampled_from([-1, 0, 1, 2, 4, 127, 128, 2**31, 2**53, 2**62, 2**63, 2**64, 10**30])
SCALARS = st.one_of(
    st.none(), st.booleans(), INTEGERS, st.floats(), st.text(max_size=4), WORDS, st.just("../m")
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@st.composite
def edits(draw: Callable[..., Any], size: int) -> list[tuple[int, int, bytes]]:
    """Places of a text of `size` bytes, how many bytes are cut there, and what is put in."""
    pieces = st.binary(max_size=3) | st.sampled_from(
        [b'"', b"{", b"}", b"[", b"]", b",", b":", b"0", b"9", b"-1", b"1e9", b"null", b"\\ud800"]
    )
    one = st.tuples(st.integers(0, size), st.integers(0, 4), pieces)
    return draw(st.lists(one, min_size=1, max_size=3))


def edited(text: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    for at, cut, put in changes:
        text = text[:at] + put + text[at + cut :]
    return text


def mutated(data: st.DataObject, value: Any) -> Any:
    """A JSON value with some of its values, at any depth, replaced, removed or renamed."""
    if data.draw(st.integers(0, 9)) == 0:
        return data.draw(VALUES)
    if isinstance(value, dict):
        kept = {k: mutated(data, v) for k, v in value.items() if data.draw(st.integers(0, 19))}
        return kept | data.draw(st.dictionaries(WORDS, VALUES, max_size=1))
    if isinstance(value, list):
        return [mutated(data, each) for each in value if data.draw(st.integers(0, 19))]
    return value


def split(path: Path) -> tuple[bytes, bytes]:
    """The header and the data of a safetensors file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return content[8 : 8 + length], content[8 + length :]


def write(path: Path, header: bytes, data: bytes) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two experts in two files, and a folder beside it that no index may reach."""
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("fuzz")
    tensors = files.per_expert(files.floats(rng, 2, 128, 128))
    files.write_file(folder / "m", tensors)
    return files.write_folder(folder / "model", tensors)


@pytest.fixture(scope="module")
def converted(model: Path) -> Path:
    path = model.parent / "converted"
    weights = mm.load_experts(CONFIG, model, prefix=PREFIX, progress=False)
    mm.save_experts(path, CONFIG, weights)
    return path


def package_reads(path: Path) -> bool:
    try:
        with safe_open(path, "np"):
            return True
    except SafetensorError:
        return False


def check_header(path: Path) -> None:
    """As the safetensors package, but for names there twice, and dtypes that nobody knows."""
    try:
        tensors, _ = read_header(path)
    except ValueError as error:
        assert path.name in str(error) and len(str(error)) < 7000
        assert not package_reads(path) or "twice" in str(error)
    else:
        unknown = {tensor.stored_dtype for tensor in tensors.values()} - KNOWN
        # -0 is an integer to Python and a float to the package.
        if not unknown and b"-0" not in split(path)[0]:
            assert package_reads(path)
        for tensor in tensors.values():
            assert tensor.offset + tensor.num_bytes <= path.stat().st_size


@FUZZ
@given(data=st.data())
def test_edited_headers(model: Path, tmp_path: Path, data: st.DataObject) -> None:
    header, content = split(model / "model-00001-of-00002.safetensors")
    changes = data.draw(edits(len(header)))
    check_header(write(tmp_path / PLACE, edited(header, changes), content))


@FUZZ
@given(data=st.data())
def test_mutated_headers(model: Path, tmp_path: Path, data: st.DataObject) -> None:
    header, content = split(model / "model-00001-of-00002.safetensors")
    text = json.dumps(mutated(data, json.loads(header))).encode()
    check_header(write(tmp_path / PLACE, text, content[: data.draw(st.integers(0, 1)) - 1 or None]))


@FUZZ
@given(content=st.binary(max_size=40))
def test_any_bytes(tmp_path: Path, content: bytes) -> None:
    (tmp_path / PLACE).write_bytes(content)
    check_header(tmp_path / PLACE)


@FUZZ
@given(data=st.data())
def test_mutated_checkpoints(model: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Loaded, converted, or an error; a tensor comes from no file outside the folder."""
    folder = shutil.copytree(model, tmp_path / "copy", dirs_exist_ok=True)
    index = folder / "model.safetensors.index.json"
    shard = folder / "model-00002-of-00002.safetensors"
    text, (header, content) = index.read_bytes(), split(shard)
    match data.draw(st.sampled_from(["index", "text", "header"])):
        case "index":
            index.write_text(json.dumps(mutated(data, json.loads(text))))
        case "text":
            index.write_bytes(edited(text, data.draw(edits(len(text)))))
        case _:
            write(shard, json.dumps(mutated(data, json.loads(header))).encode(), content)
    try:
        for path in Checkpoint(folder).files.values():
            assert path.resolve().is_relative_to(folder.resolve())
        mm.load_experts(CONFIG, folder, prefix=PREFIX, progress=False)
    except (ValueError, TypeError, NotImplementedError, FileNotFoundError) as error:
        assert "expected" in str(error) and len(str(error)) < 7000


@FUZZ
@given(data=st.data())
def test_mutated_converted_files(
    model: Path, converted: Path, tmp_path: Path, data: st.DataObject
) -> None:
    header, content = split(converted)
    if data.draw(st.booleans()):
        header = edited(header, data.draw(edits(len(header))))
    else:
        header = json.dumps(mutated(data, json.loads(header))).encode()
    path = write(tmp_path / PLACE, header, content)
    try:
        mm.load_converted(path, CONFIG)
    except (ValueError, TypeError) as error:
        assert "expected" in str(error) and len(str(error)) < 7000
