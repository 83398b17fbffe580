"""builder.py with a fake compiler: keys, policy, errors, threads and processes."""

import dataclasses
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_toolchain import SPEC, FakeCompiler, cubin, write_toolkit

from jax_megamoe.compile import (
    CompileError,
    MissingDependency,
    NotCompiled,
    build,
    builder,
    compile_many,
    describe_toolchain,
    find_source,
)
from jax_megamoe.compile.cache import KernelCache, cache_folder
from jax_megamoe.plan.kernel import CodeOptions

pytestmark = pytest.mark.usefixtures("source")

CUBIN = cubin({"kernel": [(0, 8), (8, 4)]})


@pytest.fixture
def compiler(tmp_path):
    return FakeCompiler(tmp_path / "calls")


def test_kernel_is_compiled_once_a_process_and_once_a_folder(compiler, forget):
    assert build(SPEC, compiler=compiler) == CUBIN
    for entry in cache_folder().glob("*.kernel"):
        entry.rename(entry.with_suffix(".moved"))
    assert build(SPEC, compiler=compiler) == CUBIN
    for entry in cache_folder().glob("*.moved"):
        entry.rename(entry.with_suffix(".kernel"))
    forget()
    assert build(SPEC, compiler=compiler) == CUBIN
    assert compiler.num_calls == 1


def test_description_is_stored_beside_the_kernel(compiler):
    build(SPEC, compiler=compiler)
    (path,) = cache_folder().glob("*.json")
    described = json.loads(path.read_text())
    assert described["spec"]["symbol"] == "kernel"
    assert described["source_version"] == "9.9.9"
    assert (described["compiler"], described["compiler_version"]) == ("nvrtc", "13.0")
    assert [described[name] for name in ("registers", "stack_bytes")] == [168, 16]
    assert [described[name] for name in ("spill_store_bytes", "spill_load_bytes")] == [8, 4]
    assert (described["seconds"], described["cubin_bytes"]) == (1.5, len(CUBIN))


def test_key_changes_with_each_ingredient(tmp_path, monkeypatch):
    source = find_source("sgl")
    plain = FakeCompiler(tmp_path / "calls")
    others = [
        FakeCompiler(tmp_path / "calls", name="nvcc"),
        FakeCompiler(tmp_path / "calls", version="13.1"),
        FakeCompiler(tmp_path / "calls", flags=("-O2",)),
    ]
    changes = {
        "arch": "sm_100f",
        "header": "deep_gemm/impls/other.cuh",
        "symbol": "other",
        "template_args": ("64, true",),
        "parameter_types": ("void*", "int"),
        "source": "vllm",
        "prelude": "#define OTHER\n",
        "unit": ("1",),
        "options": CodeOptions(fast_math=True),
    }
    keys = [
        builder.cache_key(SPEC, source, plain),
        *(builder.cache_key(SPEC, source, other) for other in others),
        *(
            builder.cache_key(dataclasses.replace(SPEC, **{field: value}), source, plain)
            for field, value in changes.items()
        ),
        builder.cache_key(SPEC, dataclasses.replace(source, version="1"), plain),
        builder.cache_key(SPEC, dataclasses.replace(source, fingerprint="1"), plain),
    ]
    monkeypatch.setattr(builder, "CODEGEN_VERSION", builder.CODEGEN_VERSION + 1)
    keys.append(builder.cache_key(SPEC, source, plain))
    assert set(changes) == {field.name for field in dataclasses.fields(SPEC)}
    for one, other in itertools.combinations(keys, 2):
        assert one.stem != other.stem


def test_key_ignores_where_the_headers_lie(tmp_path):
    source = find_source("sgl")
    moved = dataclasses.replace(source, include_dir=Path("/elsewhere"))
    compiler = FakeCompiler(tmp_path / "calls")
    assert builder.cache_key(SPEC, source, compiler) == builder.cache_key(SPEC, moved, compiler)


