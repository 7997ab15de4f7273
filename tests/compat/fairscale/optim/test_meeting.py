"""How ranks wait for each other, and find out who is elsewhere."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from fsshard.compat.fairscale.optim._meeting import Meeting

# ------------------------------------------------------------------------------------------------ works


class Ends:
    """A collective that ends right after a wait with a limit has run out."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.waits = error, 0

    def wait(self, limit: timedelta | None = None) -> None:
        self.waits += 1
        if limit is not None:
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        return True


def job_ends() -> list[Any]:
    meeting = Meeting.of(dist.group.WORLD)
    work = Ends()
    meeting.wait(work, "step()")
    found: list[Any] = [work.waits, meeting.waited]
    with pytest.raises(RuntimeError, match="peer is gone"):
        meeting.wait(Ends(RuntimeError("peer is gone")), "step()")
    return [*found, meeting.waited]


def test_a_collective_that_ends_between_two_looks_is_no_failure(ranks: Any) -> None:
    assert ranks.run(job_ends, 2) == [[2, 1, 1]] * 2
