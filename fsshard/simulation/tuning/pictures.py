"""Plots a search: peak memory against traffic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from fsshard.simulation.pictures import blank_figure, style_axes, unit_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure"]

Tried: TypeAlias = Any
TuneResult: TypeAlias = Any
"""Of fsshard.simulation.tuning.result, which shows itself by what is here."""

PLAIN, AGAIN, BEST = "#0072B2", "#E69F00", "#D55E00"


def figure(result: TuneResult) -> Figure:
    """A point per plan that was simulated, a line through the frontier, and the bound if there is one.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    made = blank_figure(9.0, 5.2, "a picture of a search")
    unit, scale = unit_of(max(one.peak for one in result.tried))
    axes = made.subplots()
    for colour, label, again in ((PLAIN, "nothing recomputed", False), (AGAIN, "blocks recomputed", True)):
        points = [_point(one, scale) for one in result.tried if bool(one.recomputed) is again]
        if points:
            axes.plot(*zip(*points, strict=True), "o", color=colour, label=label, markersize=6, zorder=3)
    line = _lowest(result, scale)
    axes.step(*zip(*line, strict=True), where="post", color="black", linewidth=0.9, label="frontier", zorder=2)
    x, y = _point(result.winner, scale)
    axes.scatter([x], [y], facecolors="none", edgecolors=BEST, s=150, linewidths=1.8, label="winner", zorder=4)
    if result.memory is not None:
        axes.axhline(result.memory / scale, color="black", linestyle=":", label="memory bound")
    _name_points(axes, result, scale)
    axes.set_xlabel("sent by a rank per step, in units of the parameters' bytes")
    axes.set_ylabel(f"{unit} per rank at the peak")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.12)
    style_axes(axes, "both")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    ranks = f"{result.world_size} rank{'s' if result.world_size > 1 else ''}"
    axes.set_title(f"{result.name} on {ranks}: {len(result.tried)} plans", fontsize=11, loc="left", parse_math=False)
    return made


def _point(one: Tried, scale: float) -> tuple[float, float]:
    return one.estimate.sent / one.estimate.parameters, one.peak / scale


def _lowest(result: TuneResult, scale: float) -> list[tuple[float, float]]:
    """The least peak for what may be sent, from left to right."""
    line: list[tuple[float, float]] = []
    for x, y in sorted(_point(one, scale) for one in result.tried):
        if not line or y < line[-1][1]:
            line.append((x, y))
    return line


def _name_points(axes: Any, result: TuneResult, scale: float) -> None:
    """Plans that are always tried; several names of one plan side by side."""
    names: dict[tuple[float, float], list[str]] = {}
    for name, one in result.aliases.items():
        names.setdefault(_point(one, scale), []).append(name)
    for place, found in names.items():
        axes.annotate(", ".join(found), place, xytext=(6, 5), textcoords="offset points", fontsize=8, parse_math=False)
