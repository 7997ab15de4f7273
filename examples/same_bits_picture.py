"""Draws what ``same_bits.py`` has found: the losses of a training that moved, on those of one that did not."""

from __future__ import annotations

from typing import Any

from fsshard.pictures import COLOURS, FAINT, GREY, draw_picture


def draw(path: str, moves: list[tuple[str, int, int]], moved: list[float], stayed: list[float]) -> None:
    """Write the picture.

    Args:
        path: where to.
        moves: engine, ranks, and the step up to which they trained.
        moved: losses of the training that moved, by step.
        stayed: losses of the one that did not.
    """
    draw_picture(path, (9, 3.4), lambda figure: paint(figure, moves, moved, stayed))


def paint(figure: Any, moves: list[tuple[str, int, int]], moved: list[float], stayed: list[float]) -> None:
    """Draw the curve of the run that never moved, wide and grey, and on it the parts of the other."""
    axes = figure.subplots()
    axes.semilogy(stayed, color=FAINT, linewidth=9, solid_capstyle="round")
    line = {"arrowstyle": "-", "color": GREY}
    axes.annotate("one rank, never moved", (14, stayed[14]), (3, 0.17), color=GREY, arrowprops=line)
    first = 0
    for (backend, ranks, until), colour in zip(moves, COLOURS, strict=False):
        last = min(until, len(moved) - 1)
        axes.semilogy(range(first, last + 1), moved[first : last + 1], color=colour, linewidth=2.5)
        name = "1 rank" if ranks == 1 else f"{ranks} ranks, {backend}"
        place = axes.get_xaxis_transform()
        axes.text((first + last) / 2, 0.95, name, color=colour, ha="center", weight="bold", transform=place)
        if first:
            axes.axvline(first, color=GREY, linestyle=":", linewidth=1)
        first = last
    axes.set(xlabel="step", ylabel="loss", ylim=(0.9 * min(stayed), 1.4 * max(stayed)))
    axes.set_yticks([0.2, 0.3, 0.4, 0.5], ["0.2", "0.3", "0.4", "0.5"])
    axes.minorticks_off()
