"""benchmarks/plan_order.py: its plans, and its correlation."""

from __future__ import annotations

import pytest

from benchmarks.plan_order import correlation, name_of, plans


def test_there_are_enough_plans_and_each_is_another() -> None:
    assert len({name_of(settings) for settings in plans()}) == len(plans()) >= 20


def test_rank_correlation() -> None:
    assert correlation([1.0, 2.0, 3.0], [10.0, 20.0, 21.0]) == pytest.approx(1.0)
    assert correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1.0)
    assert correlation([1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0]) == pytest.approx(0.8)  # 1 - 6 * 2 / (4 * 15)
    assert correlation([1.0, 1.0, 2.0], [1.0, 1.0, 2.0]) == pytest.approx(1.0)  # ties share a rank
