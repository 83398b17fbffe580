"""Every way for a checkpoint to be wrong: an error that names tensor, file, expected and got."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_files as files
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import PREFIX
from jax.sharding import Mesh

from jax_megamoe.config import MoEConfig
from jax_megamoe.weights.checkpoint.load import ExpertLoader, load_experts, reload_experts

E, H, INTER = 4, 256, 128
UP = f"{PREFIX}.2.up_proj"
FORMATS = files.SOURCES
Tensors = dict[str, Any]


def make_config(form: str = "mxfp4", **changes: Any) -> MoEConfig:
    return files.make_config(form, E, H, INTER, **changes)


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        tensors[name] = change(np.array(tensors[name]))

    return apply


def filled(name: str, index: Any, octet: int) -> Callable[[Tensors], None]:
    """One byte of a tensor set."""

    def change(array: np.ndarray) -> np.ndarray:
        array.view(np.uint8)[index] = octet
        return array

    return changed(name, change)


def dropped(*names: str) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return apply


def added(name: str, array: Any) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        tensors[name] = array

    return apply


def renamed(old: str, new: str) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        tensors[new] = tensors.pop(old)

    return apply


CASES: dict[str, tuple[str, Callable[[Tensors], None], type[Exception], str]] = {
    "no weight": (
        "mxfp4",
        dropped(f"{UP}.weight"),
        ValueError,
        rf"{PREFIX}: expected every tensor of every expert, got no weight for "
        rf"{UP}.weight_scale in model-\d+-of-00002.safetensors",
    ),
    "no scale": (
        "mxfp4",
        dropped(f"{UP}.weight_scale"),
        ValueError,
        rf"no scale for {UP}.weight in model-",
    ),
    "no global scale": (
        "nvfp4",
        dropped(f"{UP}.weight_scale_2"),
        ValueError,
        rf"no global scale for {UP}.weight in",
    ),
    "w3 never came": (
        "nvfp4",
        dropped(f"{UP}.weight", f"{UP}.weight_scale", f"{UP}.weight_scale_2"),
        ValueError,
        r"no up for \S+\.2\.gate_proj\.weight in \S+, which share a global scale, "
        r"no weight of expert 2's up projection",
    ),
    "no expert": (
        "bf16",
        dropped(*(f"{PREFIX}.3.{name}.weight" for name in files.PROJ.values())),
        ValueError,
        "no weight of expert 3's gate projection, no weight of expert 3's up projection, "
        "no weight of expert 3's down projection",
    ),
    "too many experts": (
        "bf16",
        added(f"{PREFIX}.4.up_proj.weight", np.zeros((INTER, H), np.float32)),
        ValueError,
        rf"{PREFIX}\.4\.up_proj\.weight: expected experts 0 to 3 \(num_logical_experts\), got 4",
    ),
    "twice": (
        "bf16",
        added(f"{PREFIX}.2.w3.weight", np.zeros((INTER, H), np.float32)),
        ValueError,
        rf"{PREFIX}\.2\.w3\.weight in \S+: expected one weight of expert 2's up projection, got "
        rf"another, {UP}\.weight in model-",
    ),
    "stacked and apart": (
        "bf16",
        added(f"{PREFIX}.up_proj.weight", np.zeros((E, INTER, H), np.float32)),
        ValueError,
        "expected one weight of expert 0's up projection, got another",
    ),
    "misnamed": (
        "bf16",
        renamed(f"{UP}.weight", f"{PREFIX}.2.upproj.weight"),
        ValueError,
        rf"{PREFIX}\.2\.upproj\.weight: expected a projection of .*'up_proj'.* got 'upproj.weight'",
    ),
    "unknown kind": (
        "bf16",
        added(f"{UP}.lora_a", np.zeros((8, H), np.float32)),
        ValueError,
        rf"{UP}\.lora_a: expected a projection of .* and one of .*'weight_scale_inv'",
    ),
    "misshaped": (
        "bf16",
        changed(f"{UP}.weight", np.transpose),
        ValueError,
        rf"{UP}\.weight in \S+: expected shape \[128, 256\], got shape \[256, 128\]",
    ),
    "misshaped pairs": (
        "mxfp4",
        changed(f"{UP}.weight", lambda array: array[:, :-1]),
        ValueError,
        rf"{UP}\.weight in \S+: expected shape \[128, 128\], got shape \[128, 127\]",
    ),
    "misshaped scale": (
        "mxfp4",
        changed(f"{UP}.weight_scale", lambda array: array[:, :5]),
        ValueError,
        rf"{UP}\.weight_scale in \S+: expected a grid of scales over \[128, 256\] in blocks of 1, "
        r"16, 32, 64 or 128, got shape \[128, 5\]",
    ),
    "misshaped global scale": (
        "nvfp4",
        added(f"{UP}.weight_scale_2", np.ones(3, np.float32)),
        ValueError,
        rf"{UP}\.weight_scale_2 in \S+: expected one number, got shape \[3\]",
    ),
    "E5M2": (
        "mxfp8",
        changed(f"{UP}.weight", lambda array: array.view(ml_dtypes.float8_e5m2)),
        TypeError,
        rf"{UP}\.weight in \S+: expected one of the dtypes .*'float8_e4m3fn'.*, got float8_e5m2",
    ),
    "float64": (
        "bf16",
        changed(f"{UP}.weight", lambda array: array.astype(np.float64)),
        TypeError,
        rf"{UP}\.weight in \S+: expected one of the dtypes .* got float64",
    ),
    "packed int4": (
        "mxfp4",
        added(f"{UP}.weight", np.zeros((INTER, H // 8), np.int32)),
        NotImplementedError,
        rf"{UP}\.weight in \S+: expected weights in BF16.*, got packed int4 \(int32\)",
    ),
    "AWQ": (
        "bf16",
        renamed(f"{UP}.weight", f"{UP}.qweight"),
        NotImplementedError,
        rf"{UP}\.qweight: expected weights in BF16.* got packed int4",
    ),
    "scale of an integer kind": (
        "mxfp4",
        changed(f"{UP}.weight_scale", lambda array: array.astype(np.int32)),
        TypeError,
        rf"{UP}\.weight_scale in \S+: expected one of the dtypes .*, got int32",
    ),
    "float scale for FP4": (
        "mxfp4",
        added(f"{UP}.weight_scale", np.full((INTER, H // 32), 0.3, np.float32)),
        ValueError,
        rf"{UP}\.weight_scale in \S+: expected powers of two for FP4 weights",
    ),
    "scale for floats": (
        "bf16",
        added(f"{UP}.weight_scale", np.ones((INTER, 8), np.float32)),
        TypeError,
        rf"{UP}\.weight_scale in \S+: expected no scale for a weight in floating point",
    ),
    "global scale of another type": (
        "nvfp4",
        changed(f"{UP}.weight_scale_2", lambda array: array.astype(jnp.bfloat16)),
        TypeError,
        rf"{UP}\.weight_scale_2 in \S+: expected dtype float32, got bfloat16",
    ),
    "global scales differ": (
        "nvfp4",
        lambda tensors: tensors.update(
            {
                f"{PREFIX}.2.gate_proj.weight_scale_2": np.float32(3.85e-5),
                f"{UP}.weight_scale_2": np.float32(4.83e-5),
            }
        ),
        ValueError,
        r"global scales of expert 2: expected one for gate and up, to a relative 1e-05, got "
        rf"3\.85e-05 for \S+gate_proj\.weight in \S+ and 4\.83e-05 for {UP}",
    ),
    "E8M0 NaN": (
        "mxfp4",
        filled(f"{UP}.weight_scale", (3, 4), 255),
        ValueError,
        rf"{UP}\.weight_scale in \S+: expected UE8M0 exponents below 255, which is NaN, got 1",
    ),
    "E4M3 NaN scale": (
        "nvfp4",
        filled(f"{UP}.weight_scale", (3, 4), 0x7F),
        ValueError,
        rf"{UP}\.weight_scale in \S+: expected finite E4M3 numbers",
    ),
    "float NaN scale": (
        "fp8_block",
        changed(f"{UP}.weight_scale", lambda array: array * np.float32(np.nan)),
        ValueError,
        rf"{UP}\.weight_scale in \S+: expected finite numbers",
    ),
    "NaN weight": (
        "bf16",
        changed(f"{UP}.weight", lambda array: array * jnp.bfloat16(np.inf)),
        ValueError,
        rf"{UP}\.weight in \S+: expected finite numbers",
    ),
    "E4M3 NaN weight": (
        "mxfp8",
        filled(f"{UP}.weight", (3, 4), 0xFF),
        ValueError,
        rf"{UP}\.weight in \S+: expected finite E4M3 numbers",
    ),
    "global scale 0": (
        "nvfp4",
        lambda tensors: tensors.update(
            {
                f"{PREFIX}.2.{name}.weight_scale_2": np.float32(0)
                for name in ("gate_proj", "up_proj")
            }
        ),
        ValueError,
        r"\.2\.gate_proj\.weight in .*expected a number > 0 for weights that are not all 0, got 0",
    ),
    "global scale NaN": (
        "nvfp4",
        added(f"{UP}.weight_scale_2", np.float32(np.nan)),
        ValueError,
        rf"{UP}\.weight_scale_2 in \S+: expected a finite number >= 0, not denormal, got nan",
    ),
    "input scale NaN": (
        "nvfp4",
        lambda tensors: tensors.update(
            {
                f"{PREFIX}.{e}.down_proj.input_scale": np.float32(np.nan if e == 1 else 1)
                for e in range(E)
            }
        ),
        ValueError,
        r"\.1\.down_proj\.input_scale in \S+: expected a finite number >= 0, not denormal, got nan",
    ),
    "some input scales": (
        "nvfp4",
        added(f"{PREFIX}.1.down_proj.input_scale", np.float32(1)),
        ValueError,
        "no input_scale of expert 0's down projection",
    ),
    "divisor 0": (
        "nvfp4",
        lambda tensors: tensors.update(
            {f"{UP}.weight_global_scale": 0 * tensors.pop(f"{UP}.weight_scale_2")}
        ),
        ValueError,
        rf"{UP}\.weight_global_scale in \S+: expected a finite number > 0 .* got 0",
    ),
    "divisor that overflows": (
        "nvfp4",
        lambda tensors: tensors.update(
            {f"{UP}.weight_global_scale": 1e-39 * tensors.pop(f"{UP}.weight_scale_2")}
        ),
        ValueError,
        rf"{UP}\.weight_global_scale in \S+: expected a finite number > 0 with a finite",
    ),
    "denormal global scale": (
        "nvfp4",
        added(f"{UP}.weight_scale_2", np.float32(1e-39)),
        ValueError,
        rf"{UP}\.weight_scale_2 in \S+: expected a finite number >= 0, not denormal, got 1\.00",
    ),
    "some biases": (
        "bf16",
        added(f"{UP}.bias", np.zeros(INTER, np.float32)),
        ValueError,
        "no bias of expert 0's gate projection",
    ),
    "misshaped bias": (
        "bf16",
        added(f"{UP}.bias", np.zeros(INTER + 1, np.float32)),
        ValueError,
        rf"{UP}\.bias in \S+: expected shape \[128\], got shape \[129\]",
    ),
    "gate and up stored differently": (
        "nvfp4",
        lambda tensors: (
            dropped(f"{UP}.weight_scale", f"{UP}.weight_scale_2")(tensors),
            added(f"{UP}.weight", np.zeros((INTER, H), np.float32))(tensors),
        ),
        TypeError,
        rf"{UP}\.weight in \S+: expected the dtype of its gate, uint8, got float32",
    ),
}


@pytest.mark.parametrize("from_file", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_wrong_tensor(tmp_path: Path, rng: np.random.Generator, case: str, from_file: bool) -> None:
    form, change, error, text = CASES[case]
    tensors: Tensors = files.per_expert(FORMATS[form](rng, E, H, INTER))
    change(tensors)
    checkpoint: Any = files.write_folder(tmp_path / "m", tensors) if from_file else tensors
    if not from_file:
        text = text.replace(r"model-\d+-of-00002.safetensors", "the pairs given")
        text = re.sub(r"model-$", "the pairs given", text).replace(r"in \S+", "in the pairs given")
    with pytest.raises(error, match=text):
        load_experts(make_config(form), checkpoint, prefix=PREFIX, progress=False)


def stack(rng: np.random.Generator) -> Tensors:
    experts = files.floats(rng, E, H, INTER)
    halves = np.concatenate([experts["gate"].weight, experts["up"].weight], axis=1)
    return {f"{PREFIX}.gate_up_proj": halves, f"{PREFIX}.down_proj": experts["down"].weight}


def test_wrong_stack(rng: np.random.Generator) -> None:
    good = stack(rng)
    name = f"{PREFIX}.gate_up_proj"
    with pytest.raises(
        ValueError, match=rf"{name} in .*: expected 4 experts on the leading axis.*shape \[3, 256"
    ):
        load_experts(make_config("bf16"), good | {name: good[name][:3]}, prefix=PREFIX)
    with pytest.raises(
        ValueError,
        match=rf"{name} in .*: expected shape \[128, 256\], got shape \[128, 255\]; one expert's "
        r"part of \[4, 256, 255\]",
    ):
        load_experts(make_config("bf16"), good | {name: good[name][..., 1:]}, prefix=PREFIX)
    mixed = good | {f"{PREFIX}.down_proj": good[f"{PREFIX}.down_proj"].swapaxes(1, 2)}
    with pytest.raises(ValueError, match=r"down_proj in .*: expected shape \[384, 128\], got"):
        load_experts(make_config("bf16", hidden_size=384), _wide(mixed), prefix=PREFIX)


def _wide(tensors: Tensors) -> Tensors:
    """The same with H 384, where neither tensor is square."""
    gate_up, down = np.zeros((E, 256, 384), np.float32), np.zeros((E, 128, 384), np.float32)
    return dict(zip(tensors, (gate_up, down), strict=True))


def test_stack_that_could_be_either_way(rng: np.random.Generator) -> None:
    """A square gate_up_proj, on its own, does not say how it is arranged."""
    tensors = stack(rng)
    config = make_config("bf16")
    weights = load_experts(config, tensors, prefix=PREFIX, progress=False)
    only = {f"{PREFIX}.gate_up_proj": tensors[f"{PREFIX}.gate_up_proj"]}
    with pytest.raises(ValueError, match=rf"got no how {PREFIX}\.gate_up_proj in .* is arranged"):
        reload_experts(config, weights, only, prefix=PREFIX)


def test_shared_expert_missing(rng: np.random.Generator) -> None:
    tensors = files.per_expert(files.mxfp4(rng, E, H, INTER))
    with pytest.raises(ValueError, match="no weight of the shared expert's gate projection"):
        load_experts(make_config(num_shared_experts=1), tensors, prefix=PREFIX, progress=False)


def test_shared_expert_with_a_bias(rng: np.random.Generator) -> None:
    tensors = files.per_expert(files.mxfp4(rng, E, H, INTER))
    parent = PREFIX.removesuffix("experts")
    for part, each in files.floats(rng, 1, H, INTER).items():
        tensors[f"{parent}shared_expert.{files.PROJ[part]}.weight"] = each.weight[0]
    tensors[f"{parent}shared_expert.up_proj.bias"] = np.zeros(INTER, np.float32)
    with pytest.raises(NotImplementedError, match=r"up_proj\.bias in .*: expected no bias on a"):
        load_experts(make_config(num_shared_experts=1), tensors, prefix=PREFIX, progress=False)


def test_new_field_in_a_reload(rng: np.random.Generator) -> None:
    config = make_config()
    weights = load_experts(config, files.per_expert(files.mxfp4(rng, E, H, INTER)), prefix=PREFIX)
    with pytest.raises(ValueError, match=r"initial\.routed\.w13_bias: expected parameters"):
        reload_experts(config, weights, {f"{UP}.bias": np.zeros(INTER, np.float32)}, prefix=PREFIX)
    with pytest.raises(ValueError, match=rf"no scale for {UP}.weight in the pairs given"):
        half = {f"{UP}.weight": np.zeros((INTER, H // 2), np.uint8)}
        reload_experts(config, weights, half, prefix=PREFIX)


def test_pair_that_is_no_array() -> None:
    with pytest.raises(TypeError, match=rf"{UP}\.weight: expected an array, got list"):
        ExpertLoader(make_config("bf16"), prefix=PREFIX).add({f"{UP}.weight": [1.0]})


@pytest.fixture
def folder(tmp_path: Path, rng: np.random.Generator) -> Path:
    return files.write_folder(tmp_path / "m", files.per_expert(files.floats(rng, E, H, INTER)))


def load(checkpoint: Any, **kwargs: Any) -> Any:
    return load_experts(make_config("bf16"), checkpoint, prefix=PREFIX, progress=False, **kwargs)


def test_mesh_arguments(folder: Path) -> None:
    mesh = Mesh(np.array(jax.devices()[:3]), ("ep",))
    with pytest.raises(ValueError, match="mesh and axis: expected both or neither, got mesh None"):
        load(folder, axis="ep")
    with pytest.raises(ValueError, match=r"axis: expected one of \['ep'\], got 'tp'"):
        load(folder, mesh=mesh, axis="tp")
    with pytest.raises(ValueError, match="num_experts: expected a multiple of the 3 expert-par"):
        load(folder, mesh=mesh, axis="ep")
    with pytest.raises(ValueError, match=r"physical_to_logical: expected ids in \[0, 4\), got"):
        ExpertLoader(make_config(), prefix=PREFIX, physical_to_logical=np.array([0, 1, 2, 4]))


def test_quantization_config_that_does_not_run(folder: Path) -> None:
    awq = dict(quant_method="awq")
    with pytest.raises(NotImplementedError, match=r"quant_method in .*: expected experts"):
        load(folder, quantization_config=awq)
    (folder / "config.json").write_text(json.dumps(dict(quantization_config=awq)))
    with pytest.raises(NotImplementedError, match=r"quant_method in .*config\.json: .* got 'awq'"):
        load(folder)
    excluded = awq | dict(modules_to_not_convert=["mlp.experts"])
    load(folder, quantization_config=excluded)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: expected JSON, got"):
        load(folder)


def test_a_prefix_that_is_no_text_is_named() -> None:
    text = (
        "prefix: expected where the experts' names begin, such as 'model.layers.3.mlp.experts', "
        "got None"
    )
    with pytest.raises(TypeError, match=re.escape(text)):
        load_experts(make_config(), {}, prefix=None)  # pyright: ignore[reportArgumentType]
