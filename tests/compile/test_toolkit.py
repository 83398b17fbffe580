"""toolkit.py: which CUDA is used, and what is said of one that will not do."""

import pytest
from fake_toolchain import write_toolkit

from jax_megamoe.compile.errors import MissingDependency
from jax_megamoe.compile.toolkit import find_toolkit


def test_wheels_come_before_cuda_home(machine, monkeypatch):
    wheels = write_toolkit(machine / "site/nvidia/cu13")
    monkeypatch.setenv("CUDA_HOME", str(write_toolkit(machine / "home", 13020)))
    found = find_toolkit()
    assert found.root == wheels
    assert found.include_dirs == (wheels / "include", wheels / "include/cccl")
    assert found.headers == "CUDA 13000, CCCL 3000001"


def test_newest_wheels_win(machine):
    write_toolkit(machine / "site/nvidia/cu13")
    newer = write_toolkit(machine / "site/nvidia/cu14", 14000)
    assert find_toolkit().root == newer


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_variable_is_the_fallback(machine, monkeypatch, variable):
    monkeypatch.setenv(variable, str(write_toolkit(machine / "home")))
    assert find_toolkit().root == machine / "home"


def test_nvcc_on_path_is_the_fallback(machine):
    write_toolkit(machine / "opt/cuda", nvcc=True)
    (machine / "bin").mkdir()
    (machine / "bin/nvcc").symlink_to(machine / "opt/cuda/bin/nvcc")
    assert find_toolkit(nvcc=True).nvcc == machine / "opt/cuda/bin/nvcc"


def test_incomplete_wheels_are_passed_over_for_a_complete_toolkit(machine, monkeypatch):
    write_toolkit(machine / "site/nvidia/cu13", without=("cccl/nv/target",))
    monkeypatch.setenv("CUDA_HOME", str(write_toolkit(machine / "home")))
    assert find_toolkit().root == machine / "home"


def test_absent_toolkit_names_the_pip_command(machine):
    text = (
        "CUDA toolkit: expected headers of CUDA 13.0 or newer, got no NVIDIA wheels, CUDA_HOME or "
        r"nvcc on PATH; pip install 'jax-megamoe\[cuda13\]'"
    )
    with pytest.raises(MissingDependency, match=text):
        find_toolkit()


@pytest.mark.parametrize(
    ("missing", "wheel"),
    [
        ("cuda_bf16.h", "nvidia-cuda-runtime"),
        ("crt/host_defines.h", "nvidia-cuda-crt"),
        ("cccl/nv/target", "nvidia-cuda-cccl"),
        ("cccl/cuda/std/cstdint", "nvidia-cuda-cccl"),
    ],
)
def test_missing_wheel_is_named(machine, missing, wheel):
    write_toolkit(machine / "site/nvidia/cu13", without=(missing,))
    header = missing.removeprefix("cccl/")
    with pytest.raises(MissingDependency, match=rf"cu13 lacks {header} \({wheel}\); pip install"):
        find_toolkit()


def test_old_toolkit_is_named_with_its_version(machine, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(write_toolkit(machine / "home", 12040)))
    with pytest.raises(MissingDependency, match=r"got .*home is CUDA 12\.4; pip install"):
        find_toolkit()


def test_headers_alone_do_not_make_nvcc(machine):
    write_toolkit(machine / "site/nvidia/cu13")
    text = (
        r"headers and nvcc of CUDA 13.*lacks bin/nvcc \(nvidia-cuda-nvcc\) and lacks nvvm/bin/cicc"
    )
    with pytest.raises(MissingDependency, match=text):
        find_toolkit(nvcc=True)
