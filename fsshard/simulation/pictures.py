"""Plots estimates: memory by kind, per backend or over world sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fsshard.errors import MissingExtra
from fsshard.parity.render import check_picture, save_picture
from fsshard.simulation.tracking import KINDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["blank_figure", "figure", "plot", "style_axes", "unit_of"]

Estimate = Any
"""Of fsshard.simulation.result, which shows itself by what is here."""

COLOURS = {
    "parameters": "#0072B2",
    "buffers": "#999999",
    "optimizer state": "#56B4E9",
    "gradients": "#D55E00",
    "gathered units": "#009E73",
    "inputs": "#BBBBBB",
    "activations": "#E69F00",
    "temporaries": "#CC79A7",
}
"""Okabe and Ito's, which people with any colour vision tell apart."""

SCALES = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))


def plot(estimates: Sequence[Estimate], path: str | Path, at: int | None = None) -> None:
    """Write :func:`figure` to a .png, .svg or .pdf.

    Raises:
        ConfigurationError: the suffix names no kind of picture, or no file can be written there.
        MissingExtra: matplotlib is not installed.
    """
    path = check_picture(path)
    save_picture(figure(estimates, at), path)


def figure(estimates: Sequence[Estimate], at: int | None = None) -> Figure:
    """Stacked memory at the peak: a bar per backend, and below, where there are several world sizes, areas over them.

    Args:
        estimates: of one training; one for each backend and world size.
        at: world size of the bars; by default the first one.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    sizes = sorted({e.world_size for e in estimates})
    at = estimates[0].world_size if at is None else at
    backends = list(dict.fromkeys(e.backend for e in estimates))
    rows = 2 if len(sizes) > 1 else 1
    made = blank_figure(max(7.0, 1.2 + 3.4 * len(backends)), 1.0 + 4.2 * rows, "a picture of an estimate")
    parts: list[Any] = [made] if rows == 1 else list(cast(Any, made.subfigures(rows, 1)))
    bars, shown = parts[0].subplots(), [e for e in estimates if e.world_size == at]
    unit, scale = unit_of(max(e.peak for e in shown))
    _bars(bars, shown, scale)
    bars.set_title(f"{at} rank{'s' if at > 1 else ''}", fontsize=11)
    bars.set_ylabel(f"{unit} per rank at the peak")
    if rows == 2:
        grid = parts[1].subplots(1, len(backends), sharey=True, squeeze=False)[0]
        unit, scale = unit_of(max(e.peak for e in estimates))
        for axes, backend in zip(grid, backends, strict=True):
            _areas(axes, [e for e in estimates if e.backend == backend], scale)
        grid[0].set_ylabel(f"{unit} per rank at the peak")
    handles, labels = bars.get_legend_handles_labels()
    bars.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    over = "; marked numbers of ranks are simulated, between them are straight lines" if rows == 2 else ""
    made.suptitle(f"{estimates[0].name}{over}", fontsize=11, x=0.02, ha="left", parse_math=False)
    return made


def blank_figure(width: float, height: float, what: str) -> Figure:
    """Return a figure of so many inches; raise MissingExtra, which says what needs it, without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "plot", what) from error
    return Figure(figsize=(width, height), layout="constrained")


def unit_of(highest: int) -> tuple[str, float]:
    """Return the unit in which the largest of several sizes is shown, and its bytes."""
    return next((pair for pair in SCALES if highest >= pair[1]), ("B", 1.0))


def _kinds_drawn(estimates: Sequence[Estimate]) -> list[str]:
    return [kind for kind in KINDS if any(e.by_kind[kind] for e in estimates)]


def _areas(axes: Axes, estimates: Sequence[Estimate], scale: float) -> None:
    ordered = sorted(estimates, key=lambda e: e.world_size)
    sizes = [e.world_size for e in ordered]
    kinds = [kind for kind in KINDS if kind in COLOURS]
    layers = [[e.by_kind[kind] / scale for e in ordered] for kind in kinds]
    axes.stackplot(sizes, *layers, labels=kinds, colors=[COLOURS[kind] for kind in kinds], linewidth=0)
    axes.plot(sizes, [e.peak / scale for e in ordered], color="black", marker="o", markersize=3, linewidth=0.8)
    axes.plot(sizes, [e.bounds.peak / scale for e in ordered], color="black", linestyle=":", label="lower bound")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes], rotation=60, fontsize=8)
    axes.minorticks_off()
    axes.set_title(ordered[0].backend, fontsize=11)
    axes.set_xlabel("ranks")
    style_axes(axes)
    axes.tick_params(labelsize=9)


def _bars(axes: Axes, estimates: Sequence[Estimate], scale: float) -> None:
    names = [e.backend for e in estimates]
    places = range(len(names))
    bottom = [0.0] * len(names)
    for kind in _kinds_drawn(estimates):
        heights = [e.by_kind[kind] / scale for e in estimates]
        axes.bar(places, heights, bottom=bottom, color=COLOURS[kind], label=kind, width=0.62)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for place, e in zip(places, estimates, strict=True):
        low = e.bounds.peak / scale
        label = "lower bound" if place == 0 else None
        axes.plot([place - 0.38, place + 0.38], [low, low], color="black", linestyle=":", label=label)
    axes.set_xticks(list(places), names)
    style_axes(axes)
    axes.tick_params(labelsize=9)


def style_axes(axes: Axes, grid: Any = "y") -> None:
    """Draw a light grid behind, along one axis or ``"both"``, and no frame above and to the right."""
    axes.grid(True, axis=grid, color="#E6E6E6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
