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

ROOT = Path(__file__).resolve().parent.parent

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


def profiled(sides: Sequence[Step], rounds: int, shown: int) -> list[str]:
    """Rows of the functions in which the last side spends more than another one, by the clock. Collective.

    A room of fsshard is one row. Waiting for other ranks is in them, and the profiler slows Python's functions down
    and not torch's, alike on every side.

    Args:
        sides: how they step.
        rounds: of each.
        shown: rows, most first, each with the milliseconds of a step on every side, and the function.
    """
    found: list[dict[str, float]] = []
    for side in sides:
        profile = cProfile.Profile(time.perf_counter)
        profile.enable()
        for number in range(rounds):
            side(number)
        profile.disable()
        own: dict[str, float] = {}
        for (file, _, function), (_, _, seconds, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
            name = _place(file, function)
            own[name] = own.get(name, 0.0) + 1e3 * seconds / rounds
        found.append(own)
    *others, last = found
    more = {name: taken - min((own.get(name, 0.0) for own in others), default=0.0) for name, taken in last.items()}
    most = sorted(more, key=lambda name: -more[name])[:shown]
    totals = [sum(own.values()) for own in found]
    rows = [(*(own.get(name, 0.0) for own in found), name) for name in most]
    return ["".join(f"{cell:>10.2f}" for cell in row[:-1]) + f"  {row[-1]}" for row in [(*totals, "in all"), *rows]]


def _place(file: str, function: str) -> str:
    """A room of fsshard, or a function and the end of its file's path; torch's own have none."""
    parts = Path(file).parts
    if str(ROOT / "fsshard") in file:
        return f"fsshard/{Path(file).relative_to(ROOT / 'fsshard').parts[0]}, all functions"
    return f"{'/'.join(parts[-2:])} {function}" if file != "~" else function


def pooled(starts: Iterable[Times]) -> Times:
    """The times of several starts of the ranks as of one."""
    seen = list(starts)
    return Times([t for each in seen for t in each.wall], [t for each in seen for t in each.cpu])
