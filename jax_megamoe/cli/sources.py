"""`python -m jax_megamoe sources`: where kernels come from, and what each source can run."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import jax
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from jax_megamoe.compile import DISTRIBUTIONS, BuildError, fetch_source, find_source
from jax_megamoe.config import Activation, MoEConfig
from jax_megamoe.formats import RECIPES
from jax_megamoe.launch.runnable import supported
from jax_megamoe.plan import families
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.refusal import Refusal
from jax_megamoe.runtime.devices import KNOWN_DEVICES

_ACTIVATIONS = (
    ("swiglu", Activation("swiglu")),
    ("GPT-OSS's swiglu", Activation("swiglu", alpha=1.702, beta=1.0)),
    ("situ", Activation("situ")),
    ("any alpha, beta", Activation("swiglu", alpha=1.5, beta=0.5)),
    ("any alpha, beta", Activation("situ", alpha=2.0, beta=3.0)),
)
"""Activations to ask for; those of any parameters by examples that no model has."""

_DEVICES = (KNOWN_DEVICES["b200"], KNOWN_DEVICES["h200"])


@dataclass(frozen=True)
class Cell:
    """A kind of layer, and the kernel sources that can run it.

    Attributes:
        weight_format: name of the weight format.
        shared_format: precision of its fused shared expert; None: without one.
        activation: what of activations it is.
        preferred: the source that its calls take if it is found; None: none.
        able: those that run it if `MoEConfig(kernel_source=...)` asks for them.
    """

    weight_format: str
    shared_format: str | None
    activation: str
    preferred: str | None
    able: tuple[str, ...]


def cells() -> Iterator[Cell]:
    """Every kind of layer, as the planners and `supported` decide it for a small one."""
    for recipe in RECIPES.values():
        for shared in (None, *recipe.shared_formats):
            for label, activation in _ACTIVATIONS:
                if activation.name not in recipe.functions:
                    continue
                config = MoEConfig(
                    num_experts=8,
                    top_k=2,
                    hidden_size=1024,
                    intermediate_size=512,
                    max_num_tokens=128,
                    weight_format=recipe.weights,
                    activation_format=recipe.activations,
                    activation=activation,
                    num_shared_experts=int(shared is not None),
                    shared_format=shared,
                )
                found = ((_source(config, each, 1), each) for each in _DEVICES)
                preferred, device = next((one for one in found if one[0]), (None, _DEVICES[0]))
                yield Cell(recipe.name, shared, label, preferred, able_sources(config, device))


def able_sources(
    config: MoEConfig, device: jax.Device | DeviceSpec, num_ranks: int = 1
) -> tuple[str, ...]:
    """The sources that run a config on a device like this one, found or not, if asked for."""
    asked = (replace(config, kernel_source=name) for name in families.sources())
    sources = (_source(one, device, num_ranks) for one in asked)
    return tuple(source for source in sources if source is not None)


def _source(config: MoEConfig, device: jax.Device | DeviceSpec, num_ranks: int) -> str | None:
    chosen = supported(config, device, num_ranks)
    return None if isinstance(chosen, Refusal) else chosen.source


def print_sources(console: Console) -> None:
    """Prints where each source was found, or the command that brings it, and what it can run."""
    table = Table("source", "version", title="Kernel sources")
    table.add_column("found", overflow="fold")
    table.add_column("formats (fused shared experts)")
    kinds = tuple(cells())
    for name in DISTRIBUTIONS:
        try:
            source = find_source(name)
            version, found = escape(source.version), escape(str(source.include_dir))
        except BuildError as error:
            version, found = "-", f"[yellow]{escape(str(error))}[/]"
        table.add_row(name, version, found, _formats(kinds, name))
    console.print(table)
    console.print(preferences(kinds))


def _formats(kinds: Iterable[Cell], source: str) -> str:
    """The formats that a source has kernels of, with the precisions of fused shared experts."""
    shared: dict[str, dict[str, None]] = {}
    for kind in kinds:
        if source in kind.able:
            precisions = shared.setdefault(kind.weight_format, {})
            if kind.shared_format:
                precisions[kind.shared_format] = None
    return ", ".join(
        f"{name} ({' or '.join(precisions)})" if precisions else name
        for name, precisions in shared.items()
    )


def preferences(kinds: Iterable[Cell]) -> Table:
    """A table of the sources that run each kind of layer, in the order in which they are taken."""
    table = Table("format", "fused shared expert", "activation", title="Kernel sources of layers")
    table.add_column("taken: the first that is found")
    layers: dict[tuple[str, str], dict[str, dict[str, None]]] = {}
    for kind in kinds:
        layer = layers.setdefault((kind.weight_format, kind.shared_format or "none"), {})
        layer.setdefault(_order(kind), {})[kind.activation] = None
    # Shared precisions of a format for which all is alike stand in one row.
    rows: dict[tuple[str, str, str], list[str]] = {}
    for (form, shared), orders in layers.items():
        for order, labels in orders.items():
            activations = "all" if len(orders) == 1 else "; ".join(labels)
            rows.setdefault((form, activations, order), []).append(shared)
    for (form, activations, order), shared in rows.items():
        table.add_row(form, ", ".join(shared), activations, order)
    return table


def _order(kind: Cell) -> str:
    if kind.preferred is None:
        return "none"
    return ", ".join([kind.preferred, *(name for name in kind.able if name != kind.preferred)])


def print_fetched(console: Console, name: str, version: str | None) -> None:
    """Fetches a source with a progress bar and prints where it is.

    Raises:
        ValueError, BuildError: as `fetch_source`.
    """
    columns = (
        TextColumn(f"fetching {name}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("fetch", total=None)
        done = fetch_source(
            name, version, lambda got, total: progress.update(task, completed=got, total=total)
        )
    status = "was already there" if done.already else "fetched"
    text = f"{name} {done.version} {status}: {done.folder}"
    console.print(text, soft_wrap=True, markup=False, highlight=False)
