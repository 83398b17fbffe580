"""config.py: what a `MoEConfig` and an `Activation` accept, and the text of what they refuse."""

import dataclasses
import math
import pickle
from typing import Any

import pytest
import shapes

import jax_megamoe as mm


@pytest.mark.parametrize("name", shapes.MODELS)
@pytest.mark.parametrize("form", mm.WEIGHT_FORMATS)
def test_real_models_are_accepted(name: str, form: str) -> None:
    cfg = mm.MoEConfig(**shapes.MODELS[name], max_num_tokens=4096, weight_format=form)
    assert cfg.weight_format is mm.WEIGHT_FORMATS[form]
    assert cfg.experts_per_rank(8) * 8 == cfg.num_experts
    assert cfg.shared_size == cfg.num_shared_experts * cfg.intermediate_size


def test_defaults() -> None:
    cfg = mm.MoEConfig(**shapes.SMALL)
    assert cfg.weight_format is mm.MXFP4
    assert cfg.activation == mm.Activation("swiglu")
    assert (cfg.num_shared_experts, cfg.num_logical_experts, cfg.logical_experts) == (0, None, 16)
    assert (cfg.shared_format, cfg.kernel_source, cfg.reserved_sms, cfg.fast_math) == (
        "mxfp8",
        None,
        0,
        True,
    )


@pytest.mark.parametrize(
    ("form", "default"),
    [("mxfp4", "mxfp8"), ("mxfp8", "mxfp8"), ("nvfp4", "mxfp8"), ("bf16", "bf16")],
)
def test_default_precision_of_a_shared_expert(form: str, default: str) -> None:
    assert mm.MoEConfig(**shapes.SMALL, weight_format=form).shared_format == default


def test_fp8_block_fuses_no_shared_expert() -> None:
    assert mm.MoEConfig(**shapes.SMALL, weight_format="fp8_block").shared_format is None


def test_equal_configs_hash_alike_and_are_frozen() -> None:
    one = mm.MoEConfig(**shapes.SMALL, weight_format="bf16", activation="swiglu")
    two = mm.MoEConfig(**shapes.SMALL, weight_format=mm.BF16, activation=mm.Activation("swiglu"))
    assert one == two and hash(one) == hash(two)
    assert one != dataclasses.replace(one, top_k=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.top_k = 3  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.activation.clamp = 3.0  # type: ignore[misc]


def test_positional_sizes_are_refused_only_by_keyword() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        mm.MoEConfig(16, 4, 256, 128, 64)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "expected"), [("swiglu", (None, 1.0, 0.0)), ("situ", (None, 4.0, 25.0))]
)
def test_activation_defaults(name: str, expected: tuple[Any, ...]) -> None:
    act = mm.Activation(name)
    assert (act.clamp, act.alpha, act.beta) == expected


def test_activation_takes_ints_and_an_infinite_clamp_is_none() -> None:
    act = mm.Activation("swiglu", clamp=7, alpha=2, beta=1)
    assert (act.clamp, act.alpha, act.beta) == (7.0, 2.0, 1.0)
    assert all(isinstance(value, float) for value in (act.clamp, act.alpha, act.beta))
    assert mm.Activation("swiglu", clamp=math.inf).clamp is None
    assert mm.Activation("swiglu", clamp=0).clamp == 0.0
    assert mm.Activation("swiglu", alpha=-1.0, beta=-2.0).beta == -2.0
    assert mm.Activation("situ", beta=0).beta == 0.0


