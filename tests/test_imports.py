"""The package's shape: imports go one way only, names and sizes, and nothing happens at import."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jax_megamoe"
FILES = sorted(PACKAGE.rglob("*.py"))

ALLOWED = {
    "_checks": "",
    "formats": "_checks",
    "config": "_checks formats",
    "router": "_checks",
    "hf_config": "_checks config router",
    "elements": "_checks",
    "quantization": "_checks elements",
    "plan": "_checks config formats",
    "devices": "_checks plan",
    "compile": "_checks plan",
    "_extension": "_checks plan compile",
    "launcher": "_checks plan _extension",
    "_processes": "_checks",
    "_cuda_memory": "_checks compile",
    "_peer_memory": "_checks devices _processes _cuda_memory",
    "symmetric_memory": "_checks _extension _processes _cuda_memory _peer_memory",
    "weights": "_checks formats config elements quantization",
    "eplb": "_checks config weights",
    "staging": "config quantization eplb",
    "expert": "config formats quantization weights",
    "xla": "config formats staging expert weights",
    "reference": "config formats staging expert weights eplb",
    "deep_gemm": "_checks _extension compile config devices eplb expert launcher plan "
    "symmetric_memory weights",
    "stats": "_checks config eplb expert staging",
    "exporting": "eplb stats weights",
    "transforms": "_checks config deep_gemm eplb expert launcher reference staging weights xla",
    "op": "_checks compile config deep_gemm eplb stats symmetric_memory transforms weights",
    "layer": "config deep_gemm eplb op weights",
    "replicated": "",
    "router_layer": "_checks replicated router transforms weights",
    "shared_expert": "config expert replicated weights",
    "block": "_checks config eplb formats hf_config layer op replicated router router_layer "
    "shared_expert weights",
    "ahead": "_checks compile config deep_gemm plan",
    "sources": "compile config deep_gemm devices formats plan",
    "doctor": "_extension compile config deep_gemm devices formats plan sources",
    "measurements": "",
    "bench": "_checks config formats measurements op weights",
    "bench_load": "_checks config formats measurements weights",
    "demo": "_checks config formats layer reference weights",
    "cli": "ahead bench bench_load compile config deep_gemm demo devices doctor formats "
    "measurements plan sources weights",
    "__main__": "cli",
    "__init__": "config deep_gemm eplb exporting formats op reference router stats weights layer "
    "block",
}
"""What a module or folder may import of the others, bottom up: a row imports from rows above it."""


def unit_of(path: Path) -> str:
    """The row of `ALLOWED` that a file belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


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
    """The rows of `ALLOWED` that a file imports from, its own apart."""
    inner = {name.split(".")[1] for name in imported(path) if name.startswith("jax_megamoe.")}
    return inner - {unit_of(path)}


def test_the_table_has_no_cycle() -> None:
    above: set[str] = set()
    for unit, allowed in ALLOWED.items():
        assert set(allowed.split()) <= above, f"{unit} imports from a row below it"
        above.add(unit)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    extra = edges(path) - set(ALLOWED[unit_of(path)].split()) - {"_ffi"}
    assert not extra, f"{path.relative_to(ROOT)} may not import {sorted(extra)}"


def test_only_extension_imports_the_compiled_module() -> None:
    assert {unit_of(path) for path in FILES if "_ffi" in edges(path)} == {"_extension"}


def test_only_launcher_calls_the_ffi() -> None:
    callers = {unit_of(path) for path in FILES if "ffi_call" in path.read_text()}
    assert callers == {"launcher"}


@pytest.mark.parametrize(
    "path", sorted((PACKAGE / "plan").glob("*.py")), ids=lambda path: path.name
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
    assert {unit_of(path) for path in FILES if names_of(path, "flax")} <= {
        "layer",
        "replicated",
        "router_layer",
        "shared_expert",
        "block",
        "demo",
    }


def test_nobody_imports_torch_or_deep_gemm() -> None:
    for path in FILES:
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
