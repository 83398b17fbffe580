"""families/: the registry is all that knows a family, and a new one is a module and a line."""

import ast
from pathlib import Path

import pytest
import toy_sm90_bf16
from problems import B200, H100, config

import jax_megamoe as mm
from jax_megamoe.cli import sources
from jax_megamoe.launch.runnable import check_supported, supported
from jax_megamoe.plan import families, plan_mega_moe
from jax_megamoe.plan.choice import Absent, choose
from jax_megamoe.plan.refusal import Refusal
from jax_megamoe.weights.params import default_layout

PACKAGE = Path(mm.__file__).parent
SOURCES = {"sgl", "vllm", "flashinfer", "humming", "sm90", "sm100"}


def ids(family):
    return family.name


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> toy_sm90_bf16.ToyFamily:
    """The registry with one line more."""
    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, toy_sm90_bf16.FAMILY))
    return toy_sm90_bf16.FAMILY


@pytest.mark.parametrize("family", families.FAMILIES, ids=ids)
def test_facts_of_every_family(family):
    source, architecture, _ = family.name.split("_", 2)
    assert (source, architecture) == (family.source, family.architecture)
    assert set(family.recipes) <= set(mm.RECIPES)
    for recipe in map(mm.RECIPES.__getitem__, family.recipes):
        able = [
            name
            for name in recipe.functions
            if family.unsupported(config(weight_format=recipe.name, activation=name)) is None
        ]
        assert able, recipe.name


def test_every_recipe_says_what_its_families_have():
    for recipe in mm.RECIPES.values():
        if not families.of_recipe(recipe):
            # No fused kernel: the grouped products alone.
            assert (recipe.name, recipe.shared_formats) == ("mxfp4_bf16", ())
            continue
        for shared in recipe.shared_formats:
            asked = config(weight_format=recipe.name, num_shared_experts=1, shared_format=shared)
            assert any(f.unsupported(asked) is None for f in families.of_recipe(recipe)), recipe
        for name in recipe.functions:
            asked = config(weight_format=recipe.name, activation=name)
            assert any(f.unsupported(asked) is None for f in families.of_recipe(recipe)), recipe


def test_a_toy_family_is_planned(toy):
    bf16 = config(weight_format="bf16", max_num_tokens=256)
    plan = plan_mega_moe(bf16, H100, 64, 1)
    assert [step.kernel.source for step in plan.launches] == ["toy", "toy"]
    assert plan.buffer.num_bytes == 0
    assert plan.scratch == (("hidden", (64 * 8, 2048), "bfloat16"),)
    # On Blackwell the family that was there before it is still preferred.
    assert plan_mega_moe(bf16, B200, 64, 1).steps[-1].kernel.source == "sgl"
    assert default_layout(bf16) == "interleave8"


def test_a_toy_family_is_listed(toy):
    assert families.sources() == ("sgl", "vllm", "flashinfer", "toy")
    assert families.implementations() == ("deep_gemm", "toy_gemms")
    bf16 = config(weight_format="bf16", max_num_tokens=256)
    assert check_supported(bf16, H100) == "toy"
    assert sources.able_sources(bf16, H100) == ("toy",)
    assert {cell.able for cell in sources.cells() if cell.weight_format == "bf16"} >= {
        ("sgl", "vllm")
    }
    assert choose(bf16, H100, 1, implementation="toy_gemms") is toy


def test_a_toy_family_is_refused_with_its_reasons(toy):
    large = config(weight_format="bf16", kernel_source="toy", max_num_tokens=1024)
    assert supported(large, H100) == Refusal("num_tokens: expected at most 512, got 1024")
    with pytest.raises(ValueError, match=r"^num_tokens: expected at most 512, got 1024$"):
        check_supported(large, H100)
    shared = config(weight_format="bf16", kernel_source="toy", num_shared_experts=1)
    with pytest.raises(NotImplementedError, match="num_shared_experts: expected 0 for the toy"):
        check_supported(shared, H100)
    with pytest.raises(NotImplementedError, match="device: expected a Hopper for the toy, got 10"):
        check_supported(large, B200)
    mxfp8 = config(weight_format="mxfp8", kernel_source="toy")
    text = "source: expected sgl or vllm for mxfp8, got toy"
    with pytest.raises(NotImplementedError, match=text):
        check_supported(mxfp8, H100)
    small = config(weight_format="bf16", max_num_tokens=256)
    absent = choose(small, H100, 1, has_source=lambda name: name != "toy")
    assert absent == Absent(toy)


def test_without_the_toy_its_name_is_unknown():
    text = r"^kernel_source: expected one of \['sgl', 'vllm', 'flashinfer'\], got 'toy'$"
    with pytest.raises(ValueError, match=text):
        check_supported(config(weight_format="bf16", kernel_source="toy"), H100)


def test_an_implementation_without_a_family_of_the_recipe():
    refused = choose(config(), B200, 1, implementation="toy_gemms")
    want = "implementation: expected deep_gemm for mxfp4, got toy_gemms"
    assert refused == Refusal(want, is_missing=True)


def named_in(path: Path, names: set[str]) -> list[str]:
    """Comparisons with one of `names` in a file."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            sides = [node.value]
        else:
            continue
        constants = [
            each.value
            for side in sides
            for each in ast.walk(side)
            if isinstance(each, ast.Constant) and isinstance(each.value, str)
        ]
        found += [f"{path.name}:{node.lineno} {name}" for name in constants if name in names]
    return found


def outside_families() -> list[Path]:
    """Every file but those that know a family each; plan/grouped knows Humming's products."""
    own = [PACKAGE / "plan" / name for name in ("families", "grouped")]
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent not in own]


def test_no_source_or_architecture_is_known_by_name():
    assert [name for path in outside_families() for name in named_in(path, SOURCES)] == []


def test_no_format_is_known_by_name_where_kernels_are_planned_chosen_and_launched():
    """Numerics, weights and loading tell formats apart: how they are stored is what those do."""
    rooms = ("plan", "launch", "op", "compile", "runtime", "symmetric_memory")
    files = [
        path
        for path in outside_families()
        if path.parent == PACKAGE or path.relative_to(PACKAGE).parts[0] in rooms
    ]
    files += [PACKAGE / "cli" / name for name in ("doctor.py", "sources.py", "ahead.py", "main.py")]
    assert len(files) > 40
    assert [name for path in files for name in named_in(path, set(mm.WEIGHT_FORMATS))] == []


def test_a_comparison_with_a_name_would_be_found(tmp_path):
    path = tmp_path / "one.py"
    path.write_text('if source == "sgl" or form in ("nvfp4", "x"):\n    pass\n')
    assert named_in(path, {"sgl", "nvfp4"}) == ["one.py:1 sgl", "one.py:1 nvfp4"]