@pytest.mark.parametrize(
    ("name", "parameters", "error", "message"),
    [
        ("gelu", {}, ValueError, r"activation: expected one of \['swiglu', 'situ'\], got 'gelu'"),
        (
            "swiglu",
            {"alpha": math.nan},
            ValueError,
            r"activation alpha: expected a finite number, got nan",
        ),
        (
            "situ",
            {"alpha": math.inf},
            ValueError,
            r"activation alpha: expected a finite number, got inf",
        ),
        (
            "swiglu",
            {"beta": -math.inf},
            ValueError,
            r"activation beta: expected a finite number, got -inf",
        ),
        (
            "swiglu",
            {"alpha": "1"},
            TypeError,
            r"activation alpha: expected a number, got '1' \(str\)",
        ),
        (
            "swiglu",
            {"beta": True},
            TypeError,
            r"activation beta: expected a number, got True \(bool\)",
        ),
        (
            "swiglu",
            {"clamp": -0.5},
            ValueError,
            r"activation clamp: expected a number >= 0 or None, got -0.5",
        ),
        (
            "swiglu",
            {"clamp": math.nan},
            ValueError,
            r"activation clamp: expected a number >= 0 or None, got nan",
        ),
        (
            "swiglu",
            {"clamp": "7"},
            TypeError,
            r"activation clamp: expected a number or None, got '7'",
        ),
        (
            "situ",
            {"clamp": 7.0},
            ValueError,
            r"activation clamp: expected None for situ, which has no clamp, got 7.0",
        ),
        (
            "situ",
            {"alpha": 0},
            ValueError,
            r"activation alpha: expected a number > 0 for situ, got 0.0",
        ),
        (
            "situ",
            {"beta": -1},
            ValueError,
            r"activation beta: expected a number >= 0 for situ, got -1.0",
        ),
    ],
)
def test_refused_activations(
    name: str, parameters: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        mm.Activation(name, **parameters)


MULTIPLE = "expected a multiple of"

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"hidden_size": 255}, ValueError, rf"hidden_size: {MULTIPLE} 128, got 255"),
    ({"hidden_size": 257}, ValueError, rf"hidden_size: {MULTIPLE} 128, got 257"),
    ({"intermediate_size": 192}, ValueError, rf"intermediate_size: {MULTIPLE} 128, got 192"),
    ({"intermediate_size": 2880}, ValueError, rf"intermediate_size: {MULTIPLE} 128, got 2880"),
    ({"hidden_size": 0}, ValueError, r"hidden_size: expected an integer >= 1, got 0"),
    ({"num_experts": -1}, ValueError, r"num_experts: expected an integer >= 1, got -1"),
    ({"num_experts": 1.5}, TypeError, r"num_experts: expected an integer, got 1.5 \(float\)"),
    ({"top_k": 0}, ValueError, r"top_k: expected an integer >= 1, got 0"),
    ({"top_k": True}, TypeError, r"top_k: expected an integer, got True \(bool\)"),
    ({"top_k": 17}, ValueError, r"top_k: expected at most num_logical_experts = 16, got 17"),
    (
        {"top_k": 4, "num_logical_experts": 3},
        ValueError,
        r"top_k: expected at most num_logical_experts = 3, got 4",
    ),
    (
        {"num_logical_experts": 17},
        ValueError,
        r"num_logical_experts: expected at most num_experts = 16, got 17; every expert needs a "
        r"physical slot",
    ),
    (
        {"num_logical_experts": 0},
        ValueError,
        r"num_logical_experts: expected an integer >= 1, got 0",
    ),
    ({"max_num_tokens": 0}, ValueError, r"max_num_tokens: expected an integer >= 1, got 0"),
    ({"num_shared_experts": -1}, ValueError, r"num_shared_experts: expected an integer >= 0"),
    ({"reserved_sms": 3}, ValueError, rf"reserved_sms: {MULTIPLE} 2, got 3; the kernel runs pairs"),
    (
        {"weight_format": "fp16"},
        ValueError,
        r"weight_format: expected one of \['mxfp4', 'mxfp8', 'nvfp4', 'bf16', 'fp8_block', "
        r"'mxfp4_block', 'nvfp4_block', 'mxfp4_bf16'\], got 'fp16'",
    ),
    ({"activation": 3}, TypeError, r"activation: expected an Activation or its name, got 3"),
    ({"activation": "relu"}, ValueError, r"activation: expected one of .*, got 'relu'"),
    (
        {"weight_format": "nvfp4", "activation": "situ"},
        ValueError,
        r"activation of nvfp4: expected one of \['swiglu'\], got 'situ'",
    ),
    (
        {"weight_format": "bf16", "activation": "situ"},
        ValueError,
        r"activation of bf16: expected one of \['swiglu'\], got 'situ'",
    ),
    (
        {"weight_format": "fp8_block", "activation": "situ"},
        ValueError,
        r"activation of fp8_block: expected one of \['swiglu'\], got 'situ'",
    ),
    (
        {"weight_format": "mxfp4", "shared_format": "bf16"},
        ValueError,
        r"shared_format of mxfp4: expected one of \['mxfp8'\], got 'bf16'",
    ),
    (
        {"weight_format": "fp8_block", "shared_format": "mxfp8"},
        ValueError,
        r"shared_format of fp8_block: expected one of \[\], got 'mxfp8'",
    ),
    ({"kernel_source": 1}, TypeError, "kernel_source: expected the name of a source, or None, got"),
    ({"fast_math": 1}, TypeError, r"fast_math: expected a bool, got 1"),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED)
