"""What `doctor` says a config's calls take, for a GPU that is not here."""

import pytest

from jax_megamoe import MoEConfig
from jax_megamoe.cli import doctor
from jax_megamoe.compile import MissingDependency
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

    monkeypatch.setattr(doctor, "find_source", find)
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
