"""bench_load.py: what it compares is the same, and what it prints."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from command_line import RUN, run

from jax_megamoe.cli import bench_load
from jax_megamoe.cli.bench import Shape, bench_cpu
from jax_megamoe.cli.bench_load import CASES, LoadResult, LoadRow, LoadShape
from jax_megamoe.numerics import quantization
from jax_megamoe.weights.checkpoint.load import load_experts

SHAPE = LoadShape(num_experts=3, hidden_size=256, intermediate_size=128)


@pytest.mark.parametrize("stored, target", CASES)
def test_both_ways_give_the_same_parameters(tmp_path: Path, stored: str, target: str) -> None:
    path = tmp_path / "model.safetensors"
    bench_load.write_layer(path, SHAPE, stored, seed=1)
    config = bench_load.load_config(SHAPE, target)
    weights = load_experts(config, path, prefix=bench_load.PREFIX, progress=False)
    fields = bench_load.numpy_load(path, config)
    assert fields.keys() == weights.routed.arrays().keys()
    for name, array in weights.routed.arrays().items():
        assert fields[name].dtype == array.dtype and fields[name].shape == array.shape, name
        assert fields[name].tobytes() == np.asarray(array).tobytes(), name


def test_numpy_mxfp4_follows_the_rule(rng: np.random.Generator) -> None:
    """Blocks of every size, of zeros, at the boundaries between codes and between scales."""
    w = rng.standard_normal((32, 256)) * 2.0 ** rng.integers(-30, 30, (32, 1))
    w[0] = 0
    w[1] = np.tile([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6], 32)
    w[2] = 6 * np.float32(1 + 2**-23)
    w[3] = -w[1]
    for got, want in zip(
        bench_load.numpy_mxfp4(np.float32(w)),
        jax.jit(quantization.quantize_mxfp4)(np.float32(w)),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


def test_ratios() -> None:
    row = LoadRow("bf16", "mxfp4", num_bytes=10**9, read=0.5, load=0.8, plain=2.0)
    page = LoadResult(SHAPE, (row,)).report().markdown("bench load")
    assert page.splitlines()[-1] == (
        "| bf16 | mxfp4 | 1000.0 | 2.00 | 1.25 | 0.62 | 0.50 | 2.50 x |"
    )
    assert "3 experts, hidden 256, intermediate 128, rates in GB/s of the file. Medians" in page


def test_command(tmp_path: Path) -> None:
    sizes = "--experts 2 --hidden 256 --intermediate 128"
    line = f"bench load {sizes} --formats mxfp4 nvfp4 --repeats 1 --output made/load.md"
    done = run(tmp_path, *RUN, *line.split())
    assert done.returncode == 0, done.stderr
    assert "…" not in done.stdout
    page = (tmp_path / "made/load.md").read_text()
    assert f"`python -m jax_megamoe {line}`" in page
    table = [[cell.strip() for cell in row.split("|")[1:-1]] for row in page.splitlines()[-5:]]
    # 2 experts of 3 matrices of 32768 values.
    assert [row[:3] for row in table[2:]] == [
        ["nvfp4", "nvfp4", "0.1"],
        ["mxfp4", "mxfp4", "0.1"],
        ["bf16", "mxfp4", "0.4"],
    ]
    assert all(re.fullmatch(r"\d+\.\d\d", cell) for row in table[2:] for cell in row[3:7])


def test_at_least_one_repeat() -> None:
    text = "repeats: expected an integer >= 1, got 0"
    with pytest.raises(ValueError, match=text):
        bench_load.bench_load(SHAPE, ["bf16"], repeats=0)
    with pytest.raises(ValueError, match=text):
        bench_cpu(Shape(), ["bf16"], repeats=0)
