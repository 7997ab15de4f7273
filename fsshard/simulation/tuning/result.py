"""The result of a search: what it has tried, and which of it is best."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsshard.parity.render import check_picture, save_picture
from fsshard.simulation.result import Estimate
from fsshard.simulation.tuning import pictures, render
from fsshard.simulation.tuning.search_space import Candidate

__all__ = ["Tried", "TuneResult", "best"]


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
        """The most bytes that a rank can need."""
        return self.estimate.interval[1]

    @property
    def collectives(self) -> int:
        """Per step."""
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
        """The plans that no other one beats in memory without sending more, in more collectives, or computing more.

        The one with the least peak first.
        """
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
        """The winner as code to paste: ``model`` is the bare model before it, and wrapped after it."""
        candidate = self.winner.candidate
        head = "\n".join(candidate.imports())
        return f"{head}\n\nmodel = fsshard.wrap(\n    model,\n{candidate.code(lines=True)})\n"

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """The frontier, the plans that are always tried, and the winner as code."""
        return render.text(self)

    def to_json(self) -> str:
        """Everything as JSON, sizes in bytes."""
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
        save_picture(pictures.figure(self), path)


NEGLIGIBLE = 1.001
"""Peaks that differ by a thousandth are as good as equal, so that what they cost decides."""


def best(tried: Sequence[Tried], memory: int | None) -> Tried | None:
    """The winner; None if there is a bound and nothing fits. The first one tried of equals.

    Without a bound, the cheapest of those with nearly the least peak, none above what is always tried.
    """
    if not tried:
        return None
    if memory is not None:
        return min((one for one in tried if one.peak <= memory), key=lambda one: (one.cost, one.peak), default=None)
    near = NEGLIGIBLE * min(one.peak for one in tried)
    most = min([near, *(one.peak for one in tried if one.name)])
    return min((one for one in tried if one.peak <= most), key=lambda one: (one.cost, one.peak))


def _beats(other: Tried, one: Tried) -> bool:
    """At least as good in everything, and better in something."""
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
