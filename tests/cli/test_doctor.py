"""What `doctor` says a config's calls take, for a GPU that is not here; and that it never fails."""

import importlib.metadata
import io
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from rich.console import Console

from jax_megamoe import MoEConfig, compile
from jax_megamoe.cli import doctor
from jax_megamoe.compile import MissingDependency, builder
from jax_megamoe.launch import runnable
from jax_megamoe.plan import families
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.runtime import extension
from jax_megamoe.runtime.devices import KNOWN_DEVICES

SIZES = {"num_experts": 8, "top_k": 2, "hidden_size": 1024, "intermediate_size": 512}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The kernel sources of a machine with B200s; empty to begin with."""
    names: set[str] = set()

    def find(name: str) -> None:
        if name not in names:
            raise MissingDependency(f"no {name}")

    monkeypatch.setattr(compile, "find_source", find)
    monkeypatch.setattr(compile, "has_source", names.__contains__)
    monkeypatch.setattr(runnable, "spec_of", lambda device, reserved_sms: device)
    monkeypatch.setattr(doctor, "device_spec", lambda device: device)
    monkeypatch.setattr(extension, "module", lambda: None)
    return names


@pytest.mark.parametrize(
    ("installed", "options", "expected"),
    [
        ("", {}, "no sgl"),
        ("sgl vllm", {}, "sgl's kernel, buffer of "),
        ("vllm", {}, "vllm's kernel, buffer of "),
        ("vllm", {"kernel_source": "sgl"}, "no sgl"),
        ("sgl", {"num_shared_experts": 1}, "no vllm"),
        ("sgl vllm", {"num_shared_experts": 1}, "vllm's kernel, buffer of "),
    ],
)
def test_the_first_source_found(
    found: set[str], installed: str, options: dict[str, object], expected: str
) -> None:
    found.update(installed.split())
    config = MoEConfig(**SIZES, max_num_tokens=128, weight_format="nvfp4", **options)
    assert doctor.kernel_status(config, KNOWN_DEVICES["b200"], 1).startswith(expected)


def test_grouped_products(found: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout by activations; what is missing where the source or a device is."""
    monkeypatch.setattr(doctor, "spec_of", lambda device: device)

    def status(recipe: str, device: DeviceSpec = KNOWN_DEVICES["h200"]) -> str:
        config = MoEConfig(**SIZES, max_num_tokens=128, weight_format=recipe)
        return doctor.grouped_status(config, device)

    assert "expected the distribution humming-kernels" in status("mxfp4_block")
    monkeypatch.setattr(doctor, "find_source", lambda name: None)
    assert status("mxfp4_block") == "humming's kernels, weights in humming_fp8"
    assert status("bf16") == "sgl's kernels, weights in interleave8"
    assert status("bf16", KNOWN_DEVICES["b300"]) == status("bf16")
    assert "implementation grouped: expected" in status("bf16", DeviceSpec(80, 108))


def report(encoding: str = "utf-8") -> str:
    """What `doctor` prints, its lines as long as they come."""
    file = io.TextIOWrapper(io.BytesIO(), encoding)
    console = Console(file=file, width=1000)
    doctor.print_report(console, {**SIZES, "max_num_tokens": 128}, 1)
    file.flush()
    return file.buffer.getvalue().decode(encoding)


class Odd(Exception):
    """What nobody foresaw."""


def odd(*_: Any, **__: Any) -> Any:
    raise Odd("broken")


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        (importlib.metadata, "version", "Odd: broken"),
        (extension, "module", "Odd: broken"),
        (jax, "devices", "devices: expected a backend that JAX can start, got Odd: broken; "),
        (builder, "find_source", "Odd: broken"),
        (builder, "_make_compiler", "Odd: broken"),
        (builder, "cache_folder", "Odd: broken"),
        (doctor, "plan_mega_moe", "Odd: broken"),
        (doctor, "runnable", "Odd: broken"),
    ],
)
def test_whatever_one_part_raises_is_what_is_said_of_it(
    found: set[str], monkeypatch: pytest.MonkeyPatch, module: Any, name: str, expected: str
) -> None:
    found.add("sgl")
    monkeypatch.setattr(doctor, "runnable", lambda *_: families.FAMILIES[0])
    monkeypatch.setattr(doctor, "device_spec", lambda _: KNOWN_DEVICES["h200"])
    monkeypatch.setattr(module, name, odd)
    text = report()
    assert expected in text
    assert "compile policy" in text  # the last of the parts


def test_a_device_that_does_not_say_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(device_kind="new", platform="new", client=None)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert "1 x new (AttributeError: 'NoneType' object has no attribute" in report()


def test_a_path_that_the_console_cannot_print(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_MEGAMOE_CACHE", "/nowhere/caf\udce9/\u00e9")
    assert r"/nowhere/caf\udce9/\xe9, 0 kernels" in report("ascii")
    assert "/nowhere/caf\\udce9/\u00e9, 0 kernels" in report()


@pytest.mark.parametrize("platforms", ["cuda", "no such platform"])
def test_without_the_platform_that_was_asked_for(platforms: str) -> None:
    if platforms == "cuda" and any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("needs a machine without a GPU")
    done = subprocess.run(
        [sys.executable, "-m", "jax_megamoe", "doctor"],
        env={**os.environ, "JAX_PLATFORMS": platforms, "COLUMNS": "1000"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "devices: expected a backend that JAX can start, got " in done.stdout
    assert f"unset JAX_PLATFORMS, which is '{platforms}'" in done.stdout
    assert done.stdout.endswith("No device: nothing runs.\n")


def test_without_a_dependency_the_command_line_says_so() -> None:
    code = (
        "import runpy, sys; sys.modules['flax'] = None\n"
        "runpy.run_module('jax_megamoe', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "python -m jax_megamoe: error: import of flax halted" in done.stderr
    assert "install the package with its dependencies: pip install jax-megamoe" in done.stderr
