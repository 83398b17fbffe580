"""The demo as a user runs it, at the smallest sizes, and its bounds."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import tolerances
from command_line import RUN, TINY, run
from safetensors.numpy import load_file

from jax_megamoe import WEIGHT_FORMATS
from jax_megamoe.cli.demo.checkpoint import write_checkpoint
from jax_megamoe.cli.demo.result import BOUNDS, FormatResult
from jax_megamoe.cli.demo.run import DemoSettings

WITHOUT_MATPLOTLIB = """
import sys
sys.modules["matplotlib"] = None
from jax_megamoe.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""A program that cannot import matplotlib."""

TOO_STRICT = """
import sys
from jax_megamoe.cli.demo import result
result.BOUNDS["bf16"] = result.Bounds(exact=1e-3, einsum=1)
from jax_megamoe.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""A program that allows bf16 less than its rounding."""


def rows(text: str) -> dict[str, list[float]]:
    """Numbers of each row of the printed table, by format."""
    found = re.findall(r"^\W*(\w+) +│(.*)$", text, re.M)
    return {
        form: [float(each.replace(",", "")) for each in re.findall(r"[\d.][\d.,e-]*", rest)]
        for form, rest in found
    }


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The demo's folder, stdout and stderr, in every format."""
    folder = tmp_path_factory.mktemp("demo")
    done = run(folder, *RUN, "demo", *TINY.split(), "--output", "out", "--keep")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "out", done.stdout, done.stderr


def test_a_row_for_each_format(shown: tuple[Path, str, str]) -> None:
    table = rows(shown[1])
    assert list(table) == list(WEIGHT_FORMATS)
    # 4 experts of 3 x 128 x 128 values.
    megabytes = {form: values[0] for form, values in table.items()}
    assert megabytes == {"mxfp4": 0.1, "mxfp8": 0.2, "nvfp4": 0.1, "bf16": 0.4, "fp8_block": 0.2}
    for form, (_, exact, exact_bound, einsum, einsum_bound, rate) in table.items():
        assert (exact_bound, einsum_bound) == BOUNDS[form]
        assert BOUNDS[form].exact / 3 < exact <= BOUNDS[form].exact
        assert einsum <= BOUNDS[form].einsum
        assert rate > 0


def test_the_checkpoint_is_qwens(shown: tuple[Path, str, str]) -> None:
    folder = shown[0] / "checkpoint"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    names = [
        f"model-{shard}-of-00004.safetensors" for shard in ("00001", "00002", "00003", "00004")
    ]
    assert sorted(set(index["weight_map"].values())) == names
    tensors = {}
    for name in names:
        held = load_file(folder / name)
        assert all(index["weight_map"][tensor] == name for tensor in held)
        tensors |= held
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in tensors.values())
    shapes = {name: each.shape for name, each in tensors.items()}
    assert len(shapes) == 1 + 4 * 3
    assert shapes["model.layers.0.mlp.gate.weight"] == (4, 128)
    assert shapes["model.layers.0.mlp.experts.3.down_proj.weight"] == (128, 128)
    assert {str(each.dtype) for each in tensors.values()} == {"bfloat16"}
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "qwen3_moe"
    assert (config["num_experts"], config["num_experts_per_tok"]) == (4, 2)


def test_says_where_the_picture_is(shown: tuple[Path, str, str]) -> None:
    path = shown[0] / "demo.png"
    assert f"Picture: {path.resolve()}\n" in shown[1]
    assert path.read_bytes().startswith(b"\x89PNG")


def test_loads_with_a_bar(shown: tuple[Path, str, str]) -> None:
    assert shown[2].count("model.layers.0.mlp.experts") >= len(WEIGHT_FORMATS)


def test_without_matplotlib_the_rest_runs(tmp_path: Path) -> None:
    program = [sys.executable, "-c", WITHOUT_MATPLOTLIB]
    done = run(tmp_path, *program, "demo", *TINY.split(), "--formats", "bf16", "--seed", "1")
    assert done.returncode == 0, done.stderr
    assert list(rows(done.stdout)) == ["bf16"]
    assert re.search(r"No picture \(.*matplotlib.*\): pip install matplotlib", done.stdout)
    assert list((tmp_path / "megamoe-demo").iterdir()) == []


def test_an_error_beyond_its_bound_fails(tmp_path: Path) -> None:
    program = [sys.executable, "-c", TOO_STRICT]
    done = run(tmp_path, *program, "demo", *TINY.split(), "--formats", "bf16")
    assert done.returncode == 1, done.stderr
    assert "Errors larger than allowed: bf16" in done.stdout
    assert (tmp_path / "megamoe-demo" / "demo.png").exists()


@pytest.mark.parametrize("form", list(WEIGHT_FORMATS))
def test_bounds_are_little_above_those_of_the_tests(form: str) -> None:
    accuracy = tolerances.ACCURACY[form].layer[1]
    assert accuracy <= BOUNDS[form].exact <= 1.15 * accuracy
    agreement = tolerances.AGREEMENT[form].norm
    assert agreement <= BOUNDS[form].einsum <= 5 * agreement


@pytest.mark.parametrize(
    ("exact", "einsum", "within"),
    [
        (0.005, 0.001, True),
        (0.0051, 0.0, False),
        (0.0, 0.0011, False),
        (np.nan, 0.0, False),
        (0.0, np.nan, False),
    ],
)
def test_both_errors_count(exact: float, einsum: float, within: bool) -> None:
    result = FormatResult("bf16", 1, exact, einsum, 1.0, np.zeros(4, np.int32))
    assert result.within_bounds is within


def test_a_folder_of_others_is_not_written_to(tmp_path: Path) -> None:
    """--keep writes into `checkpoint`, which may be somebody's model."""
    config = DemoSettings(num_experts=8, top_k=1, hidden_size=128, intermediate_size=128)
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, config.config("bf16"), seed=0)
    first = (folder / "model-00001-of-00004.safetensors").read_bytes()
    write_checkpoint(folder, config.config("bf16"), seed=1)
    assert (folder / "model-00001-of-00004.safetensors").read_bytes() != first
    assert len(list(folder.iterdir())) == 6
    (folder / "config.json").write_text('{"model_type": "qwen3_moe"}')
    before = {path: path.read_bytes() for path in folder.iterdir()}
    text = f"{folder}: expected no folder, an empty one, or one that the demo wrote, got other fil"
    with pytest.raises(ValueError, match=text):
        write_checkpoint(folder, config.config("bf16"), seed=2)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
