"""formats.py: the table of formats."""

import pytest

import jax_megamoe as mm
from jax_megamoe import formats

TABLE = {
    # storage, values an element, bits, scale, block, global scale
    "mxfp4": ("uint8", 2, 4, "ue8m0", (1, 32), False),
    "mxfp8": ("float8_e4m3fn", 1, 8, "ue8m0", (1, 32), False),
    "nvfp4": ("uint8", 2, 4, "e4m3", (1, 16), True),
    "bf16": ("bfloat16", 1, 16, "none", (0, 0), False),
    "fp8_block": ("float8_e4m3fn", 1, 8, "float32", (128, 128), False),
}
RECIPES = {
    # weights, activations, shared, functions, weighs in the combine, rounds gate and up
    "mxfp4": ("mxfp4", "mxfp8", ("mxfp8",), ("swiglu", "situ"), False, True),
    "mxfp8": ("mxfp8", "mxfp8", ("mxfp8",), ("swiglu", "situ"), False, True),
    "nvfp4": ("nvfp4", "nvfp4", ("mxfp8", "bf16"), ("swiglu",), True, True),
    "bf16": ("bf16", "bf16", ("bf16",), ("swiglu",), False, True),
    "fp8_block": ("fp8_block", "fp8_block", (), ("swiglu",), False, False),
}


@pytest.mark.parametrize("name", TABLE)
def test_weights(name: str) -> None:
    form = mm.WEIGHT_FORMATS[name]
    spec = form.weight
    assert (form.name, repr(form)) == (name, f"<WeightFormat {name}>")
    assert (
        spec.storage,
        spec.values_per_element,
        spec.bits,
        spec.scale,
        spec.block,
        spec.has_global_scale,
    ) == TABLE[name]
    assert spec.packs_scales == (spec.scale in ("ue8m0", "e4m3"))


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name: str) -> None:
    recipe = mm.RECIPES[name]
    assert (recipe.name, repr(recipe)) == (name, f"<Recipe {name}>")
    assert (
        recipe.weights.name,
        recipe.activations.name,
        recipe.shared_formats,
        recipe.functions,
        recipe.rounding.weighs_in_combine,
        recipe.rounding.rounds_gate_up,
    ) == RECIPES[name]
    assert formats.recipe_of(recipe.weights, recipe.activations) is recipe


def test_every_weight_format_has_a_default_recipe_and_every_pair_one_recipe() -> None:
    for form in mm.WEIGHT_FORMATS.values():
        assert formats.recipe_of(form) is mm.RECIPES[form.name]
        assert mm.RECIPES[form.name].weights is form
    pairs = {(each.weights.name, each.activations.name) for each in mm.RECIPES.values()}
    assert len(pairs) == len(mm.RECIPES)
    for recipe in mm.RECIPES.values():
        assert mm.ACTIVATION_FORMATS[recipe.activations.name] is recipe.activations
        assert set(recipe.shared_formats) <= set(mm.RECIPES)


def test_a_pair_without_a_recipe_is_refused() -> None:
    text = r"^activation_format of mxfp8 weights: expected one of \['mxfp8'\], got nvfp4$"
    with pytest.raises(ValueError, match=text):
        formats.recipe_of(mm.MXFP8, mm.ACTIVATION_FORMATS["nvfp4"])


def test_names() -> None:
    assert list(mm.WEIGHT_FORMATS) == list(TABLE)
    public = (mm.MXFP4, mm.MXFP8, mm.NVFP4, mm.BF16, mm.FP8_BLOCK)
    assert public == tuple(mm.WEIGHT_FORMATS.values())


def test_the_table_is_read_only() -> None:
    with pytest.raises(TypeError, match="does not support item assignment"):
        mm.WEIGHT_FORMATS["mxfp4"] = mm.BF16  # type: ignore[index]


def test_as_weight_format() -> None:
    assert formats.as_weight_format("nvfp4") is mm.NVFP4
    assert formats.as_weight_format(mm.NVFP4) is mm.NVFP4
    message = r"^target: expected one of \['mxfp4', .*'fp8_block'\], got 'int4'$"
    with pytest.raises(ValueError, match=message):
        formats.as_weight_format("int4", "target")
