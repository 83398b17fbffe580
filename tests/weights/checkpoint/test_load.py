"""Loading over meshes, replicas, in any order, over several calls, and again."""

from pathlib import Path
from typing import Any

import cases
import checkpoint_files as files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import PREFIX, assert_same
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_megamoe.config import MoEConfig
from jax_megamoe.weights.checkpoint import load as checkpoint
from jax_megamoe.weights.checkpoint.header import StoredTensor
from jax_megamoe.weights.checkpoint.load import ExpertLoader, load_experts, reload_experts
from jax_megamoe.weights.params import ExpertWeights

E, H, INTER = 8, 128, 128
FORMATS = files.SOURCES


def make_config(form: str = "mxfp4", **changes: Any) -> MoEConfig:
    return files.make_config(form, E, H, INTER, **changes)


def load(checkpoint: Any, config: MoEConfig, **kwargs: Any) -> ExpertWeights:
    return load_experts(config, checkpoint, prefix=PREFIX, progress=False, **kwargs)


@pytest.mark.parametrize("form", FORMATS)
def test_ranks_hold_the_same_experts(tmp_path: Path, rng: np.random.Generator, form: str) -> None:
    config = make_config(form)
    folder = files.write_folder(tmp_path / "m", files.per_expert(FORMATS[form](rng, E, H, INTER)))
    one = load(folder, config)
    for ranks in (1, 2, 4, 8):
        mesh = cases.ep_mesh(ranks)
        sharded = load(folder, config, mesh=mesh, axis="ep")
        assert_same(one, sharded)
        for array in sharded.arrays().values():
            assert array.sharding == NamedSharding(mesh, PartitionSpec("ep"))


def test_other_axes_replicate(tmp_path: Path, rng: np.random.Generator) -> None:
    config = make_config(num_shared_experts=1)
    tensors = files.per_expert(files.mxfp4(rng, E, H, INTER)) | {
        f"{PREFIX.removesuffix('experts')}shared_experts.{files.PROJ[part]}.weight": each.weight[0]
        for part, each in files.floats(rng, 1, H, INTER).items()
    }
    folder = files.write_folder(tmp_path / "m", tensors)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("dp", "ep"))
    weights = load(folder, config, mesh=mesh, axis="ep")
    assert_same(load(folder, config), weights)
    assert weights.routed.w13_weight.sharding == NamedSharding(mesh, PartitionSpec("ep"))
    assert weights.shared.w13_weight.sharding.is_fully_replicated
    both = load(folder, config, mesh=mesh, axis=("dp", "ep"))
    assert_same(weights, both)
    assert {shard.data.shape[0] for shard in both.routed.w2_weight.addressable_shards} == {1}


