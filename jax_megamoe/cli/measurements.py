"""A table of measurements, for a terminal and as a Markdown page that says where it comes from."""

import datetime
import os
import platform
import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import jax
from rich import box
from rich.table import Table


@dataclass(frozen=True)
class Measurements:
    """What one run measured, as text.

    Attributes:
        title: of the page.
        heading: what was measured, at which sizes.
        notes: how it was measured, and what the columns say.
        columns: their heads; the first column names the row.
        rows: a text for each column.
    """

    title: str
    heading: str
    notes: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def table(self) -> Table:
        """For a terminal of 80 columns or more."""
        drawn = Table(title=self.heading, box=box.SIMPLE_HEAD, padding=0)
        for number, name in enumerate(self.columns):
            drawn.add_column(name, justify="right" if number else "left", no_wrap=True)
        for row in self.rows:
            drawn.add_row(*row)
        return drawn

    def markdown(self, arguments: str) -> str:
        """A page that also says how, when and on what it was measured.

        Args:
            arguments: of `python -m jax_megamoe`, as given.
        """
        now = datetime.datetime.now(datetime.UTC)
        lines = [
            f"# {self.title}",
            "",
            f"`python -m jax_megamoe {arguments}`, {now:%Y-%m-%d}. {_processor()}, "
            f"{os.cpu_count()} CPUs; Python {platform.python_version()}, jax {jax.__version__}, "
            f"jaxlib {version('jaxlib')}.",
            "",
            f"{self.heading}. {self.notes}",
            "",
            f"| {' | '.join(self.columns)} |",
            f"|---|{'---:|' * (len(self.columns) - 1)}",
            *(f"| {' | '.join(row)} |" for row in self.rows),
        ]
        return "\n".join([*lines, ""])


def _processor() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", info.read_text(), re.M) if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()
