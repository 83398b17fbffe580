"""The package's shape: imports go one way only, names and sizes, and nothing happens at import."""

import ast
import itertools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import slow

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jax_megamoe"
FILES = sorted(PACKAGE.rglob("*.py"))

ROOMS = {
    "_checks": ("", ""),
    "_files": ("_checks", ""),
    "mesh": ("_checks", ""),
    "formats": ("_checks", ""),
    "config": ("_checks formats", ""),
    "numerics": ("_checks config formats", "elements quantization expert tokens"),
    "plan": (
        "_checks config formats",
        "refusal device kernel operand arithmetic problem tensor_map sm100_traits heuristics "
        "sm90_heuristics symmetric_buffer limits launch sgl_staging staging kernel_family "
        "expert_maps sm100 sm100_family families.sgl_sm100 families.sgl_sm100_mx "
        "families.sgl_sm100_nvfp4 families.sgl_sm100_bf16 families.sgl_sm90_fp8_block "
        "families.vllm_sm100 families.vllm_sm100_mx families.vllm_sm100_nvfp4 "
        "families.vllm_sm100_bf16 families.flashinfer_heuristics families.flashinfer_buffer "
        "families.flashinfer_limits families.flashinfer_launch families.flashinfer_sm90 "
        "families.flashinfer_sm90_mxfp4_block families.flashinfer_sm90_nvfp4_block families "
        "choice folding grouped.product grouped.humming_memory grouped.humming_instruction "
        "grouped.humming_unit grouped.humming grouped.tiles grouped.slots "
        "grouped.deep_gemm_bf16_sm90 grouped.deep_gemm_bf16_sm100 grouped.rules grouped.call "
        "grouped.around grouped.layer grouped planner",
    ),
    "weights": (
        "_checks _files config formats mesh numerics plan",
        "checkpoint.families checkpoint.fields checkpoint.patterns checkpoint.dialects "
        "checkpoint.header checkpoint.tensors layout flashinfer_layout flashinfer_factors packed "
        "grouped params folded_biases regroup requantize checkpoint.buffers checkpoint.projection "
        "checkpoint.select experts drawn relayout move checkpoint.converted checkpoint.gather "
        "checkpoint.progress checkpoint.load checkpoint.block_tensors checkpoint.convert "
        "checkpoint",
    ),
    "routing": ("_checks config mesh numerics weights", "router replicas rebalance stats"),
    "compile": (
        "_checks _files plan",
        "errors cubin cache pins toolkit fetch sources names deadline codegen compiler builder",
    ),
    "runtime": ("_checks compile plan", "devices extension"),
    "symmetric_memory": ("_checks compile mesh runtime", "processes cuda peer"),
    "launch": (
        "_checks compile config formats mesh numerics plan routing runtime symmetric_memory "
        "weights",
        "launcher facts factors runnable measured folding_cost deep_gemm grouped",
    ),
    "op": (
        "_checks config formats launch mesh numerics plan routing symmetric_memory weights",
        "staged_tokens bias_columns reference exchange one_expert pallas_decode pallas_products "
        "pallas_experts xla grouped exporting transforms shardings mega_moe",
    ),
    "nn": (
        "_checks config formats launch mesh numerics op plan routing weights",
        "variables hf_config block_checks storage weighed_input shared_expert router_layer layer "
        "block_load block",
    ),
    "cli": (
        "_checks _files compile config formats launch nn op plan runtime weights",
        "measurements demo.result demo.picture demo.checkpoint bench_load ahead sources doctor "
        "gpu.models gpu.routings gpu.result gpu.picture gpu.machine gpu.contenders gpu.compiled "
        "gpu.torch_peer gpu.torch_weights gpu.torch_triton_kernels gpu.torch_sort "
        "gpu.torch_humming gpu.peer_process gpu.measure gpu.command gpu bench demo.run demo main",
    ),
    "__init__": ("config formats launch nn op routing weights", ""),
    "__main__": ("cli", ""),
}
"""Bottom up: what a room may import of the others, and its files, each of which may import the
files of its room that stand before it. A package's own file comes last in its room."""