def test_other_experts_are_not_read(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one of 8 experts wanted, an eighth of the bytes is read, of stacks too."""
    read: list[int] = []
    read_tensor = StoredTensor.read

    def counted(tensor: StoredTensor, index: int | None = None) -> np.ndarray:
        array = read_tensor(tensor, index)
        read.append(array.nbytes)
        return array

    monkeypatch.setattr(StoredTensor, "read", counted)
    monkeypatch.setattr(
        checkpoint, "place", lambda *args: _first_only(checkpoint_place(*args), jax.devices()[0])
    )
    experts = files.mxfp4(rng, E, H, INTER)
    biases = {part: np.zeros((E, H), np.float32) for part in files.PROJ}
    for tensors in (files.per_expert(experts), files.gpt_oss(experts, biases)):
        folder = files.write_folder(tmp_path / "m", tensors)
        read.clear()
        loader = ExpertLoader(make_config(), prefix=PREFIX, mesh=cases.ep_mesh(8), axis="ep")
        loader.read(folder)
        assert sum(read) == sum(array.nbytes for array in tensors.values()) // E


checkpoint_place = checkpoint.place


def _first_only(placement: Any, device: jax.Device) -> Any:
    """The placement as a process sees it that has only one device."""

    class Local:
        def __init__(self, sharding: Any) -> None:
            self._sharding = sharding

        def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> Any:
            return {device: self._sharding.devices_indices_map(shape)[device]}

    return type(placement)(Local(placement.routed), Local(placement.shared), placement.held)


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_replicas(tmp_path: Path, rng: np.random.Generator, form: str) -> None:
    """16 slots and 2 replicas over 2 ranks: every slot is its expert, NVFP4's scales too."""
    config = make_config(form, num_experts=18, num_logical_experts=16)
    tensors = files.per_expert(FORMATS[form](rng, 16, H, INTER))
    folder = files.write_folder(tmp_path / "m", tensors)
    weights = load(folder, config, mesh=cases.ep_mesh(2), axis="ep")
    without = load(tensors, make_config(form, num_experts=16))
    assert_same(weights, _slots(without, np.arange(18) % 16))


def _slots(weights: ExpertWeights, held: np.ndarray) -> ExpertWeights:
    """Parameters whose slots hold these of the experts of `weights`."""
    return jax.tree.map(lambda array: np.asarray(array)[held], weights)


@pytest.mark.parametrize("form", FORMATS)
def test_any_order_and_split_over_calls(rng: np.random.Generator, form: str) -> None:
    config = make_config(form)
    tensors = files.per_expert(FORMATS[form](rng, E, H, INTER))
    expected = load(tensors, config)
    names = list(tensors)
    for _ in range(3):
        rng.shuffle(names)
        loader = ExpertLoader(config, prefix=PREFIX)
        for start in range(0, len(names), 7):
            loader.add((name, tensors[name]) for name in names[start : start + 7])
        assert_same(loader.finish(), expected)


def test_two_files_one_after_the_other(tmp_path: Path, rng: np.random.Generator) -> None:
    """All weights in one file and all scales in another."""
    tensors = files.per_expert(files.mxfp4(rng, E, H, INTER))
    loader = ExpertLoader(make_config(), prefix=PREFIX)
    for name in ("scale", "weight"):
        held = {key: array for key, array in tensors.items() if key.endswith(name)}
        loader.read(files.write_file(tmp_path / f"{name}.safetensors", held), partial=True)
    assert_same(loader.finish(), load(tensors, make_config()))


def test_files_without_an_index(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors = files.per_expert(files.mxfp4(rng, E, H, INTER))
    folder = files.write_folder(tmp_path / "m", tensors, shards=3)
    expected = load(folder, make_config())
    (folder / "model.safetensors.index.json").unlink()
    assert_same(load(folder, make_config()), expected)
    one = files.write_file(tmp_path / "one.safetensors", tensors)
    assert_same(load(str(one), make_config()), expected)


def test_pairs_of_jax_arrays(rng: np.random.Generator) -> None:
    tensors = files.per_expert(files.floats(rng, E, H, INTER))
    pairs = ((name, jnp.asarray(array)) for name, array in tensors.items())
    assert_same(load(pairs, make_config()), load(tensors, make_config()))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("ranks", [None, 4])
def test_reload_whole(rng: np.random.Generator, form: str, ranks: int | None) -> None:
    """A, B, A gives A bit for bit, and leaves what it started from alone."""
    config = make_config(form)
    a, b = (files.per_expert(FORMATS[form](rng, E, H, INTER)) for _ in range(2))
    place = {} if ranks is None else dict(mesh=cases.ep_mesh(ranks), axis="ep")
    first, other = load(a, config, **place), load(b, config, **place)
    second = reload_experts(config, first, b, prefix=PREFIX)
    assert_same(second, other)
    assert_same(first, load(a, config))
    third = reload_experts(config, second, a, prefix=PREFIX)
    assert_same(third, first)
    assert third.routed.w13_weight.sharding == first.routed.w13_weight.sharding


def test_reload_a_few_tensors(rng: np.random.Generator) -> None:
    config = make_config()
    a, b = (files.per_expert(files.mxfp4(rng, E, H, INTER)) for _ in range(2))
    some = {name: b[name] for name in b if ".5.up_proj" in name or ".2.down_proj" in name}
    weights = load(a, config, mesh=cases.ep_mesh(2), axis="ep")
    updated = reload_experts(config, weights, some, prefix=PREFIX)
    assert_same(updated, load(a | some, config))
    only_up = {name: b[name] for name in b if ".5.up_proj" in name}
    untouched = reload_experts(config, weights, only_up, prefix=PREFIX)
    assert untouched.routed.w2_weight is weights.routed.w2_weight


def test_reload_after_a_rebalance(rng: np.random.Generator) -> None:
    """Slots hold what physical_to_logical says, not p % num_logical."""
    held = np.array([3, 1, 2, 0, 3, 3])
    config = make_config(num_experts=6, num_logical_experts=4)
    tensors = files.per_expert(files.mxfp4(rng, 4, H, INTER))
    weights = reload_experts(
        config, load(tensors, config), tensors, prefix=PREFIX, physical_to_logical=held
    )
    assert_same(weights, _slots(load(tensors, make_config(num_experts=4)), held))


def test_a_failed_reload_changes_nothing(rng: np.random.Generator) -> None:
    config = make_config()
    a, b = (files.per_expert(files.mxfp4(rng, E, H, INTER)) for _ in range(2))
    weights = load(a, config)
    broken = b | {f"{PREFIX}.7.up_proj.weight_scale": np.full((INTER, H // 32), 255, np.uint8)}
    with pytest.raises(ValueError, match=r"7\.up_proj.*UE8M0 exponents below 255"):
        reload_experts(config, weights, broken, prefix=PREFIX)
    assert_same(weights, load(a, config))


def test_input_scales_are_every_experts(rng: np.random.Generator) -> None:
    """Expert 7's is 8 times the others', and each rank count keeps them all."""
    tensors = files.per_expert(files.nvfp4(rng, E, H, INTER))
    inputs = np.where(np.arange(E) == 7, 8.0, 1.0).astype(np.float32)
    tensors |= {f"{PREFIX}.{e}.down_proj.input_scale": inputs[e] for e in range(E)}
    for ranks in (1, 4):
        weights = load(tensors, make_config("nvfp4"), mesh=cases.ep_mesh(ranks), axis="ep")
        np.testing.assert_array_equal(np.asarray(weights.routed.w2_input_scale), inputs)


def test_global_scale_of_zero_for_zero_weights(rng: np.random.Generator) -> None:
    """A never-hit expert: all 0 is defined, and gate alone may be."""
    experts = files.nvfp4(rng, E, H, INTER)
    for part in ("gate", "up", "down"):
        experts[part].weight[2] = 0
        experts[part].global_scale[2] = 0
    experts["gate"].weight[3] = 0
    tensors = files.per_expert(experts)
    tensors[f"{PREFIX}.3.gate_proj.weight_scale_2"] = np.float32(0)
    weights = load(tensors, make_config("nvfp4"))
    scales = np.asarray(weights.routed.w13_weight_scale_2)
    assert scales[2] == 0
    assert scales[3] == experts["up"].global_scale[3]


def test_progress(tmp_path: Path, rng: np.random.Generator, capfd: Any) -> None:
    folder = files.write_folder(tmp_path / "m", files.per_expert(files.mxfp4(rng, E, H, INTER)))
    load_experts(make_config(), folder, prefix=PREFIX)
    shown = capfd.readouterr()
    assert PREFIX in shown.err
    assert not shown.out
