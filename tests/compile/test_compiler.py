"""compiler.py without a compiler: what is read from logs, and what is said when one is missing."""

import importlib
import types
from pathlib import Path

import pytest
from fake_toolchain import write_toolkit

from jax_megamoe.compile.compiler import (
    CompilationFailed,
    Nvcc,
    Nvrtc,
    Resources,
    ptxas_resources,
)
from jax_megamoe.compile.errors import MissingDependency
from jax_megamoe.plan.kernel import CodeOptions

LOG = """\
ptxas info    : 3377 bytes gmem
ptxas info    : Compiling entry function '_Z1k' for 'sm_100f'
ptxas info    : Function properties for _Z1k
ptxas         .     88 bytes stack frame, 8 bytes spill stores, 56 bytes spill loads
ptxas info    : Used 128 registers, used 16 barriers, 88 bytes cumulative stack size
"""


def test_resources_are_read_from_the_log():
    assert ptxas_resources(LOG) == Resources(128, 88, 8, 56)


def test_device_functions_do_not_hide_the_kernel():
    extra = "    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
    assert ptxas_resources(LOG + extra) == Resources(128, 88, 8, 56)


def test_silent_log_has_no_resources():
    assert ptxas_resources("") == Resources(0, 0, 0, 0)


def test_nvrtc_without_bindings_names_the_wheels(monkeypatch):
    def refuse(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", refuse)
    text = (
        "nvrtc: expected cuda-bindings and nvidia-cuda-nvrtc, got No module named "
        r"'cuda.bindings.nvrtc'; pip install 'jax-megamoe\[cuda13\]'"
    )
    with pytest.raises(MissingDependency, match=text):
        Nvrtc()


def test_old_nvrtc_is_named_with_its_version(monkeypatch):
    old = types.SimpleNamespace(
        nvrtcResult=types.SimpleNamespace(NVRTC_SUCCESS=0), nvrtcVersion=lambda: (0, 12, 4)
    )
    monkeypatch.setattr(importlib, "import_module", lambda name: old)
    with pytest.raises(MissingDependency, match=r"expected NVRTC 13.0 or newer, got 12.4; pip"):
        Nvrtc()


NVCC = """\
#!/bin/sh
if [ "$1" = --version ]; then echo 'Cuda compilation tools, release 13.0, V13.0.88'; exit; fi
echo "$@" >&2
case "$(/bin/cat "$1")" in *broken*) echo "kernel.cu(1): error" >&2; exit 1;; esac
echo '0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads' >&2
echo 'Used 24 registers' >&2
printf cubin > "$3"
"""


@pytest.fixture
def nvcc(machine, monkeypatch):
    """A toolkit whose nvcc is a shell script that prints its arguments."""
    root = write_toolkit(machine / "home", nvcc=True)
    (root / "bin/nvcc").write_text(NVCC)
    monkeypatch.setenv("CUDA_HOME", str(root))
    (machine / "bin").mkdir()
    (machine / "bin/g++").write_text("")
    (machine / "bin/g++").chmod(0o755)
    return root


def test_nvcc_is_run_for_the_architecture_with_all_headers(nvcc):
    compiler = Nvcc()
    assert compiler.version == "13.0.88, CUDA 13000, CCCL 3000001"
    done = compiler.compile("kernel", "sm_100f", [Path("/deep_gemm/include"), Path("/cutlass")])
    assert done.cubin == b"cubin"
    assert done.resources == Resources(24, 0, 0, 0)
    assert "--gpu-architecture=sm_100f" in done.log
    folders = ("/deep_gemm/include", "/cutlass", f"{nvcc}/include", f"{nvcc}/include/cccl")
    assert " ".join(f"-I{folder}" for folder in folders) in done.log
    assert "--register-usage-level=10" in done.log
    assert "--use_fast_math" not in done.log


def test_options_of_a_kernel_reach_the_compiler(nvcc):
    done = Nvcc().compile("kernel", "sm_90a", [Path("/include")], CodeOptions(5, fast_math=True))
    assert "--ptxas-options=--register-usage-level=5" in done.log
    assert "--use_fast_math" in done.log
    assert done.log.count("register-usage-level") == 1


def test_nvcc_failure_carries_the_log(nvcc):
    with pytest.raises(CompilationFailed, match=r"kernel\.cu\(1\): error"):
        Nvcc().compile("broken", "sm_100f", [Path("/deep_gemm/include")])


def test_nvcc_without_host_compiler(nvcc, machine):
    (machine / "bin/g++").unlink()
    with pytest.raises(MissingDependency, match=r"host compiler g\+\+ on PATH, got none"):
        Nvcc()
