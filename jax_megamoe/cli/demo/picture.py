"""The demo's picture: error by format, and load by expert."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_megamoe._files import replaced
from jax_megamoe.cli.demo.result import BOUNDS, FormatResult

_BLUE, _ORANGE, _GREY = "#2b6cb0", "#dd6b20", "#718096"
_RANKS = ("#2b6cb0", "#90cdf4")
"""Colours that take turns, rank by rank."""


def save_picture(path: Path, results: Sequence[FormatResult], num_ranks: int) -> None:
    """Draws two panels into a PNG file.

    Args:
        path: the file.
        results: one a format, the routing of all the same.
        num_ranks: ranks that the experts are spread over.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 (may be missing)
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(12, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    errors, loads = figure.subplots(1, 2, width_ratios=(1, 1.25))
    for axes in (errors, loads):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    _draw_errors(errors, results)
    _draw_loads(loads, results[0].counts, num_ranks)
    with replaced(path) as file:
        figure.savefig(file, format="png")


def _draw_errors(axes: Any, results: Sequence[FormatResult]) -> None:
    """Dots for errors and ticks for what is allowed, from 0 on a log scale that starts linear."""
    rows = np.arange(len(results))
    bounds = [BOUNDS[result.form] for result in results]
    exact, einsum = [r.error_exact for r in results], [r.error_einsum for r in results]
    series = (
        ("to the exact layer in float32", _BLUE, exact, [b.exact for b in bounds]),
        ("to einsum on the format's weights", _ORANGE, einsum, [b.einsum for b in bounds]),
    )
    axes.hlines(rows, -3e-6, exact, color=_GREY, linewidth=0.8, alpha=0.5)
    for label, color, errors, limits in series:
        axes.plot(errors, rows, "o", color=color, markersize=8, label=label, clip_on=False)
        axes.plot(limits, rows, "|", color=color, markersize=18, markeredgewidth=1.5)
        for row, error in zip(rows, errors, strict=True):
            axes.annotate(f"{error:.2g}", (error, row), ha="center", color=color, **_above(8))
    axes.plot([], [], "|", color=_GREY, markersize=12, markeredgewidth=1.5, label="allowed")
    axes.set_xscale("symlog", linthresh=1e-5, linscale=0.6)
    axes.set_xlim(-3e-6, max(1, *exact))
    axes.set_yticks(rows, [result.form for result in results])
    axes.set_ylim(len(results) - 0.5, -0.6)
    axes.grid(axis="x", alpha=0.25)
    axes.set_xlabel("relative error (Euclidean norms), log scale above $10^{-5}$")
    axes.set_title("Error of the output by format", loc="left", fontweight="bold")
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.46, -0.16), ncols=3, frameon=False, fontsize=8
    )


def _draw_loads(axes: Any, counts: np.ndarray, num_ranks: int) -> None:
    """A bar an expert, in turns of colour by rank, with the even share and each rank's sum."""
    experts = np.arange(len(counts))
    local = len(counts) // num_ranks
    axes.bar(experts, counts, width=0.85, color=[_RANKS[e // local % 2] for e in experts])
    even, top = counts.mean(), 1.2 * max(counts.max(), 1)
    axes.axhline(
        even, color=_ORANGE, linestyle="--", linewidth=1.2, label=f"even share: {even:.4g}"
    )
    axes.set_ylim(0, top)
    axes.set_xlim(-0.6, len(counts) - 0.4)
    axes.locator_params(integer=True)
    for rank, load in enumerate(counts.reshape(num_ranks, local).sum(1)):
        middle = rank * local + (local - 1) / 2
        axes.text(middle, 0.93 * top, f"rank {rank}\n{load}", ha="center", fontsize=8, color=_GREY)
    axes.set_xlabel("expert, coloured by the rank that holds it")
    axes.set_ylabel("tokens routed to the expert")
    axes.set_title("Load by expert, and the sum of each rank", loc="left", fontweight="bold")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False, fontsize=8)


def _above(points: int) -> dict[str, Any]:
    """Where and how large `annotate` writes a number above its mark."""
    return dict(xytext=(0, points), textcoords="offset points", fontsize=8)
