"""benchmarks/pairs.py: whose turn it is, and what is made of the times."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from benchmarks import pairs
from benchmarks.pairs import WARM_UP, Times, interval, measure


def test_every_side_is_first_equally_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs.dist, "barrier", lambda: None)
    turns = []
    steps = [lambda number, side=side: turns.append((number, side)) for side in range(3)]
    found = measure(steps, 6)
    assert [len(times.wall) for times in found] == [len(times.cpu) for times in found] == [6, 6, 6]
    rounds = [[side for number, side in turns if number == each] for each in range(6 + WARM_UP)]
    assert all(sorted(sides) == [0, 1, 2] for sides in rounds)
    first = [sides[0] for sides in rounds[WARM_UP:]]
    assert [first.count(side) for side in range(3)] == [2, 2, 2]


def test_ratio_is_the_median_of_pairs() -> None:
    wall, cpu = Times([2.0, 3.0, 40.0], [1.0, 1.0, 1.0]).over(Times([1.0, 1.0, 10.0], [2.0, 2.0, 2.0]))
    assert (wall.median, cpu.median) == (3.0, 0.5)
    assert str(wall) == "3.000 [2.000, 4.000]"


def test_interval_by_order_statistics() -> None:
    """For 40 values the bounds have the ranks 20 -+ 0.98 sqrt(40), counted from 1."""
    found = interval([float(value) for value in range(40)])
    assert (found.lower, found.median, found.upper) == (13.0, 19.5, 26.0)


def test_profiles_show_where_the_last_side_takes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A room of fsshard in one row; what all sides do alike is not among them. The clock counts its readings."""
    ticks = itertools.count()
    monkeypatch.setattr(pairs, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))

    def alike(_: int) -> None:
        sum(range(10))

    def more(number: int) -> None:
        alike(number)
        sorted(range(10), key=str)

    total, *rows = pairs.profiled([alike, more], 2, 2)
    assert total.endswith("in all") and any("sorted" in row for row in rows) and not any("sum" in row for row in rows)
    place = pairs._place(str(pairs.ROOT / "fsshard" / "sharded" / "module.py"), "forward")
    assert place == "fsshard/sharded, all functions"
