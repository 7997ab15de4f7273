"""Known projects' uses of FairScale, done with ours: equal to DDP and a plain optimizer, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compat.fairscale import fsdp_usage_by_projects, usage_by_projects
from tests.training_runs import differences


def differing(one: list[Any], other: list[Any]) -> list[str]:
    """Return where two runs' results differ, rank by rank."""
    return [each for rank in range(len(one)) for each in differences(one[rank], other[rank], f"rank {rank}")]


@pytest.mark.fairscale_row(1, 4, 23)
@pytest.mark.parametrize("name", usage_by_projects.USAGES)
def test_a_habit_trains_as_ddp_does(ranks: Any, name: str) -> None:
    expected, found = (ranks.run(usage_by_projects.job, 2, name, library) for library in ("ddp", "ours"))
    assert differing(expected, found) == []


@pytest.mark.parametrize("name", fsdp_usage_by_projects.USAGES)
def test_a_habit_of_full_sharding_trains_as_ddp_does(ranks: Any, name: str) -> None:
    expected, found = (ranks.run(fsdp_usage_by_projects.job, 2, name, library) for library in ("ddp", "ours"))
    assert differing(expected, found) == []
