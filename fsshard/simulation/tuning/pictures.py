"""Plots a search: peak memory against traffic."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsshard.errors import MissingExtra
from fsshard.parity.render import check_picture, save_picture
from fsshard.simulation.tuning.tried import Tried, TriedPlans

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure", "plot"]

PLAIN, AGAIN, BEST = "#0072B2", "#E69F00", "#D55E00"
SCALES = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))


def plot(result: TriedPlans, path: str | Path) -> None:
    """Write :func:`figure` to a .png, .svg or .pdf.

    Raises:
        ConfigurationError: the suffix names no kind of picture, or no file can be written there.
        MissingExtra: matplotlib is not installed.
    """
    path = check_picture(path)
    save_picture(figure(result), path)


def figure(result: TriedPlans) -> Figure:
    """A point per plan that was simulated, a line through the frontier, and the bound if there is one.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "plot", "a picture of a search") from error
    highest = max(one.peak for one in result.tried)
    unit, scale = next((pair for pair in SCALES if highest >= pair[1]), ("B", 1.0))
    made = Figure(figsize=(9.0, 5.2), layout="constrained")
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
    axes.grid(True, color="#E6E6E6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    ranks = f"{result.world_size} rank{'s' if result.world_size > 1 else ''}"
    axes.set_title(f"{result.name} on {ranks}: {len(result.tried)} plans", fontsize=11, loc="left", parse_math=False)
    return made


def _point(one: Tried, scale: float) -> tuple[float, float]:
    return one.estimate.sent / one.estimate.parameters, one.peak / scale


def _lowest(result: TriedPlans, scale: float) -> list[tuple[float, float]]:
    """The least peak for what may be sent, from left to right."""
    line: list[tuple[float, float]] = []
    for x, y in sorted(_point(one, scale) for one in result.tried):
        if not line or y < line[-1][1]:
            line.append((x, y))
    return line


def _name_points(axes: Any, result: TriedPlans, scale: float) -> None:
    """Plans that are always tried; several names of one plan side by side."""
    names: dict[tuple[float, float], list[str]] = {}
    for name, one in result.aliases.items():
        names.setdefault(_point(one, scale), []).append(name)
    for place, found in names.items():
        axes.annotate(", ".join(found), place, xytext=(6, 5), textcoords="offset points", fontsize=8, parse_math=False)
