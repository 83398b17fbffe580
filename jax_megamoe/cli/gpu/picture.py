"""Time of a layer against tokens, with what the GPU allows at least."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_megamoe._files import replaced
from jax_megamoe.cli.gpu.result import OURS, Ceilings, Timing, series_of, title_of

_COLORS = ("#2b6cb0", "#dd6b20", "#2f855a", "#805ad5", "#b83280", "#975a16")
_PEER, _FLOOR = "#718096", "#a0aec0"
_MARKS = {"deep_gemm": "o", "grouped": "s", "xla": "v", "reference": "."}
_PEER_MARKS = "^D*Xph"
_WIDTH, _HEIGHT = 4.6, 4.4


def save_picture(
    path: Path,
    timings: Sequence[Timing],
    ceilings: Ceilings,
    *,
    models: Sequence[str] | None = None,
    caption: str = "",
) -> None:
    """Draws a panel for each model into a PNG file: us by tokens, both axes logarithmic.

    Args:
        path: the file.
        timings: of one number of ranks.
        ceilings: of the same GPU.
        models: names of those to draw, in order; None: all.
        caption: a line below.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 (may be missing)
    from matplotlib.figure import Figure  # noqa: PLC0415

    ran = [each for each in timings if each.microseconds is not None]
    names = list(dict.fromkeys(each.model for each in ran)) if models is None else list(models)
    size = (max(6.0, _WIDTH * len(names)), _HEIGHT + 0.9)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    drawn = [each for each in ran if each.model in names]
    shown = sorted(series_of(drawn), key=lambda series: series[0] not in OURS)
    limits = _limits(drawn, ceilings)
    for axes, name in zip(panels, names, strict=True):
        _draw(axes, [each for each in drawn if each.model == name], shown, ceilings, limits)
        axes.set_title(title_of(name), loc="left", fontweight="bold", fontsize=10)
    panels[0].set_ylabel("microseconds of a layer")
    handles: dict[str, Any] = {}
    for axes in panels:
        lines, labels = axes.get_legend_handles_labels()
        handles.update(zip(labels, lines, strict=True))
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8
    )
    if caption:
        figure.suptitle(caption, fontsize=8, color=_PEER, x=0.01, ha="left")
    with replaced(path) as file:
        figure.savefig(file, format="png")


def _limits(timings: Sequence[Timing], ceilings: Ceilings) -> tuple[float, float]:
    """The range of all panels: that of the times and of the copies below them."""
    times = [each.microseconds for each in timings if each.microseconds is not None]
    copies = [1e6 * each.weight_bytes / ceilings.copy_bytes_per_second for each in timings]
    return 0.7 * min(*times, *(each or max(times) for each in copies)), 1.5 * max(times)


def _draw(
    axes: Any,
    timings: Sequence[Timing],
    shown: Sequence[tuple[str, str]],
    ceilings: Ceilings,
    limits: tuple[float, float],
) -> None:
    recipes = list(dict.fromkeys(recipe for name, recipe in shown if name in OURS))
    peers = list(dict.fromkeys(each for each in shown if each[0] not in OURS))
    for series in shown:
        implementation, recipe = series
        found = sorted((e for e in timings if e.series == series), key=lambda each: each.num_tokens)
        if not found:
            continue
        color, style, mark = _PEER, "--", "^"
        if implementation in OURS:
            color = _COLORS[recipes.index(recipe) % len(_COLORS)]
            style, mark = "-", _MARKS[implementation]
        else:
            mark = _PEER_MARKS[peers.index(series) % len(_PEER_MARKS)]
        axes.plot(
            [each.num_tokens for each in found],
            [each.microseconds for each in found],
            style,
            color=color,
            marker=mark,
            markersize=5,
            linewidth=1.4,
            label=f"{implementation} {recipe}",
        )
    colors = {recipe: _COLORS[n % len(_COLORS)] for n, recipe in enumerate(recipes)}
    _draw_copy(axes, timings, colors, ceilings)
    _draw_rates(axes, timings, recipes, ceilings, limits[0])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(*limits)
    counts = sorted({each.num_tokens for each in timings})
    axes.set_xticks(counts, [str(each) for each in counts], fontsize=7)
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(alpha=0.2)
    axes.set_xlabel("tokens")


def _of_recipe(timings: Sequence[Timing], recipe: str) -> list[Timing]:
    """One timing of the recipe for each number of tokens with known work."""
    known = {each.num_tokens: each for each in timings if each.recipe == recipe and each.flops}
    return [known[count] for count in sorted(known)]


def _draw_copy(
    axes: Any, timings: Sequence[Timing], colors: dict[str, str], ceilings: Ceilings
) -> None:
    """The time to read each recipe's experts, dotted."""
    drawn: list[list[float]] = []
    for recipe, color in colors.items():
        work = _of_recipe(timings, recipe)
        read = [1e6 * each.weight_bytes / ceilings.copy_bytes_per_second for each in work]
        # Recipes of the same weights have one line.
        if len(read) < 2 or any(abs(read[-1] - other[-1]) < 0.01 * other[-1] for other in drawn):
            continue
        drawn.append(read)
        counts = [each.num_tokens for each in work]
        axes.plot(counts, read, ":", color=color, linewidth=1.2, label=f"copy rate, {recipe}")


def _draw_rates(
    axes: Any, timings: Sequence[Timing], recipes: Sequence[str], ceilings: Ceilings, low: float
) -> None:
    """The time to multiply at each rate of the tensor cores, where it is above `low`."""
    rates = {ceilings.flop_rate(recipe): recipe for recipe in reversed(recipes)}
    for rate, recipe in rates.items():
        work = _of_recipe(timings, recipe)
        if not rate or len(work) < 2:
            continue
        per_token = 1e6 * work[-1].flops / work[-1].num_tokens / rate
        counts = [max(work[0].num_tokens, low / per_token), work[-1].num_tokens]
        name = "fp8" if rate == ceilings.fp8_flops else "bf16"
        style = (0, (1, 1)) if name == "bf16" else "-."
        axes.plot(counts, [per_token * count for count in counts], linestyle=style, color=_FLOOR,
                  linewidth=1.2, label=f"{name} FLOP rate")  # fmt: skip
