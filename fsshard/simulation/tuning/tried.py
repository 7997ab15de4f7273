"""What a search has tried, as plain data, and which of it is best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsshard.simulation.result import Estimate
from fsshard.simulation.tuning.search_space import Candidate

__all__ = ["Tried", "TriedPlans", "best"]


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
        """What it costs to need less memory: bytes sent, collectives, and whether something is computed twice."""
        return self.estimate.sent, self.collectives, bool(self.recomputed)


@dataclass(frozen=True, kw_only=True)
class TriedPlans:
    """The plans that were simulated, and the best of them.

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
