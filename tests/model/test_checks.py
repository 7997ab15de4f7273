"""agree(): a failure anywhere is raised everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from fsshard.errors import FsshardError, RankMismatch, StateDictError, UnsupportedByBackend
from fsshard.model.checks import agree


def job(kind: str) -> int:
    def work() -> int:
        if dist.get_rank() == 1:
            if kind == "value":
                raise ValueError("broken")
            if kind == "state":
                raise StateDictError("the state dict", missing=["x"])
            if kind == "unsupported":
                raise UnsupportedByBackend("this", "ddp", "use that")
        return dist.get_rank()

    return agree(dist.group.WORLD, work)


def test_results_come_back(ranks: Any) -> None:
    assert ranks.run(job, 2, "fine") == [0, 1]


@pytest.mark.parametrize(
    ("kind", "there", "here"),
    [
        ("value", RankMismatch, ValueError),
        ("state", StateDictError, StateDictError),
        ("unsupported", UnsupportedByBackend, UnsupportedByBackend),
    ],
)
def test_errors_reach_every_rank_by_kind(ranks: Any, kind: str, there: type, here: type) -> None:
    one, other = ranks.run_expecting_errors(job, 2, kind)
    assert type(one) is there and "rank" in str(one)
    assert type(other) is here
    assert isinstance(one, FsshardError)
