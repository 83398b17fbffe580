"""Kernel layout on disk: what is saved is what is loaded, and anything else is refused by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import checkpoint_files as files
import jax
import numpy as np
import pytest
from checkpoint_files import PREFIX, assert_same
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P
from safetensors import safe_open

from jax_megamoe.config import ExpertSpec, MoEConfig
from jax_megamoe.weights.checkpoint import converted
from jax_megamoe.weights.checkpoint.converted import load_converted, save_experts
from jax_megamoe.weights.checkpoint.load import load_experts
from jax_megamoe.weights.params import ExpertWeights

E, H, INTER = 8, 128, 128
FORMATS = files.SOURCES


def make_config(form: str = "mxfp4", **changes: Any) -> MoEConfig:
    return files.make_config(form, E, H, INTER, **changes)


def made(rng: np.random.Generator, config: ExpertSpec, **kwargs: Any) -> ExpertWeights:
    tensors = files.per_expert(FORMATS[config.weight_format.name](rng, E, H, INTER))
    parent = PREFIX.removesuffix("experts")
    for part, each in files.floats(rng, 1, H, INTER).items():
        tensors[f"{parent}shared_expert.{files.PROJ[part]}.weight"] = each.weight[0]
    sizes = dict(gate=INTER, up=INTER, down=H)
    for part, size in sizes.items():
        tensors[f"{PREFIX}.{files.PROJ[part]}.bias"] = np.float32(rng.standard_normal((E, size)))
    return load_experts(config, tensors, prefix=PREFIX, progress=False, **kwargs)


@pytest.mark.parametrize("form", FORMATS)
def test_saved_is_loaded(tmp_path: Path, rng: np.random.Generator, form: str) -> None:
    config = make_config(form, num_shared_experts=0 if form == "fp8_block" else 1)
    weights = made(rng, config)
    path = tmp_path / "experts.safetensors"
    save_experts(path, config, weights)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert_same(load_converted(path, config), weights)
    for ranks in (2, 8):
        mesh = cases.ep_mesh(ranks)
        sharded = load_converted(str(path), config, mesh=mesh, axis="ep")
        assert_same(sharded, weights)
        assert len(sharded.routed.w2_weight.addressable_shards) == ranks
        again = tmp_path / f"{ranks}.safetensors"
        save_experts(again, config, sharded)
        assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_are_copies(tmp_path: Path, rng: np.random.Generator, ranks: int) -> None:
    """What becomes of the file changes none: mapped ones would change, or end the process."""
    config = make_config()
    path = tmp_path / "experts.safetensors"
    weights = made(rng, config)
    save_experts(path, config, weights)
    loaded = load_converted(path, config, mesh=cases.ep_mesh(ranks), axis="ep")
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(bytes(size))
        file.flush()
        assert_same(loaded, weights)
        file.truncate(0)
    assert_same(loaded, weights)


@pytest.mark.parametrize("spec", [P(None, "a", "b"), P("a", "b"), P("b", None, "a"), P(), P("a")])
def test_any_sharding_is_written_whole(
    tmp_path: Path, rng: np.random.Generator, spec: PartitionSpec
) -> None:
    """Arrays that are sharded inside an expert too."""
    config = make_config()
    weights = made(rng, config)
    path = tmp_path / "e"
    save_experts(path, config, weights)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))

    def sharded(array: jax.Array) -> jax.Array:
        sizes = zip(spec, array.shape, strict=False)
        axes = [None if size % 8 else axis for axis, size in sizes]
        return jax.device_put(array, NamedSharding(mesh, P(*axes)))

    save_experts(tmp_path / "sharded", config, jax.tree.map(sharded, weights))
    assert (tmp_path / "sharded").read_bytes() == path.read_bytes()


def test_other_tools_can_read_it(tmp_path: Path, rng: np.random.Generator) -> None:
    config = make_config()
    path = tmp_path / "experts.safetensors"
    weights = made(rng, config)
    save_experts(path, config, weights)
    with safe_open(path, "np") as file:
        assert file.metadata()["weight_format"] == "mxfp4"
        np.testing.assert_array_equal(file.get_tensor("w2_weight"), weights.routed.w2_weight)


def test_names_of_a_shared_expert_are_those_of_older_files(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    config = make_config("mxfp8", num_shared_experts=1)
    weights = made(rng, config)
    save_experts(tmp_path / "e", config, weights)
    assert weights.shared is not None
    with safe_open(tmp_path / "e", "np") as file:
        assert set(file.keys()) == {
            *("w13_weight", "w13_weight_scale", "w13_bias", "w2_weight", "w2_weight_scale"),
            *("w2_bias", "shared_l1_weight", "shared_l1_weight_scale"),
            *("shared_l2_weight", "shared_l2_weight_scale"),
        }
        scale = file.get_tensor("shared_l2_weight_scale")
    np.testing.assert_array_equal(scale, weights.shared.w2_weight_scale)


@pytest.mark.parametrize(
    "changes, text",
    [
        (dict(weight_format="mxfp8"), "weight_format of e: expected 'mxfp8', got 'nvfp4'"),
        (dict(kernel_source="sgl"), "layout of e: expected 'sgl_fp4', got 'interleave8'"),
        (dict(hidden_size=256), "hidden_size of e: expected '256', got '128'"),
        (dict(intermediate_size=256), "intermediate_size of e: expected '256', got '128'"),
        (dict(num_experts=16), "num_experts of e: expected '16', got '8'"),
        (dict(num_logical_experts=4), "num_logical_experts of e: expected '4', got '8'"),
        (dict(num_shared_experts=1), "shared_format of e: expected 'mxfp8', got 'None'"),
    ],
)
def test_another_layer_is_refused(
    tmp_path: Path, rng: np.random.Generator, changes: dict[str, Any], text: str
) -> None:
    config = replace(make_config("nvfp4"), kernel_source="vllm")
    save_experts(tmp_path / "e", config, made(rng, config))
    with pytest.raises(ValueError, match=f"{text}; convert the checkpoint again for this config"):
        load_converted(tmp_path / "e", replace(config, **changes))


def test_a_spec_is_enough(tmp_path: Path, rng: np.random.Generator) -> None:
    """What parameters are, without what calls need; of NVFP4, whichever row order the file has."""
    for source in ("sgl", "vllm"):
        config = replace(make_config("nvfp4"), kernel_source=source)
        sizes = dict(num_experts=E, hidden_size=H, intermediate_size=INTER)
        spec = ExpertSpec(**sizes, weight_format="nvfp4")
        weights = made(rng, config)
        save_experts(tmp_path / source, spec, weights)
        for known in (spec, config):
            loaded = load_converted(tmp_path / source, known)
            assert loaded.layout == weights.layout
            assert_same(loaded, weights)
    assert made(rng, spec).layout == made(rng, make_config("nvfp4")).layout == "sgl_fp4"
    fused = replace(spec, num_shared_experts=1)
    assert made(rng, fused).layout == "interleave8"
    with pytest.raises(ValueError, match="shared_format of sgl: expected 'mxfp8', got 'None'"):
        load_converted(tmp_path / "sgl", fused)


def test_another_version_is_refused(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    save_experts(tmp_path / "e", config, made(rng, config))
    monkeypatch.setattr(converted, "FILE_VERSION", 2)
    with pytest.raises(ValueError, match="jax_megamoe_version of e: expected '2', got '1'"):
        load_converted(tmp_path / "e", config)


def test_other_files_are_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    config = make_config()
    weights = made(rng, config)
    plain = files.write_file(tmp_path / "plain", dict(a=np.zeros(3)))
    with pytest.raises(ValueError, match="jax_megamoe_version of plain: expected '1', got None"):
        load_converted(plain, config)
    with pytest.raises(FileNotFoundError):
        load_converted(tmp_path / "none", config)
    save_experts(tmp_path / "e", config, weights)
    (tmp_path / "e").write_bytes((tmp_path / "e").read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"w2_bias in e: expected a file of at least"):
        load_converted(tmp_path / "e", config)
    with pytest.raises(ValueError, match=r"weights\.format: expected 'mxfp8'"):
        save_experts(tmp_path / "f", make_config("mxfp8"), weights)
    assert not (tmp_path / "f").exists()
