"""wrap(auto_wrap_policy="tuned") on ranks."""

from __future__ import annotations

from typing import Any

import pytest

import fsshard
from fsshard.errors import ConfigurationError
from tests.simulation.tuning.recipes import Tower, refused, wrapped_tuned


def test_every_rank_has_the_plan_that_rank_0_found(ranks: Any) -> None:
    first, second = ranks.run(wrapped_tuned, 2, timeout=600)  # the others wait while rank 0 simulates
    assert first == second
    units, recomputed, _ = first
    assert len(units) > 1 or recomputed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"auto_wrap_policy": "tuned"}, "needs one rank's batch"),
        ({"auto_wrap_policy": "tuned", "tuning": {"memory": "1GiB"}}, "needs one rank's batch"),
        ({"auto_wrap_policy": "tuned", "tuning": {"batch": 1, "epochs": 3}}, "'epochs'"),
        ({"auto_wrap_policy": "tuned", "tuning": 3}, "tuning=3"),
        ({"tuning": {"batch": 1}}, "auto_wrap_policy='tuned'"),
    ],
)
def test_what_cannot_be_tuned_is_told_on_every_rank(ranks: Any, arguments: dict[str, Any], said: str) -> None:
    for text in ranks.run(refused, 2, **arguments):
        assert text.startswith("ConfigurationError") and said in text


def test_a_plan_by_itself_cannot_be_tuned() -> None:
    with pytest.raises(ConfigurationError, match=r"'tuned'.*fsshard\.tune"):
        fsshard.plan(Tower(), auto_wrap_policy="tuned")
