"""Steps of several trainings in turns, and the ratios of their times."""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

__all__ = ["WARM_UP", "Ratio", "Step", "Times", "interval", "measure", "pooled", "profiled"]

Step = Callable[[int], None]

WARM_UP = 5
"""Steps of each side that do not count."""


@dataclass(frozen=True)
class Ratio:
    """A median over rounds between the bounds of its 95% interval."""

    lower: float
    median: float
    upper: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.lower:.3f}, {self.upper:.3f}]"


@dataclass(frozen=True)
class Times:
    """Seconds of each counted step of one side, by the clock and of the processor."""

    wall: list[float]
    cpu: list[float]

    def milliseconds(self) -> tuple[float, float]:
        """Medians."""
        return 1e3 * statistics.median(self.wall), 1e3 * statistics.median(self.cpu)

    def over(self, other: Times) -> tuple[Ratio, Ratio]:
        """This side's time by the other's, by the clock and of the processor."""
        pairs = ((self.wall, other.wall), (self.cpu, other.cpu))
        return tuple(interval([a / b for a, b in zip(*pair, strict=True)]) for pair in pairs)  # type: ignore[return-value]


def interval(ratios: Sequence[float]) -> Ratio:
    """The median and its 95% interval by order statistics."""
    ordered, reach = sorted(ratios), 0.98 * len(ratios) ** 0.5
    low, high = round(len(ratios) / 2 - reach) - 1, round(len(ratios) / 2 + reach)
    return Ratio(ordered[max(low, 0)], statistics.median(ratios), ordered[min(high, len(ratios) - 1)])


def measure(sides: Sequence[Step], rounds: int) -> list[Times]:
    """A step of each side per round, after a barrier; every side is first equally often. Collective."""
    found = [Times([], []) for _ in sides]
    for number in range(rounds + WARM_UP):
        order = [(number + place) % len(sides) for place in range(len(sides))]
        for which in order:
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            sides[which](number)
            if number >= WARM_UP:
                found[which].wall.append(time.perf_counter() - wall)
                found[which].cpu.append(time.process_time() - cpu)
    return found


def profiled(
    sides: Sequence[Step], rounds: int, shown: int, clock: Callable[[], float] = time.process_time
) -> list[str]:
    """Rows of the functions of this rank that take most time themselves, in steps of the last side. Collective.

    Args:
        sides: how they step; the profiler slows Python's functions down and not torch's, alike on every side.
        rounds: of each.
        shown: rows, each with the milliseconds of a step on every side, and the function.
        clock: what they are counted by; ``time.perf_counter`` shows waiting too.
    """
    found: list[dict[str, float]] = []
    for side in sides:
        profile = cProfile.Profile(clock)
        profile.enable()
        for number in range(rounds):
            side(number)
        profile.disable()
        own: dict[str, float] = {}
        for (file, _, name), (_, _, seconds, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
            place = "/".join(Path(file).parts[-2:]) + " " if file != "~" else ""
            own[place + name] = own.get(place + name, 0.0) + 1e3 * seconds / rounds
        found.append(own)
    most = sorted(found[-1], key=lambda name: -found[-1][name])[:shown]
    totals = [sum(own.values()) for own in found]
    rows = [(*(own.get(name, 0.0) for own in found), name) for name in most]
    return ["".join(f"{cell:>10.2f}" for cell in row[:-1]) + f"  {row[-1]}" for row in [(*totals, "in all"), *rows]]


def pooled(starts: Iterable[Times]) -> Times:
    """The times of several starts of the ranks as of one."""
    seen = list(starts)
    return Times([t for each in seen for t in each.wall], [t for each in seen for t in each.cpu])
