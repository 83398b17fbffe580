"""`python -m jax_megamoe doctor`: what this machine has, and what runs on it."""

import importlib.metadata
import platform
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jax_megamoe.cli.sources import able_sources, cells, preferences
from jax_megamoe.compile import BuildError, Finding, describe_toolchain, find_source
from jax_megamoe.config import MoEConfig
from jax_megamoe.formats import WEIGHT_FORMATS
from jax_megamoe.launch.deep_gemm import check_supported
from jax_megamoe.plan import plan_mega_moe
from jax_megamoe.runtime import extension
from jax_megamoe.runtime.devices import device_spec

_PACKAGES = ("jax-megamoe", "jax", "jaxlib", "flax", "cuda-bindings")


def print_report(console: Console, sizes: Mapping[str, Any], num_ranks: int) -> None:
    """Prints what was found, with the command that brings what is missing, whose kernel each kind
    of layer takes, and what runs.

    Args:
        console: where to.
        sizes: num_experts, top_k, hidden_size, intermediate_size and max_num_tokens of the layer
            that is asked about.
        num_ranks: expert-parallel ranks.

    Raises:
        ValueError: sizes that no layer has; see `MoEConfig`.
    """
    configs = [MoEConfig(**sizes, weight_format=form) for form in WEIGHT_FORMATS.values()]
    configs[0].experts_per_rank(num_ranks)
    found = Table("part", title="This machine")
    found.add_column("found", overflow="fold")
    for finding in findings():
        missing = f"[yellow]{escape(finding.problem)}[/]"
        found.add_row(finding.part, escape(finding.found) or missing)
    console.print(found)
    console.print(preferences(cells()))
    what = ", ".join(f"{name} {size}" for name, size in sizes.items())
    runs = Table("device", "format", "xla", "deep_gemm", title=f"{what}, {num_ranks} ranks")
    for kind, device in _kinds().items():
        for config in configs:
            status = kernel_status(config, device, num_ranks)
            runs.add_row(kind, config.weight_format.name, "runs", escape(status))
        runs.add_section()
    console.print(runs)


def findings() -> Iterator[Finding]:
    """The parts that the package needs or can use."""
    yield Finding("python", f"{platform.python_version()}, {platform.platform()}")
    for name in _PACKAGES:
        try:
            yield Finding(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "", "not installed")
    try:
        yield Finding("compiled module", str(extension.module().__file__))
    except ImportError as error:
        yield Finding("compiled module", "", str(error))
    for kind, device in _kinds().items():
        count = sum(_kind(each) == kind for each in jax.devices())
        runtime = " ".join(device.client.platform_version.split())
        yield Finding("devices", f"{count} x {kind} ({runtime})")
    yield from describe_toolchain()


def kernel_status(config: MoEConfig, device: jax.Device, num_ranks: int) -> str:
    """The kernel source and buffer that a config's calls take on the device, or why none can."""
    try:
        source = check_supported(config, device, num_ranks)
        extension.module()
        others = able_sources(config, device, num_ranks) if config.kernel_source is None else ()
        source = next(filter(_is_found, (source, *others)), source)
        find_source(source)
    except (BuildError, ImportError, NotImplementedError, ValueError) as error:
        return str(error)
    plan = plan_mega_moe(config, device_spec(device), 0, num_ranks, source)
    return f"{source}'s kernel, buffer of {plan.buffer.num_bytes / 1e6:.0f} MB on each rank"


def _is_found(source: str) -> bool:
    try:
        find_source(source)
    except BuildError:
        return False
    return True


def _kinds() -> dict[str, jax.Device]:
    """The first device of each kind."""
    return {_kind(device): device for device in reversed(jax.devices())}


def _kind(device: jax.Device) -> str:
    capability = getattr(device, "compute_capability", None)
    return f"{device.device_kind} (sm {capability})" if capability else device.device_kind
