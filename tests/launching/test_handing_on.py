"""What a process hands on reaches those that it starts, and those that are there already."""

from __future__ import annotations

from typing import Any

import pytest

import fsshard
from fsshard.launching import handing_on

_taken: list[object] = []


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handing_on, "_handed", {})


def take(value: object) -> None:
    _taken.append(value)


def taken() -> list[object]:
    return list(_taken)


def test_what_is_handed_on_last_counts() -> None:
    handing_on.hand_on("a", take, 1)
    handing_on.hand_on("b", take, 2)
    handing_on.hand_on("a", take, 3)
    assert handing_on.handed_on() == ((take, 3), (take, 2))
    before = taken()
    handing_on.take_over(handing_on.handed_on())
    assert taken() == [*before, 3, 2]


def test_ranks_that_wait_for_work_hear_of_it(ranks: Any) -> None:
    assert ranks.run(taken, 1) == [[]]
    handing_on.hand_on("a", take, "news")
    assert ranks.run(taken, 1) == [["news"]]


def job(ctx: fsshard.Context) -> list[object]:
    return taken()


@pytest.mark.long
def test_launched_processes_hear_of_it() -> None:
    handing_on.hand_on("a", take, "news")
    assert fsshard.launch(job, nprocs=1 + 1) == ["news"]
