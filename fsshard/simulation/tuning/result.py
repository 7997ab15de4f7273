"""The result of a search: what it has tried, which of it is best, and how that is shown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsshard.pictures import check_picture, save_picture
from fsshard.planning.text import aligned, size
from fsshard.simulation.result import Estimate, blank_figure, style_axes, unit_of
from fsshard.simulation.tuning.search_space import Candidate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Tried", "TuneResult", "best", "figure"]

HEAD = ["peak", "sent", "of P", "collectives", "recomputed", "peak at", "plan"]
PLAIN, AGAIN, BEST = "#0072B2", "#E69F00", "#D55E00"


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A plan that was simulated.

    Attributes:
        candidate: how it is asked for.
        name: what it is called if it is one of those that are always tried (``"auto"``, ``"one unit"``), else ``""``.
        recomputed: number of blocks whose activations are computed again.
        estimate: what the estimator says of it.
    """

    candidate: Candidate
    name: str
    recomputed: int
    estimate: Estimate

    @property
    def peak(self) -> int:
        """Return the most bytes that a rank can need."""
        return self.estimate.interval[1]

    @property
    def collectives(self) -> int:
        """Return their number per step."""
        return sum(traffic.count for traffic in self.estimate.collectives)

    @property
    def cost(self) -> tuple[int, int, bool]:
        """Return the price of needing less memory: bytes sent, collectives, and whether something is computed twice."""
        return self.estimate.sent, self.collectives, bool(self.recomputed)


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """The result of :func:`fsshard.tune`: the plans that were simulated, and the best of them.

    Attributes:
        name: of what is trained.
        world_size: ranks of the job.
        memory: bytes that a rank may need, or None: the least was looked for.
        winner: the plan that sends least, in the fewest collectives, of those that fit ``memory``; without a bound,
            the one with the least peak (give or take a thousandth). Of equals the one that computes nothing twice.
        tried: all, in the order in which they were simulated.
        aliases: names of those that are always tried -> the plan that each turned out to be.
        failed: candidates that cannot be, and why.
    """

    name: str
    world_size: int
    memory: int | None
    winner: Tried
    tried: tuple[Tried, ...]
    aliases: Mapping[str, Tried]
    failed: Mapping[str, str]

    @property
    def frontier(self) -> tuple[Tried, ...]:
        """Return the plans that no other beats in memory for the same cost, the one with the least peak first."""
        best = (one for one in self.tried if not any(_beats(other, one) for other in self.tried))
        found: dict[Any, Tried] = {}  # of equals the first one
        for one in sorted(best, key=lambda one: (one.peak, one.cost)):
            found.setdefault((one.peak, one.cost), one)
        return tuple(found.values())

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of :func:`fsshard.wrap` that give the winner."""
        return {"backend": self.winner.candidate.backend, **self.winner.candidate.arguments()}

    def code(self) -> str:
        """Return the winner as code to paste: ``model`` is the bare model before it, and wrapped after it."""
        candidate = self.winner.candidate
        head = "\n".join(candidate.imports())
        return f"{head}\n\nmodel = fsshard.wrap(\n    model,\n{candidate.code(lines=True)})\n"

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Return the frontier, the plans that are always tried, and the winner as code."""
        known = list(self.aliases.items())
        goal = "the least peak" if self.memory is None else f"the least traffic within {size(self.memory)}"
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        rows = [_row(self, one, "") for one in self.frontier]
        others = [_row(self, one, f"{name}: ") for name, one in known]
        lines = aligned([["", *HEAD], *rows, *others])
        return "\n".join(
            [
                f"{self.name} on {ranks}: {goal}; {len(self.tried)} plans simulated; P is "
                f"{size(self.winner.estimate.parameters)}, that of all parameters",
                "",
                "the frontier: nothing else needs less without sending more, in more collectives, or computing more "
                "twice",
                *lines[: 1 + len(rows)],
                "",
                "always tried:",
                *lines[1 + len(rows) :],
                *(f"could not be: {code}: {why}" for code, why in self.failed.items()),
                "",
                "the winner (*):",
                "",
                self.code().rstrip(),
            ]
        )

    def to_json(self) -> str:
        """Return everything as JSON, sizes in bytes."""
        return json.dumps(
            {
                "name": self.name,
                "world_size": self.world_size,
                "memory": self.memory,
                "winner": {**_as_dict(self.winner), "estimate": json.loads(self.winner.estimate.to_json())},
                "code": self.code(),
                "frontier": [_as_dict(one) for one in self.frontier],
                "always tried": {name: _as_dict(one) for name, one in self.aliases.items()},
                "tried": [_as_dict(one) for one in self.tried],
                "failed": dict(self.failed),
            },
            indent=1,
        )

    def plot(self, path: str | Path) -> None:
        """Draw peak against traffic of all plans to a .png, .svg or .pdf.

        Raises:
            ConfigurationError: the suffix names no kind of picture, or no file can be written there.
            MissingExtra: matplotlib is not installed.
        """
        path = check_picture(path)
        save_picture(figure(self), path)


