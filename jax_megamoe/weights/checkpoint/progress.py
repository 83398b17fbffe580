"""The bar that shows how much of a checkpoint was read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import jax
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


@contextmanager
def progress_bar(show: bool, prefix: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar of `total` bytes on process 0, on standard error; yields what advances it."""
    if not show or jax.process_index() != 0:
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, TransferSpeedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(prefix, total=total)
        yield partial(bar.advance, task)