def module_of(path: Path) -> str:
    """The dotted name of a file below the package; a package's is its folder's."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def room_of(module: str) -> str:
    """The row of `ROOMS` that a module belongs to."""
    return module.split(".", maxsplit=1)[0]


def imported(path: Path) -> set[str]:
    """Full names of the modules that a file imports, at the top or inside a function."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def names_of(path: Path, package: str) -> bool:
    return any(name.split(".")[0] == package for name in imported(path))


def edges(path: Path) -> set[str]:
    """The modules of the package that a file imports, itself apart."""
    found = set()
    for name in imported(path) - {"jax_megamoe.runtime._ffi"}:
        inner = name.removeprefix("jax_megamoe.")
        while inner and inner != name and inner not in MODULES:
            inner = inner.rpartition(".")[0]
        if inner and inner != name:
            found.add(inner)
    return found - {module_of(path)}


def files_of(room: str) -> list[str]:
    """The modules of a room in the order of the table."""
    inner = [f"{room}.{name}" for name in ROOMS[room][1].split()]
    return [*inner, room]


def test_the_table_has_no_cycle() -> None:
    above: set[str] = set()
    for room, (allowed, _) in ROOMS.items():
        assert set(allowed.split()) <= above, f"{room} imports from a row below it"
        above.add(room)


