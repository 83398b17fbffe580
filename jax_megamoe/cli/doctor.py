"""`python -m jax_megamoe doctor`: what this machine has, and what runs on it.

It is run where something is broken: whatever one part raises is what is said of that part, and the
others follow.
"""

import collections
import importlib.metadata
import os
import platform
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jax_megamoe._checks import described, message
from jax_megamoe.cli.sources import cells, preferences
from jax_megamoe.compile import Finding, describe_toolchain, find_source
from jax_megamoe.config import MoEConfig
from jax_megamoe.formats import RECIPES
from jax_megamoe.launch import grouped
from jax_megamoe.launch.runnable import runnable
from jax_megamoe.plan import plan_mega_moe
from jax_megamoe.plan.grouped.rules import source_of
from jax_megamoe.plan.refusal import Refusal
from jax_megamoe.runtime import extension
from jax_megamoe.runtime.devices import device_spec, spec_of

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
    fields: list[dict[str, Any]] = [{**sizes, "weight_format": recipe} for recipe in RECIPES]
    configs = [MoEConfig(**each) for each in fields]
    configs[0].experts_per_rank(num_ranks)
    found = Table("part", title="This machine")
    found.add_column("found", overflow="fold")
    kinds, devices = _find_devices()
    for finding in (*_find_installed(), *devices, *describe_toolchain()):
        text = _shown(console, finding.found or finding.problem)
        found.add_row(finding.part, text if finding.found else f"[yellow]{text}[/]")
    console.print(found)
    console.print(preferences(cells()))
    what = ", ".join(f"{name} {size}" for name, size in sizes.items())
    runs = Table("device", "recipe", title=f"{what}, {num_ranks} ranks")
    for name in ("deep_gemm", "grouped"):
        runs.add_column(name, overflow="fold")
    runs.caption = "xla runs all of them, on any device."
    for kind, device in kinds.items():
        recipes: dict[tuple[str, str], list[str]] = {}
        for config in configs:
            both = kernel_status(config, device, num_ranks), grouped_status(config, device)
            recipes.setdefault(both, []).append(config.recipe.name)
        for both, names in recipes.items():
            texts = (_shown(console, text) for text in both)
            runs.add_row(_shown(console, kind), ", ".join(names), *texts)
        runs.add_section()
    console.print(runs if kinds else "No device: nothing runs.")


def _shown(console: Console, text: str) -> str:
    """`text` for a table, without what the console's encoding lacks: a path may hold anything."""
    encoding = console.encoding
    return escape(text.encode(encoding, "backslashreplace").decode(encoding))


def _find_installed() -> Iterator[Finding]:
    """The parts of the installation."""
    yield Finding("python", f"{platform.python_version()}, {platform.platform()}")
    for name in _PACKAGES:
        try:
            yield Finding(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "", "not installed")
        except Exception as error:
            yield Finding(name, "", described(error))
    try:
        yield Finding("compiled module", str(extension.module().__file__))
    except ImportError as error:
        yield Finding("compiled module", "", str(error))
    except Exception as error:
        yield Finding("compiled module", "", described(error))


def _find_devices() -> tuple[dict[str, jax.Device], list[Finding]]:
    """The first device of each kind, and what to say of them."""
    kinds: dict[str, jax.Device] = {}
    counts: collections.Counter[str] = collections.Counter()
    try:
        for device in jax.devices():
            counts[_kind(device)] += 1
            kinds.setdefault(_kind(device), device)
    except Exception as error:  # whatever JAX and its plugins raise, bare AssertionErrors included
        asked = os.environ.get("JAX_PLATFORMS")
        hint = f"unset JAX_PLATFORMS, which is {asked!r}" if asked else "see the log above"
        problem = message("devices", "a backend that JAX can start", described(error), hint)
        return {}, [Finding("devices", "", problem)]
    found: list[Finding] = []
    for kind, device in kinds.items():
        try:
            runtime = f" ({' '.join(device.client.platform_version.split())})"
        except Exception as error:
            runtime = f" ({described(error)})"
        found.append(Finding("devices", f"{counts[kind]} x {kind}{runtime}"))
    return kinds, found


def kernel_status(config: MoEConfig, device: jax.Device, num_ranks: int) -> str:
    """The kernel source and buffer that a config's calls take on the device, or why none can."""
    try:
        chosen = runnable(config, device, num_ranks)
        if isinstance(chosen, Refusal):
            return chosen.reason
        plan = plan_mega_moe(config, device_spec(device), 0, num_ranks, chosen.source)
    except Exception as error:
        return described(error)
    return f"{chosen.source}'s kernel, buffer of {plan.buffer.num_bytes / 1e6:.0f} MB on each rank"


def grouped_status(config: MoEConfig, device: jax.Device) -> str:
    """The layout that grouped products of a config read on the device, or why there are none."""
    try:
        spec = spec_of(device)
        if isinstance(spec, Refusal):
            return "needs a CUDA device"
        layout = grouped.layout_of(config, spec.arch)
        if isinstance(layout, Refusal):
            return layout.reason
        source = source_of(config.weight_format.name)
        find_source(source)
    except Exception as error:
        return described(error)
    return f"{source}'s kernels, weights in {layout}"


def _kind(device: jax.Device) -> str:
    capability = getattr(device, "compute_capability", None)
    return f"{device.device_kind} (sm {capability})" if capability else device.device_kind
