"""`convert`: which layers, of which sizes; what is written is what `load_experts` gives."""

from pathlib import Path
from typing import Any

import checkpoint_files as files
import numpy as np
import pytest
from checkpoint_files import PREFIX, assert_same

import jax_megamoe as mm
from jax_megamoe.cli.main import main
from jax_megamoe.weights.checkpoint.convert import convert_checkpoint, layer_prefixes, stored_sizes
from jax_megamoe.weights.checkpoint.tensors import Checkpoint

E, H, INTER = 4, 256, 128
PATTERN = "model.layers.*.mlp.experts"
FP8 = dict(quantization_config=dict(quant_method="fp8", weight_block_size=[128, 128]))


def layers(rng: np.random.Generator, form: str, *numbers: int) -> dict[str, np.ndarray]:
    """Tensors of some layers and of things around them."""
    tensors: dict[str, Any] = {"model.embed.weight": np.zeros((2, 3), np.float32)}
    for number in numbers:
        prefix = PREFIX.replace("3", str(number))
        tensors |= files.per_expert(files.SOURCES[form](rng, E, H, INTER), prefix=prefix)
        tensors[f"model.layers.{number}.input_layernorm.weight"] = np.zeros(3, np.float32)
    return tensors


@pytest.mark.parametrize("form", files.SOURCES)
def test_one_layer_equals_load(tmp_path: Path, rng: np.random.Generator, form: str) -> None:
    checkpoint = files.write_folder(tmp_path / "model", layers(rng, form, 3))
    path = tmp_path / "made/experts.safetensors"
    [layer] = convert_checkpoint(
        checkpoint, path, prefix=PREFIX, weight_format=form, num_experts=6, progress=False
    )
    assert layer.path == path and layer.prefix == PREFIX
    config = files.make_config(form, 6, H, INTER, num_logical_experts=E)
    want = mm.load_experts(config, checkpoint, prefix=PREFIX, progress=False)
    assert_same(mm.load_converted(path, config), want)
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_every_layer_from_the_command_line(
    tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    """fp8_block to MXFP8, layers 3 and 12, a shared expert in each."""
    tensors = layers(rng, "fp8_block", 12, 3)
    for number in (3, 12):
        for part, each in files.floats(rng, 1, H, INTER).items():
            name = f"model.layers.{number}.mlp.shared_experts.{files.PROJ[part]}.weight"
            tensors[name] = each.weight[0]
    checkpoint = files.write_folder(tmp_path / "model", tensors, config=FP8)
    made = tmp_path / "made"
    line = f"convert {checkpoint} --prefix {PATTERN} --output {made} --format mxfp8"
    assert main([*line.split(), "--shared-experts", "1"]) == 0
    names = [f"model.layers.{number}.mlp.experts" for number in (3, 12)]
    assert sorted(path.name for path in made.iterdir()) == sorted(f"{n}.safetensors" for n in names)
    output = " ".join(capsys.readouterr().out.split())
    assert output.count(f"mxfp8, {E} experts of {H} x {INTER}") == 2
    config = files.make_config("mxfp8", E, H, INTER, num_shared_experts=1)
    for name in names:
        want = mm.load_experts(config, checkpoint, prefix=name, progress=False)
        assert_same(mm.load_converted(made / f"{name}.safetensors", config), want)


def test_sizes_are_rounded_up(tmp_path: Path, rng: np.random.Generator) -> None:
    """GPT-OSS's, no multiple of 128, filled up with zeros; its biases come along."""
    hidden, inter = 192, 320
    biases = {
        part: np.float32(rng.standard_normal((E, inter if part != "down" else hidden)))
        for part in files.PROJ
    }
    tensors = files.gpt_oss(files.mxfp4(rng, E, hidden, inter), biases)
    quantization = dict(quantization_config=dict(quant_method="mxfp4"))
    checkpoint = files.write_folder(tmp_path / "model", tensors, config=quantization)
    path = tmp_path / "experts"
    options = dict(prefix=PREFIX, progress=False)
    [layer] = convert_checkpoint(checkpoint, path, **options)
    assert (layer.spec.hidden_size, layer.spec.intermediate_size) == (256, 384)
    assert layer.spec.weight_format is mm.MXFP4
    config = files.make_config("mxfp4", E, 256, 384)
    want = mm.load_experts(config, checkpoint, stored_sizes=(hidden, inter), **options)
    assert_same(mm.load_converted(path, config), want)
    [layer] = convert_checkpoint(checkpoint, path, **options, hidden_size=512)
    assert mm.load_converted(path, layer.spec).routed.w2_weight.shape == (E, 512, 192)


def test_fp8_is_converted_as_it_is_loaded(tmp_path: Path, rng: np.random.Generator) -> None:
    checkpoint = files.write_folder(tmp_path / "model", layers(rng, "fp8_block", 3), config=FP8)
    with pytest.warns(UserWarning, match="FP8 weights in 128x128 blocks are requantised to mxfp8"):
        [layer] = convert_checkpoint(checkpoint, tmp_path / "e", prefix=PREFIX, progress=False)
    assert layer.spec.weight_format is mm.MXFP8


def test_sizes_of_each_arrangement(tmp_path: Path, rng: np.random.Generator) -> None:
    """Per expert, stacked, gate and up in one, transposed."""
    experts = files.floats(rng, E, H, INTER)
    gate, up, down = (experts[part].weight for part in files.PROJ)
    both = np.concatenate([gate, up], axis=1)
    arrangements = [
        files.per_expert(experts, names=files.W123),
        {f"{PREFIX}.gate_proj": gate, f"{PREFIX}.up_proj": up, f"{PREFIX}.down_proj": down},
        {f"{PREFIX}.gate_up_proj": both, f"{PREFIX}.down_proj": down},
        {
            f"{PREFIX}.gate_up_proj": both.swapaxes(1, 2),
            f"{PREFIX}.down_proj": down.swapaxes(1, 2),
        },
        files.per_expert(files.nvfp4(rng, E, H, INTER)),
    ]
    for number, tensors in enumerate(arrangements):
        path = files.write_file(tmp_path / str(number), tensors)
        assert stored_sizes(Checkpoint(path), PREFIX) == (E, H, INTER)


def test_prefixes() -> None:
    names = [f"layers.{n}.mlp.experts.0.w{k}.weight" for n in (10, 2, 9) for k in (1, 2)]
    names += ["layers.1.mlp.gate.weight", "layers.3.mlp.experts_bias", "more.layers.4.mlp.experts"]
    want = [f"layers.{number}.mlp.experts" for number in (2, 9, 10)]
    assert layer_prefixes(names, "layers.*.mlp.experts") == want
    assert layer_prefixes(names, "layers.*.mlp.experts.") == want
    assert layer_prefixes(names, "layers.9.mlp.experts") == want[1:2]


@pytest.mark.parametrize(
    "options, text",
    [
        (
            "--prefix layers.*.experts",
            "prefix: expected the beginning of a tensor's name, * standing for a number, "
            "got 'layers.*.experts'",
        ),
        (f"--prefix {PREFIX} --experts 3", "num_logical_experts: expected at most num_experts = 3"),
        (f"--prefix {PREFIX} --hidden 250", "hidden_size: expected a multiple of 128, got 250"),
        (f"--prefix {PREFIX} --hidden 128", "hidden_size: expected at least the stored 256"),
        (f"--prefix {PREFIX} --format int4", "invalid choice: 'int4'"),
        (
            "--prefix model.layers.7.mlp.experts",
            "weights of model.layers.7.mlp.experts: expected gate [I, H] and down [H, I], or both "
            "transposed, got (128, 256) and None",
        ),
    ],
)
def test_refused(
    tmp_path: Path,
    rng: np.random.Generator,
    capsys: pytest.CaptureFixture[str],
    options: str,
    text: str,
) -> None:
    tensors = layers(rng, "bf16", 3)
    tensors["model.layers.7.mlp.experts.0.gate_proj.weight"] = tensors[f"{PREFIX}.0.up_proj.weight"]
    path = files.write_file(tmp_path / "model", tensors)
    line = f"convert {path} --output {tmp_path / 'made'} {options}"
    try:
        status = main(line.split())
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_a_missing_tensor_leaves_no_file(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors = layers(rng, "bf16", 3)
    del tensors[f"{PREFIX}.2.up_proj.weight"]
    path = files.write_file(tmp_path / "model", tensors)
    with pytest.raises(ValueError, match="no weight of expert 2's up projection"):
        convert_checkpoint(path, tmp_path / "made", prefix=PREFIX, progress=False)
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "output",
    [
        "model/model-00001-of-00002.safetensors",
        *("model/x", "model/../model/x", "link", "hard", "config", "folder/x"),
    ],
)
def test_an_input_is_no_output(tmp_path: Path, rng: np.random.Generator, output: str) -> None:
    """By whatever path or link; and nothing else goes where it would be taken for an input."""
    checkpoint = files.write_folder(tmp_path / "model", layers(rng, "bf16", 3), config={})
    shard = checkpoint / "model-00002-of-00002.safetensors"
    (tmp_path / "link").symlink_to(shard)
    (tmp_path / "hard").hardlink_to(shard)
    (tmp_path / "config").symlink_to(checkpoint / "config.json")
    (tmp_path / "folder").symlink_to(checkpoint)
    before = contents(tmp_path)
    text = r"output: expected a (file that is not read|place outside the checkpoint .*), got .*; wr"
    with pytest.raises(ValueError, match=text):
        convert_checkpoint(checkpoint, tmp_path / output, prefix=PREFIX, progress=False)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("several", [False, True])
def test_in_place_is_refused(
    tmp_path: Path,
    rng: np.random.Generator,
    capsys: pytest.CaptureFixture[str],
    several: bool,
) -> None:
    """One file over itself; every layer into the checkpoint's folder."""
    checkpoint = files.write_folder(tmp_path / "model", layers(rng, "bf16", 3), shards=1)
    place = checkpoint if several else next(checkpoint.glob("*.safetensors"))
    before = contents(tmp_path)
    prefix = PATTERN if several else PREFIX
    assert main(["convert", str(place), "--prefix", prefix, "--output", str(place)]) == 2
    assert "output: expected" in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_experts_without_a_gap(tmp_path: Path, rng: np.random.Generator) -> None:
    """An expert's number from the file is no size to allocate."""
    tensors = layers(rng, "bf16", 3)
    for part in files.PROJ.values():
        tensors[f"{PREFIX}.1000000.{part}.weight"] = tensors[f"{PREFIX}.0.{part}.weight"]
    path = files.write_file(tmp_path / "model", tensors)
    with pytest.raises(ValueError, match=f"weights of {PREFIX}: expected experts 0 to 1000000, go"):
        convert_checkpoint(path, tmp_path / "made", prefix=PREFIX, progress=False)