def test_threads_share_one_compilation_even_without_a_folder(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAX_MEGAMOE_CACHE", str(tmp_path / "file" / "cache"))
    compiler = FakeCompiler(tmp_path / "calls", seconds=0.1)
    with ThreadPoolExecutor(8) as pool:
        got = [pool.submit(lambda: build(SPEC, compiler=compiler)) for _ in range(8)]
    assert [each.result() for each in got] == [CUBIN] * 8
    assert compiler.num_calls == 1


def _build_in_process(folder: Path, barrier, results) -> None:
    compiler = FakeCompiler(folder / "calls", seconds=0.5)
    barrier.wait()
    results.put((os.getpid(), build(SPEC, compiler=compiler, cache=KernelCache(folder / "shared"))))


def test_four_processes_and_one_empty_cache_make_one_compilation_and_four_right_loads(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [
        context.Process(target=_build_in_process, args=(tmp_path, barrier, results))
        for _ in range(4)
    ]
    for process in processes:
        process.start()
    got = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len({pid for pid, _ in got}) == 4
    assert [loaded for _, loaded in got] == [CUBIN] * 4
    assert FakeCompiler(tmp_path / "calls").num_calls == 1
    assert len(list((tmp_path / "shared").glob("*.kernel"))) == 1


def test_truncated_entry_is_rebuilt(compiler, forget):
    build(SPEC, compiler=compiler)
    (entry,) = cache_folder().glob("*.kernel")
    entry.write_bytes(entry.read_bytes()[:100])
    forget()
    assert build(SPEC, compiler=compiler) == CUBIN
    assert compiler.num_calls == 2


def test_policy_never_names_the_kernel_and_the_command(compiler, monkeypatch):
    monkeypatch.setenv("JAX_MEGAMOE_COMPILE", "never")
    text = (
        r"JAX_MEGAMOE_COMPILE=never: expected kernel<64, true> of sgl 9\.9\.9 for sm_90a in "
        r".*cache, got no intact entry; compile it beforehand with `python -m jax_megamoe compile`"
    )
    with pytest.raises(NotCompiled, match=text):
        build(SPEC, compiler=compiler)
    assert compiler.num_calls == 0
    assert not cache_folder().exists()


def test_policy_never_uses_a_stored_kernel_without_any_toolchain(
    compiler, machine, monkeypatch, forget
):
    build(SPEC, compiler=compiler)
    forget()
    monkeypatch.setenv("JAX_MEGAMOE_COMPILE", "never")
    assert build(SPEC) == CUBIN
    assert build(SPEC, cache=KernelCache(cache_folder())) == CUBIN


def test_unknown_policy(compiler, monkeypatch):
    monkeypatch.setenv("JAX_MEGAMOE_COMPILE", "always")
    with pytest.raises(ValueError, match=r"JAX_MEGAMOE_COMPILE: expected one of \['auto', 'never'"):
        build(SPEC, compiler=compiler)


def test_refused_kernel_is_named_with_source_and_the_end_of_the_log(tmp_path):
    compiler = FakeCompiler(tmp_path / "calls", refuses="kernel")
    with pytest.raises(CompileError) as caught:
        build(SPEC, compiler=compiler)
    text = str(caught.value)
    assert "nvrtc 13.0 cannot compile kernel<64, true> of sgl 9.9.9 for sm_90a." in text
    assert "last line: error" in text
    assert "first line" not in text
    assert "install one that jax_megamoe supports" in text
    assert len(text) < 4000
    assert list(cache_folder().glob("*.kernel")) == []


@pytest.mark.parametrize(
    ("output", "complaint"),
    [
        (cubin({"a": [(0, 8), (8, 4)], "b": [(0, 8)]}), r"got kernels of \[2, 1\] parameters"),
        (cubin({"kernel": [(0, 8)]}), r"got kernels of \[1\] parameters"),
        (cubin({}), r"got kernels of \[\] parameters"),
        (b"not ELF", "cubin: expected a 64-bit ELF file, got b'not EL', for kernel<64, true>"),
    ],
)
def test_cubin_that_is_not_one_kernel_with_the_planned_parameters(tmp_path, output, complaint):
    compiler = FakeCompiler(tmp_path / "calls", output=output)
    with pytest.raises(CompileError, match=complaint):
        build(SPEC, compiler=compiler)
    assert list(cache_folder().glob("*.kernel")) == []


def test_no_compiler_names_every_one_and_the_pip_command(machine, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(MissingDependency) as caught:
        build(SPEC)
    assert "nvrtc: expected cuda-bindings and nvidia-cuda-nvrtc" in str(caught.value)
    assert "CUDA toolkit: expected headers and nvcc of CUDA 13.0 or newer" in str(caught.value)
    assert str(caught.value).count("pip install 'jax-megamoe[cuda13]'") == 2


def test_named_compiler_does_not_fall_back(machine, monkeypatch):
    monkeypatch.setenv("JAX_MEGAMOE_COMPILER", "nvcc")
    with pytest.raises(MissingDependency, match=r"^CUDA toolkit: expected headers and nvcc"):
        build(SPEC)
    monkeypatch.setenv("JAX_MEGAMOE_COMPILER", "clang")
    with pytest.raises(ValueError, match=r"expected one of \['nvrtc', 'nvcc'\], got 'clang'"):
        build(SPEC)


def test_many_kernels_are_each_built_once_and_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_MEGAMOE_COMPILE", "never")
    compiler = FakeCompiler(tmp_path / "calls", refuses="kernel<bad>")
    specs = [dataclasses.replace(SPEC, template_args=(arg,)) for arg in ("1", "bad", "2")]
    done = []
    outcomes = compile_many([*specs, *specs], jobs=2, on_done=done.append, compiler=compiler)
    assert [outcome.spec for outcome in outcomes] == specs
    assert [outcome.cubin_bytes for outcome in outcomes] == [len(CUBIN), 0, len(CUBIN)]
    assert [type(outcome.error) for outcome in outcomes] == [type(None), CompileError, type(None)]
    assert sorted(map(id, done)) == sorted(map(id, outcomes))
    assert compiler.num_calls == 3


def test_toolchain_is_described_part_by_part(machine, compiler, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    write_toolkit(machine / "site/nvidia/cu13")
    build(SPEC, compiler=compiler)
    findings = {finding.part: finding for finding in describe_toolchain()}
    assert findings["kernel source sgl"].found.startswith("9.9.9 in ")
    for part, problem in {
        "kernel source vllm": "pip install --no-deps vllm==0.33.0",
        "compiler nvrtc": "pip install 'jax-megamoe[cuda13]'",
        "compiler nvcc": "lacks bin/nvcc (nvidia-cuda-nvcc)",
    }.items():
        assert findings[part].found == ""
        assert problem in findings[part].problem
    assert findings["kernel cache"].found == f"{cache_folder()}, 1 kernels"
    assert findings["compile policy"].found == "auto"


def test_unwritable_cache_is_described(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAX_MEGAMOE_CACHE", str(tmp_path / "file"))
    findings = {finding.part: finding.found for finding in describe_toolchain()}
    assert findings["kernel cache"] == f"{tmp_path / 'file'}, 0 kernels, cannot be written"


def test_import_and_description_create_nothing(tmp_path):
    program = "from jax_megamoe import compile; compile.describe_toolchain()"
    environment = {**os.environ, "JAX_MEGAMOE_CACHE": str(tmp_path / "unborn")}
    root = str(Path(builder.__file__).parents[2])
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, cwd=root)
    assert not (tmp_path / "unborn").exists()