NEGLIGIBLE = 1.001
"""Peaks that differ by a thousandth are as good as equal, so that what they cost decides."""


def best(tried: Sequence[Tried], memory: int | None) -> Tried | None:
    """Return the winner, of equals the first one tried; None if there is a bound and nothing fits."""
    if not tried:
        return None
    if memory is not None:
        return min((one for one in tried if one.peak <= memory), key=lambda one: (one.cost, one.peak), default=None)
    # Without a bound the cheapest of those with nearly the least peak, none above what is always tried.
    near = NEGLIGIBLE * min(one.peak for one in tried)
    most = min([near, *(one.peak for one in tried if one.name)])
    return min((one for one in tried if one.peak <= most), key=lambda one: (one.cost, one.peak))


def _beats(other: Tried, one: Tried) -> bool:
    """Return whether ``other`` is at least as good in everything, and better in something."""
    theirs, its = (other.peak, *other.cost), (one.peak, *one.cost)
    return theirs != its and all(a <= b for a, b in zip(theirs, its, strict=True))


def _as_dict(one: Tried) -> dict[str, Any]:
    return {
        "settings": one.candidate.code(),
        "name": one.name,
        "peak": one.peak,
        "sent": one.estimate.sent,
        "collectives": one.collectives,
        "recomputed": one.recomputed,
        "moment": asdict(one.estimate.moment),
    }


def _row(result: TuneResult, one: Tried, name: str) -> list[str]:
    return [
        "*" if one is result.winner else "",
        size(one.peak),
        size(one.estimate.sent),
        f"{one.estimate.sent / one.estimate.parameters:.2f}",
        str(one.collectives),
        f"{one.recomputed} block{'' if one.recomputed == 1 else 's'}" if one.recomputed else "-",
        str(one.estimate.moment),
        f"{name}{one.candidate.code()}",
    ]


def figure(result: TuneResult) -> Figure:
    """Draw a point per plan that was simulated, a line through the frontier, and the bound if there is one."""
    made = blank_figure(9.0, 5.2)
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
    """Return the least peak for what may be sent, from left to right."""
    line: list[tuple[float, float]] = []
    for x, y in sorted(_point(one, scale) for one in result.tried):
        if not line or y < line[-1][1]:
            line.append((x, y))
    return line


def _name_points(axes: Any, result: TuneResult, scale: float) -> None:
    """Name the plans that are always tried; several names of one plan side by side."""
    names: dict[tuple[float, float], list[str]] = {}
    for name, one in result.aliases.items():
        names.setdefault(_point(one, scale), []).append(name)
    for place, found in names.items():
        axes.annotate(", ".join(found), place, xytext=(6, 5), textcoords="offset points", fontsize=8, parse_math=False)