def test_the_table_has_every_file() -> None:
    assert sorted(module for room in ROOMS for module in files_of(room)) == sorted(MODULES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    module = module_of(path)
    room = room_of(module)
    files = files_of(room)
    allowed = {each for other in ROOMS[room][0].split() for each in files_of(other)}
    extra = edges(path) - allowed - set(files[: files.index(module)])
    assert not extra, f"{path.relative_to(ROOT)} may not import {sorted(extra)}"


def test_the_tree_in_contributing_has_every_file() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    tree = text[text.index("    jax_megamoe/") :].split("\n    ffi/")[0]
    folders: list[tuple[int, str]] = []
    found = set()
    for line in tree.splitlines()[1:]:
        words = line.split()
        indent = len(line) - len(line.lstrip())
        folders = [(depth, name) for depth, name in folders if depth < indent]
        if words[0].endswith("/"):
            folders.append((indent, words[0]))
        names = itertools.takewhile(lambda word: word.endswith((".py", ".cuh")), words)
        found |= {"".join(name for _, name in folders) + word for word in names}
    files = {*FILES, *PACKAGE.rglob("*.cuh")}
    there = {str(path.relative_to(PACKAGE)) for path in files}
    assert found == {name for name in there if "/" not in name or "__init__" not in name}


def test_only_extension_imports_the_compiled_module() -> None:
    callers = {module_of(path) for path in FILES if "jax_megamoe.runtime._ffi" in imported(path)}
    assert callers == {"runtime.extension"}


def test_only_launcher_calls_the_ffi() -> None:
    callers = {module_of(path) for path in FILES if "ffi_call" in path.read_text()}
    assert callers <= {"launch.launcher", "mesh"}


@pytest.mark.parametrize(
    "path", sorted((PACKAGE / "plan").rglob("*.py")), ids=lambda path: path.name
)
def test_plan_is_pure(path: Path) -> None:
    """The standard library and its own: nothing named jax, no environment, no files."""
    modules = imported(path) - {"pathlib.PurePosixPath", "pathlib.PurePath"}
    outer = {name.split(".")[0] for name in modules} - {"jax_megamoe"}
    assert outer <= sys.stdlib_module_names
    assert not outer & {"os", "pathlib", "io", "subprocess", "ctypes", "socket"}
    tree = ast.parse(path.read_text())
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not names & {"jax", "jnp", "np", "open", "environ", "print"}


@pytest.mark.parametrize("name", ["_checks", "config", "formats"])
def test_configs_do_not_need_jax(name: str) -> None:
    assert not names_of(PACKAGE / f"{name}.py", "jax")


def test_who_imports_flax() -> None:
    assert {room_of(module_of(path)) for path in FILES if names_of(path, "flax")} <= {"nn", "cli"}


def test_nobody_imports_torch_or_deep_gemm() -> None:
    """Except what runs in the process of a peer of `bench gpu` alone."""
    for path in FILES:
        if path.match("cli/gpu/torch_*.py"):
            continue
        for package in ("torch", "deep_gemm", "vllm"):
            assert not names_of(path, package), f"{path} imports {package}"


def test_no_banned_file_names() -> None:
    banned = {"utils", "helpers", "common", "manager", "core"}
    folders = [ROOT / name for name in ("jax_megamoe", "ffi", "tests", "benchmarks", "examples")]
    for folder in folders:
        for path in folder.rglob("*"):
            words = {*path.stem.lower().split("_")} | {path.stem.lower()}
            assert not words & banned, path


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400, "more than 400 lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
            assert lines <= 60, f"{node.name} has {lines} lines"


def test_extension_files_are_short() -> None:
    for path in [*(ROOT / "ffi").glob("*.cc"), *(ROOT / "ffi").glob("*.h")]:
        assert path.read_text().count("\n") <= 400, path.name


def fresh_python(code: str, folder: Path, **environment: str) -> str:
    """Runs code in a new interpreter whose home and working folder is `folder`."""
    base = {"PYTHONPATH": str(ROOT), "HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    keep = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=folder,
        env=base | keep | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert not result.stderr, result.stderr
    return result.stdout


@pytest.mark.parametrize("module", ["jax_megamoe", "jax_megamoe.op.mega_moe"])
def test_mega_moe_does_not_import_flax(module: str, tmp_path: Path) -> None:
    code = f"import sys, {module}; assert {module}.mega_moe; print('flax' in sys.modules)"
    assert fresh_python(code, tmp_path) == "False\n"


def test_the_layer_is_a_public_name(tmp_path: Path) -> None:
    code = """
import jax_megamoe as mm
assert "MegaMoE" in dir(mm) and "mega_moe" in dir(mm)
print(mm.MegaMoE.__module__)
from jax_megamoe import MegaMoE
assert MegaMoE is mm.MegaMoE
try:
    mm.no_such_name
except AttributeError as error:
    print(error)
"""
    expected = "jax_megamoe.nn.layer\nmodule 'jax_megamoe' has no attribute 'no_such_name'\n"
    assert fresh_python(code, tmp_path) == expected


def test_nothing_happens_at_import(tmp_path: Path) -> None:
    """No files, no prints, no change of environment or logging, no backend made.

    With a platform that does not exist, any query of a device raises. What JAX and Flax themselves
    do at import is theirs.
    """
    code = """
import logging, os
import flax.nnx, jax
before = dict(os.environ), list(logging.getLogger().handlers), os.getcwd()
import jax_megamoe, jax_megamoe.nn.layer, jax_megamoe.weights.checkpoint.load, jax_megamoe.cli.main
assert before == (dict(os.environ), list(logging.getLogger().handlers), os.getcwd())
"""
    assert fresh_python(code, tmp_path, JAX_PLATFORMS="no_such_platform") == ""
    assert not list(tmp_path.iterdir())


def test_a_device_query_would_be_noticed(tmp_path: Path) -> None:
    """The test above can fail."""
    code = "import jax; jax.devices()"
    with pytest.raises(AssertionError, match="no_such_platform"):
        fresh_python(code, tmp_path, JAX_PLATFORMS="no_such_platform")


def test_helper_modules_of_tests_have_one_import_path() -> None:
    """By name alone (`pythonpath` in pyproject.toml), so each is loaded once and has one state."""
    tests = Path(__file__).parent
    texts = {path: path.read_text() for path in tests.rglob("*.py")}
    dotted = [
        str(path) for path, text in texts.items() if re.search(r"^\s*from tests\b", text, re.M)
    ]
    assert not dotted
    settings = tomllib.loads((tests.parent / "pyproject.toml").read_text())
    folders = settings["tool"]["pytest"]["ini_options"]["pythonpath"]
    names = [path.stem for folder in folders for path in (tests.parent / folder).glob("*.py")]
    names = [name for name in names if name != "conftest" and not name.startswith("test_")]
    assert len(names) == len(set(names)), [name for name in names if names.count(name) > 1]


def test_slow_files_are_there() -> None:
    for each in (*slow.SLOW, *slow.NOT_SLOW):
        assert (slow.FOLDER / each).exists(), each
    for each in slow.NOT_SLOW:
        assert not slow.is_slow(slow.FOLDER / each)