def test_refused_configs(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        mm.MoEConfig(**(shapes.SMALL | changes))


def test_experts_that_do_not_divide_by_the_ranks() -> None:
    cfg = mm.MoEConfig(**shapes.SMALL)
    assert [cfg.experts_per_rank(ranks) for ranks in (1, 2, 16)] == [16, 8, 1]
    message = (
        r"^num_experts: expected a multiple of the 3 expert-parallel ranks, got 16; experts are "
        r"placed whole and evenly: add replicas or change the ranks$"
    )
    with pytest.raises(ValueError, match=message):
        cfg.experts_per_rank(3)
    with pytest.raises(ValueError, match=r"^num_ranks: expected an integer >= 1, got 0$"):
        cfg.experts_per_rank(0)


def test_a_recipe_is_a_pair_of_formats() -> None:
    named = mm.MoEConfig(**shapes.SMALL, weight_format="nvfp4")
    pair = mm.MoEConfig(
        **shapes.SMALL, weight_format=mm.NVFP4, activation_format=mm.ACTIVATION_FORMATS["nvfp4"]
    )
    text = mm.MoEConfig(**shapes.SMALL, weight_format="nvfp4", activation_format="nvfp4")
    assert named == pair == text and hash(named) == hash(pair)
    assert named.recipe is mm.RECIPES["nvfp4"] and named.activation_format is None


def test_the_default_precision_of_a_shared_expert_follows_the_format() -> None:
    """In `dataclasses.replace`, which hands on the one that the config chose; another stays."""
    first = mm.MoEConfig(**shapes.SMALL, weight_format="mxfp8", num_shared_experts=1)
    changed = dataclasses.replace(first, weight_format="bf16")
    assert (first.shared_format, changed.shared_format) == ("mxfp8", "bf16")
    again = dataclasses.replace(pickle.loads(pickle.dumps(changed)), weight_format="mxfp8")
    assert again == first and hash(again) == hash(first)
    assert dataclasses.replace(first, weight_format="fp8_block").shared_format is None
    assert dataclasses.replace(changed, weight_format="nvfp4").shared_format == "mxfp8"
    asked = dataclasses.replace(changed, shared_format="bf16")
    assert asked == changed
    assert dataclasses.replace(asked, weight_format="nvfp4").shared_format == "bf16"
    with pytest.raises(ValueError, match=r"^shared_format of mxfp8: expected one of"):
        dataclasses.replace(asked, weight_format="mxfp8")


@pytest.mark.parametrize("name", mm.RECIPES)
def test_a_config_is_replaced_with_any_recipe(name: str) -> None:
    """The default activation format does not stay behind."""
    first = mm.MoEConfig(**shapes.SMALL, weight_format="mxfp4")
    recipe = mm.RECIPES[name]
    changed = dataclasses.replace(first, weight_format=name)
    pair = dict(weight_format=recipe.weights, activation_format=recipe.activations)
    assert changed == dataclasses.replace(first, **pair)
    assert changed.recipe is recipe
    assert dataclasses.replace(changed, top_k=2).recipe is recipe


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        (
            dict(weight_format="mxfp8", activation_format="nvfp4"),
            ValueError,
            r"activation_format of mxfp8 weights: expected one of \['mxfp8'\], got nvfp4",
        ),
        (
            dict(activation_format="int8"),
            ValueError,
            r"activation_format: expected one of \['mxfp8', .*\], got 'int8'",
        ),
        (
            dict(weight_format=8),
            TypeError,
            "weight_format: expected a format or the name of one, got int",
        ),
        (
            dict(activation_format=mm.MXFP8),
            TypeError,
            "activation_format: expected a format or the name of one, got WeightFormat",
        ),
    ],
)
def test_formats_that_do_not_meet(fields: dict[str, Any], error: type, text: str) -> None:
    with pytest.raises(error, match=f"^{text}$"):
        mm.MoEConfig(**shapes.SMALL, **fields)


def test_a_config_is_a_spec() -> None:
    """What loading needs of it, with the same checks; a spec says nothing of calls."""
    sizes = dict(num_experts=6, hidden_size=256, intermediate_size=128, num_logical_experts=4)
    spec = mm.ExpertSpec(**sizes, weight_format="mxfp8", num_shared_experts=2)
    config = mm.MoEConfig(
        **sizes, weight_format="mxfp8", num_shared_experts=2, top_k=4, max_num_tokens=8
    )
    assert isinstance(config, mm.ExpertSpec) and spec != config
    for name in ("logical_experts", "shared_size", "shared_format", "recipe", "weight_format"):
        assert getattr(spec, name) == getattr(config, name)
    assert spec.experts_per_rank(3) == 2
    assert hash(spec) == hash(dataclasses.replace(spec))
    with pytest.raises(ValueError, match="hidden_size: expected a multiple of 128, got 250"):
        mm.ExpertSpec(**sizes | dict(hidden_size=250))
    with pytest.raises(ValueError, match="num_logical_experts: expected at most num_experts = 6"):
        mm.ExpertSpec(**sizes | dict(num_logical_experts=7))
    with pytest.raises(TypeError, match="weight_format: expected a format or the name of one"):
        mm.ExpertSpec(**sizes, weight_format=3)
    with pytest.raises(TypeError, match="top_k"):
        mm.ExpertSpec(**sizes, top_k=4)
