"""Each dialect of checkpoint, written to files, loaded and compared with its plain twin."""

from pathlib import Path
from typing import Any

import checkpoint_files as files
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import PREFIX, W123, Experts, assert_same

from jax_megamoe.config import MoEConfig
from jax_megamoe.weights.checkpoint.convert import convert_checkpoint
from jax_megamoe.weights.checkpoint.converted import load_converted
from jax_megamoe.weights.checkpoint.load import load_experts, reload_experts
from jax_megamoe.weights.experts import (
    dequantize_biases,
    dequantize_experts,
    dequantize_shared,
    quantize_experts,
)
from jax_megamoe.weights.params import ExpertWeights

E, H, INTER = 4, 256, 128
SHARED = PREFIX.replace("experts", "shared_experts")


def make_config(form: str, **changes: Any) -> MoEConfig:
    return files.make_config(form, E, H, INTER, **changes)


def load(
    tmp_path: Path,
    config: MoEConfig,
    tensors: dict[str, np.ndarray],
    model: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Loaded from a folder with this config.json."""
    folder = files.write_folder(tmp_path / "model", tensors, config=model)
    return load_experts(config, folder, prefix=PREFIX, progress=False, **kwargs)


def assert_values(config: MoEConfig, weights: ExpertWeights, experts: Experts) -> None:
    """The loaded matrices are the stored ones, bit for bit."""
    for part, got in zip(files.PROJ, dequantize_experts(config, weights), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(experts[part].values))


def assert_close(
    config: MoEConfig, weights: ExpertWeights, experts: Experts, step: float, gain: float = 0.01
) -> None:
    """Within `step` of the largest value in each row, and with gain 1: the slope of exact values
    against loaded ones, which is 1 where each loaded value is the mean of what it stands for."""
    products, squares = 0.0, 0.0
    for part, got in zip(files.PROJ, dequantize_experts(config, weights), strict=True):
        exact, loaded = np.asarray(experts[part].values), np.asarray(got)
        largest = np.abs(exact).max(axis=-1, keepdims=True)
        assert (np.abs(loaded - exact) <= step * largest).all()
        products += float((exact * loaded).sum())
        squares += float((loaded * loaded).sum())
    assert products / squares == pytest.approx(1, abs=gain)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("form", ["bf16", "mxfp4", "mxfp8", "nvfp4", "fp8_block"])
def test_floats(tmp_path: Path, rng: np.random.Generator, form: str, dtype: Any) -> None:
    config = make_config(form)
    experts = files.floats(rng, E, H, INTER, dtype)
    weights = load(tmp_path, config, files.per_expert(experts))
    assert_same(weights, quantize_experts(config, *(experts[part].weight for part in files.PROJ)))


def test_deepseek_v3(tmp_path: Path, rng: np.random.Generator) -> None:
    experts = files.fp8_block(rng, E, H, INTER)
    tensors = files.per_expert(experts, scale="weight_scale_inv")
    config = make_config("fp8_block")
    assert_values(config, load(tmp_path, config, tensors), experts)
    for form, step in (("mxfp8", 2**-4), ("mxfp4", 2**-2), ("nvfp4", 2**-2)):
        config = make_config(form)
        assert_close(config, load(tmp_path, config, tensors), experts, step)


@pytest.mark.parametrize("block", [(128, 128), (32, 32), (1, 128)])
def test_scales_that_are_powers_of_two_are_kept(
    tmp_path: Path, rng: np.random.Generator, block: tuple[int, int]
) -> None:
    """One scale in three dtypes gives the same bits, and E8M0 is not read as a number."""
    experts = files.fp8_block(rng, E, H, INTER, block=block, powers=True)
    config = make_config("mxfp8")
    loaded: list[ExpertWeights] = []
    for dtype in (np.float32, ml_dtypes.float8_e8m0fnu, np.uint8):
        stored = {
            part: each._replace(scale=_scale_as(each.scale, dtype))
            for part, each in experts.items()
        }
        loaded.append(load(tmp_path, config, files.per_expert(stored, scale="weight_scale_inv")))
    assert_values(config, loaded[0], experts)
    assert_same(loaded[0], loaded[1])
    assert_same(loaded[0], loaded[2])


def _scale_as(scale: np.ndarray | None, dtype: Any) -> np.ndarray:
    assert scale is not None
    if dtype == np.float32:
        return scale
    exponents = (np.log2(scale) + 127).astype(np.uint8)
    return exponents.view(dtype)


def test_mxfp8(tmp_path: Path, rng: np.random.Generator) -> None:
    experts = files.mxfp8(rng, E, H, INTER)
    config = make_config("mxfp8")
    assert_values(config, load(tmp_path, config, files.per_expert(experts)), experts)
    for form, step in (("mxfp4", 2**-2), ("nvfp4", 2**-2), ("fp8_block", 2**-4)):
        config = make_config(form)
        assert_close(config, load(tmp_path, config, files.per_expert(experts)), experts, step)


@pytest.mark.parametrize("dialect", ["deepseek_v4", "kimi_k3", "gpt_oss", "stacked"])
def test_mxfp4(tmp_path: Path, rng: np.random.Generator, dialect: str) -> None:
    experts = files.mxfp4(rng, E, H, INTER)
    if dialect == "deepseek_v4":
        stored = {
            part: each._replace(
                weight=each.weight.view(np.int8), scale=each.scale.view(ml_dtypes.float8_e8m0fnu)
            )
            for part, each in experts.items()
        }
        tensors = files.per_expert(stored, names=W123, scale="scale")
    elif dialect == "kimi_k3":
        tensors = files.per_expert(experts, names=W123, weight="weight_packed")
    elif dialect == "gpt_oss":
        tensors = files.gpt_oss(experts, _biases(rng))
    else:
        tensors = {
            f"{PREFIX}.{files.PROJ[part]}.{kind}": getattr(each, kind)
            for part, each in experts.items()
            for kind in ("weight", "scale")
        }
    config = make_config("mxfp4")
    weights = load(tmp_path, config, tensors)
    assert_values(config, weights, experts)
    assert (weights.routed.w13_bias is not None) == (dialect == "gpt_oss")
    # Under 6 / 448 of their block's largest, E2M1's few values round alike: 4 to 3.857, -3.6 %.
    for form, step, gain in (
        ("mxfp8", 0.0, 0.0),
        ("nvfp4", 2**-2, 0.01),
        ("fp8_block", 2**-4, 0.02),
        ("bf16", 0.0, 0.0),
    ):
        config = make_config(form)
        assert_close(config, load(tmp_path, config, tensors), experts, step, gain)


def _biases(rng: np.random.Generator) -> dict[str, np.ndarray]:
    sizes = dict(gate=INTER, up=INTER, down=H)
    return {
        part: rng.standard_normal((E, size)).astype(jnp.bfloat16) for part, size in sizes.items()
    }


def test_gpt_oss_biases(tmp_path: Path, rng: np.random.Generator) -> None:
    """De-interleaved: gate's are not up's; equal to the twin with one tensor an expert."""
    biases, experts = _biases(rng), files.mxfp4(rng, E, H, INTER)
    config = make_config("mxfp4")
    weights = load(tmp_path, config, files.gpt_oss(experts, biases))
    for part, got in dequantize_biases(weights).items():
        expected = biases[part.removesuffix("_bias")].astype(np.float32)
        np.testing.assert_array_equal(np.asarray(got), expected)
    twin = files.per_expert(experts) | {
        f"{PREFIX}.{expert}.{files.PROJ[part]}.bias": biases[part][expert]
        for part in biases
        for expert in range(E)
    }
    assert_same(weights, load(tmp_path, config, twin))


def stacks(
    experts: Experts, *, order: str, biases: dict[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Transposed, [E, H, 2I] and [E, I, H], gate and up columns as halves or in turns."""
    gate, up, down = (experts[part].weight for part in files.PROJ)
    both = np.concatenate([gate, up], axis=1) if order == "halves" else files.alternating(gate, up)
    tensors = {
        f"{PREFIX}.gate_up_proj": both.swapaxes(1, 2),
        f"{PREFIX}.down_proj": down.swapaxes(1, 2),
    }
    if biases is not None:
        tensors[f"{PREFIX}.gate_up_proj_bias"] = files.alternating(biases["gate"], biases["up"])
        tensors[f"{PREFIX}.down_proj_bias"] = biases["down"]
    return tensors


@pytest.mark.parametrize(
    "model, order",
    [
        (dict(model_type="gpt_oss"), "alternating"),
        (dict(model_type="qwen3_vl_moe_text"), "halves"),
        (dict(model_type="qwen3_vl_moe", text_config=dict(num_experts=4)), "halves"),
        (dict(model_type="other", text_config=dict(model_type="llama4_text")), "halves"),
    ],
)
def test_order_of_the_models_config(
    tmp_path: Path, rng: np.random.Generator, model: dict[str, Any], order: str
) -> None:
    """Of a folder, of one file in it, of a reload; an explicit order goes before it."""
    experts, config = files.floats(rng, E, H, INTER), make_config("bf16")
    tensors = stacks(experts, order=order)
    weights = load(tmp_path, config, tensors, model)
    assert_values(config, weights, experts)
    folder = tmp_path / "model"
    file = files.write_file(folder / "one.safetensors", tensors)
    options = dict(prefix=PREFIX, progress=False)
    assert_same(load_experts(config, file, **options), weights)
    assert_same(reload_experts(config, weights, file, **options), weights)
    [layer] = convert_checkpoint(file, tmp_path / "made", **options)
    assert_same(load_converted(layer.path, layer.spec), weights)
    other = "halves" if order == "alternating" else "alternating"
    swapped = load_experts(config, folder, **options, gate_up_order=other)
    assert not np.array_equal(dequantize_experts(config, swapped)[0], experts["gate"].values)


def test_order_shown_by_the_biases_of_gpt_oss(tmp_path: Path, rng: np.random.Generator) -> None:
    experts, biases = files.floats(rng, E, H, INTER), _biases(rng)
    config = make_config("bf16")
    tensors = stacks(experts, order="alternating", biases=biases)
    for pairs in (tensors, dict(reversed(list(tensors.items())))):
        weights = load_experts(config, pairs, prefix=PREFIX, progress=False)
        assert_values(config, weights, experts)
        for part, got in dequantize_biases(weights).items():
            expected = biases[part.removesuffix("_bias")].astype(np.float32)
            np.testing.assert_array_equal(np.asarray(got), expected)


@pytest.mark.parametrize("model", [None, dict(hidden_size=256), dict(model_type="unknown")])
def test_order_that_nothing_says_is_refused(
    tmp_path: Path, rng: np.random.Generator, model: dict[str, Any] | None
) -> None:
    experts, config = files.floats(rng, E, H, INTER), make_config("bf16")
    for order in ("halves", "alternating"):
        tensors = stacks(experts, order=order)
        text = (
            r"gate_up_order of model\.layers\.3\.mlp\.experts\.gate_up_proj in .*: expected "
            r"'halves' \(.*Qwen3-VL-MoE.*\) or 'alternating' \(.*GPT-OSS\), .* got None; "
            "pass it, or put the model's config.json beside"
        )
        with pytest.raises(ValueError, match=text):
            load(tmp_path, config, tensors, model)
        with pytest.raises(ValueError, match=text):
            load_experts(config, tensors, prefix=PREFIX, progress=False)
        assert_values(config, load(tmp_path, config, tensors, gate_up_order=order), experts)
    with pytest.raises(ValueError, match=r"gate_up_order: expected one of \[.*\], got 'half'"):
        load(tmp_path, config, tensors, gate_up_order="half")


@pytest.mark.parametrize("hidden, inter", [(256, 128), (128, 256), (256, 256), (512, 256)])
def test_qwen_stacked(tmp_path: Path, rng: np.random.Generator, hidden: int, inter: int) -> None:
    """[E, 2I, H] and [E, H, I], at sizes where one of the two is square too, in any order."""
    experts = files.floats(rng, E, hidden, inter)
    halves = np.concatenate([experts["gate"].weight, experts["up"].weight], axis=1)
    tensors = {f"{PREFIX}.gate_up_proj": halves, f"{PREFIX}.down_proj": experts["down"].weight}
    transposed = {name: array.swapaxes(1, 2) for name, array in reversed(list(tensors.items()))}
    config = make_config("bf16", hidden_size=hidden, intermediate_size=inter)
    assert_values(config, load(tmp_path, config, tensors), experts)
    assert_values(config, load(tmp_path, config, transposed, gate_up_order="halves"), experts)
    pairs = reversed(list(tensors.items()))
    assert_values(config, load_experts(config, pairs, prefix=PREFIX, progress=False), experts)


def test_nvfp4(tmp_path: Path, rng: np.random.Generator) -> None:
    """ModelOpt's multipliers and compressed-tensors' divisors are the same parameters."""
    experts = files.nvfp4(rng, E, H, INTER)
    inputs = np.exp2(rng.integers(-8, 0, E)).astype(np.float32)
    config = make_config("nvfp4")
    modelopt = files.per_expert(experts) | _input_scales("input_scale", inputs)
    weights = load(tmp_path, config, modelopt)
    assert_values(config, weights, experts)
    np.testing.assert_array_equal(np.asarray(weights.routed.w2_input_scale), inputs)
    divisors = {
        part: each._replace(global_scale=1 / each.global_scale[:, None])
        for part, each in experts.items()
    }
    compressed = files.per_expert(
        divisors, weight="weight_packed", global_scale="weight_global_scale"
    )
    compressed |= _input_scales("input_global_scale", 1 / inputs[:, None])
    assert_same(weights, load(tmp_path, config, compressed))
    sgl = make_config("nvfp4", kernel_source="sgl")
    assert_values(sgl, load(tmp_path, sgl, modelopt), experts)


def _input_scales(suffix: str, values: np.ndarray) -> dict[str, np.ndarray]:
    return {
        f"{PREFIX}.{expert}.{name}.{suffix}": values[expert]
        for expert in range(E)
        for name in files.PROJ.values()
    }


def test_nvfp4_without_input_scales(tmp_path: Path, rng: np.random.Generator) -> None:
    config = make_config("nvfp4")
    weights = load(tmp_path, config, files.per_expert(files.nvfp4(rng, E, H, INTER)))
    assert not np.asarray(weights.routed.w2_input_scale).any()


@pytest.mark.parametrize("names", [files.PROJ, W123])
@pytest.mark.parametrize("stem", ["shared_expert", "shared_experts"])
def test_shared_expert(
    tmp_path: Path, rng: np.random.Generator, stem: str, names: dict[str, str]
) -> None:
    """DeepSeek-V4: MXFP4 experts, a shared expert in FP8 under E8M0 scales of 128x128."""
    routed = files.mxfp4(rng, E, H, INTER)
    shared = files.fp8_block(rng, 1, H, INTER * 2, powers=True)
    parent = PREFIX.removesuffix("experts")
    tensors = files.per_expert(routed, names=names, scale="scale")
    for part, each in shared.items():
        where = f"{parent}{stem}.{names[part]}"
        tensors[f"{where}.weight"] = each.weight[0]
        tensors[f"{where}.scale"] = _scale_as(each.scale, ml_dtypes.float8_e8m0fnu)[0]
    tensors[f"{parent}{stem}_gate.weight"] = np.zeros((1, H), np.float32)
    config = make_config("mxfp4", num_shared_experts=2)
    weights = load(tmp_path, config, tensors)
    assert_values(config, weights, routed)
    for part, got in zip(files.PROJ, dequantize_shared(config, weights), strict=True):
        np.testing.assert_array_equal(np.asarray(got), shared[part].values[0])
    assert load(tmp_path, make_config("mxfp4"), tensors).shared is None


def test_shared_expert_in_bf16_beside_nvfp4(tmp_path: Path, rng: np.random.Generator) -> None:
    routed, shared = files.nvfp4(rng, E, H, INTER), files.floats(rng, 1, H, INTER)
    tensors = files.per_expert(routed) | {
        f"{SHARED}.{files.PROJ[part]}.weight": each.weight[0] for part, each in shared.items()
    }
    config = make_config("nvfp4", num_shared_experts=1, shared_format="bf16")
    weights = load(tmp_path, config, tensors)
    for part, got in zip(files.PROJ, dequantize_shared(config, weights), strict=True):
        np.testing.assert_array_equal(np.asarray(got), shared[part].values[0])


@pytest.mark.parametrize("source", ["floats", "fp8_block", "mxfp4"])
def test_padding(tmp_path: Path, rng: np.random.Generator, source: str) -> None:
    """H 192 and I 192 in a layer of 256: the rest is zeros, the values exact."""
    experts = getattr(files, source)(rng, E, 192, 192)
    config = make_config(
        {"floats": "bf16", "fp8_block": "fp8_block", "mxfp4": "mxfp4"}[source],
        intermediate_size=256,
    )
    weights = load(tmp_path, config, files.per_expert(experts), stored_sizes=(192, 192))
    for part, got in zip(files.PROJ, dequantize_experts(config, weights), strict=True):
        whole = np.zeros((E, 256, 256), np.float32)
        whole[:, :192, :192] = experts[part].values
        np.testing.assert_array_equal(np.asarray(got), whole)


def test_zero_blocks_stay_zero(tmp_path: Path, rng: np.random.Generator) -> None:
    """0 / 0 nowhere: a block of zeros under the scale 0, and one with a single value."""
    experts = files.fp8_block(rng, E, H, INTER)
    for part, each in experts.items():
        each.weight[0] = 0
        each.weight[0, 5, 7] = 1
        each.scale[0, 0, 0] = 2.0
        each.scale[0, ..., 1:] = 0
        each.values[0] = 0
        each.values[0, 5, 7] = 2.0
    tensors = files.per_expert(experts, scale="weight_scale_inv")
    for form in ("mxfp8", "mxfp4", "fp8_block", "nvfp4"):
        config = make_config(form)
        for part, got in zip(
            files.PROJ, dequantize_experts(config, load(tmp_path, config, tensors)), strict=True
        ):
            assert np.isfinite(np.asarray(got)).all()
            expected = np.asarray(experts[part].values)[0]
            np.testing.assert_allclose(np.asarray(got)[0], expected, rtol=2**-8, atol=0)


def test_gate_is_gate(tmp_path: Path) -> None:
    """Gate rows of 1, up rows of 2, down rows of 4, in three arrangements."""
    rows = dict(gate=1.0, up=2.0, down=4.0)
    shapes = {part: files.sizes(part, E, H, INTER) for part in rows}
    gate, up, down = (np.full(shapes[part], value, np.float32) for part, value in rows.items())
    experts = dict(gate=gate, up=up, down=down)
    arrangements: list[dict[str, np.ndarray]] = [
        {f"{PREFIX}.{W123[part]}.weight": array for part, array in experts.items()},
        {f"{PREFIX}.{e}.gate_up_proj.weight": np.concatenate([gate[e], up[e]]) for e in range(E)}
        | {f"{PREFIX}.{e}.down_proj.weight": down[e] for e in range(E)},
        {
            f"{PREFIX}.gate_up_proj": files.alternating(gate, up).swapaxes(1, 2),
            f"{PREFIX}.down_proj": down.swapaxes(1, 2),
        },
    ]
    for form in ("mxfp4", "fp8_block"):
        config = make_config(form)
        for tensors, order in zip(arrangements, (None, None, "alternating"), strict=True):
            weights = load(tmp_path, config, tensors, gate_up_order=order)
            for value, got in zip(rows.values(), dequantize_experts(config, weights), strict=True):
                np.testing.assert_allclose(np.asarray(got), value, rtol=1e-6)


def test_an_exponent_is_not_a_number(tmp_path: Path) -> None:
    """Byte 120 is 2^-7; a float32 scale between powers of two loses nothing to its rounding up."""
    weight = {part: np.ones(files.sizes(part, E, H, INTER), jnp.float8_e4m3fn) for part in W123}
    for scale, value in (
        (np.uint8(120), 2**-7),
        (np.full(1, 120, np.uint8).view(ml_dtypes.float8_e8m0fnu)[0], 2**-7),
        (np.float32(1.5 * 2**-7), 1.5 * 2**-7),
    ):
        tensors = {
            f"{PREFIX}.{e}.{files.PROJ[part]}.{suffix}": array
            for e in range(E)
            for part in weight
            for suffix, array in (
                ("weight", weight[part][e]),
                ("scale", np.full([size // 32 for size in weight[part].shape[1:]], scale)),
            )
        }
        config = make_config("mxfp8")
        for got in dequantize_experts(config, load(tmp_path, config, tensors)):
            assert (np.asarray(got) == value).all()
