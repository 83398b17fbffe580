"""`python -m jax_megamoe sources`: where kernels come from, and what each source can run."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

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
from jax_megamoe.deep_gemm import check_supported
from jax_megamoe.devices import KNOWN_DEVICES
from jax_megamoe.formats import WEIGHT_FORMATS

_ACTIVATIONS = (
    ("swiglu", Activation("swiglu")),
    ("GPT-OSS's swiglu", Activation("swiglu", alpha=1.702, beta=1.0)),
    ("situ", Activation("situ")),
    ("any alpha, beta", Activation("swiglu", alpha=1.5, beta=0.5)),
    ("any alpha, beta", Activation("situ", alpha=2.0, beta=3.0)),
)
"""Activations to ask for; those of any parameters by examples that no model has."""

_DEVICES = {"sm100": KNOWN_DEVICES["b200"], "sm90": KNOWN_DEVICES["h200"]}


@dataclass(frozen=True)
class Cell:
    """A kind of layer, and the kernel sources that can run it.

    Attributes:
        weight_format: name of the weight format.
        shared_format: precision of its fused shared expert; None: without one.
        activation: what of activations it is.
        taken: the source that its calls take; None: none.
        asked: those that run it if `MoEConfig(kernel_source=...)` asks for them.
    """

    weight_format: str
    shared_format: str | None
    activation: str
    taken: str | None
    asked: tuple[str, ...]


def cells() -> Iterator[Cell]:
    """Every kind of layer, as the planners and `check_supported` decide it for a small one."""
    for form in WEIGHT_FORMATS.values():
        for shared in (None, *form.shared_formats):
            for label, activation in _ACTIVATIONS:
                if activation.name not in form.activations:
                    continue
                config = MoEConfig(
                    num_experts=8,
                    top_k=2,
                    hidden_size=1024,
                    intermediate_size=512,
                    max_num_tokens=128,
                    weight_format=form,
                    activation=activation,
                    num_shared_experts=int(shared is not None),
                    shared_format=shared,
                )
                asked = (_source(replace(config, kernel_source=name)) for name in DISTRIBUTIONS)
                runs = tuple(name for name in asked if name is not None)
                yield Cell(form.name, shared, label, _source(config), runs)


def _source(config: MoEConfig) -> str | None:
    """The source that a config's calls take, None if none can run it."""
    try:
        return check_supported(config, _DEVICES[config.weight_format.architecture])
    except (NotImplementedError, ValueError):
        return None


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
        if source in kind.asked:
            precisions = shared.setdefault(kind.weight_format, {})
            if kind.shared_format:
                precisions[kind.shared_format] = None
    return ", ".join(
        f"{name} ({' or '.join(precisions)})" if precisions else name
        for name, precisions in shared.items()
    )


def preferences(kinds: Iterable[Cell]) -> Table:
    """A table of the source that is taken for each kind of layer, and of those to ask for."""
    title = "The kernel source of a layer, installed or not"
    table = Table("format", "fused shared expert", "activation", title=title)
    table.add_column("taken")
    table.add_column("if asked for: kernel_source=")
    layers: dict[tuple[str, str], dict[tuple[str, str], dict[str, None]]] = {}
    for kind in kinds:
        others = ", ".join(name for name in kind.asked if name != kind.taken)
        layer = layers.setdefault((kind.weight_format, kind.shared_format or "none"), {})
        layer.setdefault((kind.taken or "none", others or "-"), {})[kind.activation] = None
    # Shared precisions of a format for which all is alike stand in one row.
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for (form, shared), answers in layers.items():
        for answer, labels in answers.items():
            activations = "all" if len(answers) == 1 else "; ".join(labels)
            rows.setdefault((form, activations, *answer), []).append(shared)
    for (form, activations, taken, others), shared in rows.items():
        table.add_row(form, ", ".join(shared), activations, taken, others)
    return table


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
