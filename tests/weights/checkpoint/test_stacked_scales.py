"""FP8 stacks of all experts: where their scales are, under which names, and what they scale."""

import json
from pathlib import Path
from typing import Any

import checkpoint_files as files
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import PREFIX, assert_same

import jax_megamoe as mm
from jax_megamoe.weights.checkpoint.header import read_header
from jax_megamoe.weights.checkpoint.select import select_format

E, H, INTER = 4, 256, 128
Tensors = dict[str, np.ndarray]


def assert_loaded(
    tensors: Tensors, gate_up: np.ndarray, down: np.ndarray, form: str = "mxfp8", **options: Any
) -> None:
    """The values are exactly these, [E, 2I, H] with gate rows first and [E, H, I], in whatever
    order the tensors come."""
    hidden, inter = down.shape[1:]
    sizes = (-(-size // 128) * 128 for size in (hidden, inter))
    config = files.make_config(form, E, *sizes)
    if options or (hidden, inter) != (config.hidden_size, config.intermediate_size):
        options["stored_sizes"] = (hidden, inter)
    for names in (list(tensors), list(tensors)[::-1]):
        pairs = [(name, tensors[name]) for name in names]
        weights = mm.load_experts(config, pairs, prefix=PREFIX, progress=False, **options)
        got = [np.asarray(part) for part in mm.dequantize_experts(config, weights)]
        np.testing.assert_array_equal(got[0][:, :inter, :hidden], gate_up[:, :inter])
        np.testing.assert_array_equal(got[1][:, :inter, :hidden], gate_up[:, inter:])
        np.testing.assert_array_equal(got[2][:, :hidden, :inter], down)


def matrix(
    rng: np.random.Generator, rows: int, columns: int, block: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """E4M3 [E, N, K], a grid of scales that are powers of two, and the values."""
    weight = rng.standard_normal((E, rows, columns)).astype(ml_dtypes.float8_e4m3fn)
    grid = (E, -(-rows // block[0]), -(-columns // block[1]))
    scale = np.exp2(rng.integers(-12, -7, grid)).astype(np.float32)
    fine = scale.repeat(block[0], 1)[:, :rows].repeat(block[1], 2)[..., :columns]
    return weight, scale, weight.astype(np.float32) * fine


@pytest.mark.parametrize("suffix", ["_scale_inv", ".weight_scale_inv", "_scale"])
def test_scales_of_stacks(rng: np.random.Generator, suffix: str) -> None:
    """transformers' names of FP8 experts, and vLLM's."""
    weight, scale, values = matrix(rng, 2 * INTER, H, (128, 128))
    down, down_scale, down_values = matrix(rng, H, INTER, (128, 128))
    stem = ".weight" if suffix.startswith(".") else ""
    tensors = {
        f"{PREFIX}.gate_up_proj{stem}": weight,
        f"{PREFIX}.gate_up_proj{suffix}": scale,
        f"{PREFIX}.down_proj{stem}": down,
        f"{PREFIX}.down_proj{suffix}": down_scale,
    }
    assert_loaded(tensors, values, down_values, form="fp8_block")


@pytest.mark.parametrize(
    "block", [(128, 128), (1, 128), (1, 32), (1, 1 << 20)], ids=["block", "row", "mx", "channel"]
)
@pytest.mark.parametrize("hidden", [H, 384])
def test_transposed_stacks(rng: np.random.Generator, hidden: int, block: tuple[int, int]) -> None:
    """[E, H, 2I] and [E, I, H], as Qwen3-VL-MoE and Llama 4 have them; scales lie as weights do."""
    weight, scale, values = matrix(rng, 2 * INTER, hidden, block)
    down, down_scale, down_values = matrix(rng, hidden, INTER, block)
    tensors = {
        f"{PREFIX}.gate_up_proj": weight.swapaxes(1, 2),
        f"{PREFIX}.gate_up_proj_scale_inv": scale.swapaxes(1, 2),
        f"{PREFIX}.down_proj": down.swapaxes(1, 2),
        f"{PREFIX}.down_proj_scale_inv": down_scale.swapaxes(1, 2),
    }
    assert_loaded(tensors, values, down_values, gate_up_order="halves")


@pytest.mark.parametrize("inter", [192, 128])
def test_a_scale_of_gate_and_up(rng: np.random.Generator, inter: int) -> None:
    """2I = 384 rows have three scales of 128: the middle one is of the last 64 of gate and the
    first 64 of up."""
    weight, scale, values = matrix(rng, 2 * inter, H, (128, 128))
    down, down_scale, down_values = matrix(rng, H, inter, (128, 64))
    tensors = {
        f"{PREFIX}.gate_up_proj": weight,
        f"{PREFIX}.gate_up_proj_scale_inv": scale,
        f"{PREFIX}.down_proj": down,
        f"{PREFIX}.down_proj_scale_inv": down_scale,
    }
    assert_loaded(tensors, values, down_values)
    # Each half with scales of its own: 128 and 64 rows of gate, 128 and 64 of up.
    halves = [matrix(rng, inter, H, (128, 128)) for _ in range(2)]
    whole = [np.concatenate(parts, axis=1) for parts in zip(*halves, strict=True)]
    tensors[f"{PREFIX}.gate_up_proj"], tensors[f"{PREFIX}.gate_up_proj_scale_inv"] = whole[:2]
    assert_loaded(tensors, whole[2], down_values)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [128, 1])
def test_scales_of_alternating_rows(rng: np.random.Generator, rows: int, transposed: bool) -> None:
    """A scale of 128 rows in turns is of 64 of gate and 64 of up."""
    hidden = 384
    weight, scale, values = matrix(rng, 2 * INTER, hidden, (rows, 128))
    down, down_scale, down_values = matrix(rng, hidden, INTER, (128, 128))
    tensors = {
        f"{PREFIX}.gate_up_proj": weight,
        f"{PREFIX}.gate_up_proj_scale_inv": scale,
        f"{PREFIX}.down_proj": down,
        f"{PREFIX}.down_proj_scale_inv": down_scale,
    }
    if transposed:
        tensors = {name: array.swapaxes(1, 2) for name, array in tensors.items()}
    gate_first = np.concatenate([values[:, ::2], values[:, 1::2]], axis=1)
    assert_loaded(tensors, gate_first, down_values, gate_up_order="alternating")


def test_a_grid_that_does_not_fit(rng: np.random.Generator) -> None:
    """[E, 5, 2] over 256 x 256; 3 scales of gate and up in turns over 2 * 128 rows."""
    weight, _, _ = matrix(rng, 2 * INTER, H, (128, 128))
    config = files.make_config("mxfp8", E, H, INTER)
    for rows in (5, 3):
        scale = np.ones((E, rows, 2), np.float32)
        pairs = [
            (f"{PREFIX}.gate_up_proj", weight),
            (f"{PREFIX}.down_proj", weight[:, :, :INTER]),
            (f"{PREFIX}.gate_up_proj_scale", scale),
        ]
        text = r"gate_up_proj_scale in the pairs given: expected a grid of scales over \[128, 256\]"
        for order in ("halves", "alternating"):
            with pytest.raises(ValueError, match=text):
                mm.load_experts(config, pairs, prefix=PREFIX, progress=False, gate_up_order=order)


def test_modelopts_blocks(tmp_path: Path, rng: np.random.Generator) -> None:
    """FP8_PB_WO: scales [N / 128, 1, K / 128, 1]; FP8_BLOCK_SCALES, TensorRT-LLM's name of it."""
    experts = files.fp8_block(rng, E, H, INTER)
    tensors = files.per_expert(experts)
    for name, array in tensors.items():
        if name.endswith("scale"):
            tensors[name] = array[:, None, :, None]
    config = files.make_config("fp8_block", E, H, INTER)
    for algorithm in ("FP8_PB_WO", "FP8_BLOCK_SCALES"):
        stored = dict(quantization=dict(quant_algo=algorithm))
        folder = files.write_folder(tmp_path / algorithm, tensors, config=stored)
        weights = mm.load_experts(config, folder, prefix=PREFIX, progress=False)
        want = mm.load_experts(config, files.per_expert(experts), prefix=PREFIX, progress=False)
        assert_same(weights, want)
        with pytest.warns(UserWarning, match="FP8 weights in 128x128 blocks are requantised"):
            assert select_format(stored).name == "mxfp8"


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_pairs_under_the_formats_own_dtype(
    tmp_path: Path, rng: np.random.Generator, form: str
) -> None:
    """F4 [N, K] is U8 [N, K / 2], of experts and of stacks."""
    experts = files.SOURCES[form](rng, E, H, INTER)
    config = files.make_config(form, E, H, INTER)
    stacks = {
        f"{PREFIX}.{files.PROJ[part]}{suffix}": array
        for part, each in experts.items()
        for suffix, array in zip(("", "_scale", ".weight_scale_2"), each[:3], strict=True)
        if array is not None
    }
    for tensors in (files.per_expert(experts), stacks):
        path = files.write_file(tmp_path / "m", tensors)
        want = mm.load_experts(config, path, prefix=PREFIX, progress=False)
        as_f4(path)
        assert sum(t.stored_dtype == "F4" for t in read_header(path)[0].values()) >= 3
        assert_same(mm.load_experts(config, path, prefix=PREFIX, progress=False), want)


def as_f4(path: Path) -> None:
    """Has a file's header call its pairs F4."""
    text = path.read_bytes()
    length = int.from_bytes(text[:8], "little")
    header = json.loads(text[8 : 8 + length])
    for name, entry in header.items():
        if entry["dtype"] == "U8" and not name.endswith("scale"):
            entry["dtype"] = "F4"
            entry["shape"][-1] *= 2
    new = json.dumps(header).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + text[8 + length :])


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_the_smallest_exponent_is_not_zero(rng: np.random.Generator, dtype: Any) -> None:
    """E8M0 byte 0 is 2^-127, denormal in float32: 448 of it are 2.63e-36, in fp8_block too."""
    weight = np.full((E, 2 * INTER, H), 448, np.float32).astype(ml_dtypes.float8_e4m3fn)
    scale = np.full((E, 2, 2), 0 if dtype == np.uint8 else 2.0**-127, dtype)
    tensors = {
        f"{PREFIX}.gate_up_proj": weight,
        f"{PREFIX}.gate_up_proj_scale": scale,
        f"{PREFIX}.down_proj": weight[:, :, :INTER],
        f"{PREFIX}.down_proj_scale": scale[:, :, :1],
    }
    values = np.full(weight.shape, 448 * 2.0**-127, np.float32)
    assert float(values[0, 0, 0]) == pytest.approx(2.633e-36, rel=1e-3)
    for form in ("fp8_block", "mxfp8"):
        assert_loaded(tensors, values, values[:, :, :INTER], form=form)
