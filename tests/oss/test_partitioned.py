"""Optimizers whose state is divided among ranks are recognised by class, and FairScale's own is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsshard.compat.fairscale.optim.grad_scaler import ShardedGradScaler
from fsshard.errors import MisuseError
from fsshard.oss.optimizer import OSS
from fsshard.oss.partitioned import local_optimizer, partitioned_within


def oss_of(cls: type) -> torch.optim.Optimizer:
    return cls(torch.nn.Linear(3, 2).parameters(), optim=torch.optim.SGD, lr=0.1)


def job_recognised() -> list[bool]:
    ours, plain = oss_of(OSS), torch.optim.SGD(torch.nn.Linear(3, 2).parameters(), lr=0.1)
    return [
        partitioned_within(ours) is ours,
        local_optimizer(ours) is not ours,
        partitioned_within(plain) is None,
        local_optimizer(plain) is plain,
    ]


def job_fairscales(loss: float) -> None:
    from fairscale.optim.oss import OSS as Theirs

    optimizer = oss_of(Theirs)
    scaler = ShardedGradScaler()
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.full_like(parameter, loss)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def test_ours_is_recognised(ranks: Any) -> None:
    assert ranks.run(job_recognised, 2) == [[True] * 4] * 2


def test_fairscales_own_is_refused_on_every_rank(ranks: Any) -> None:
    pytest.importorskip("fairscale.optim.oss", reason="needs fairscale")
    for error in ranks.run_expecting_errors(job_fairscales, 2, 1.0):
        assert (
            type(error) is MisuseError and "got FairScale's own" in str(error) and "backend='fairscale'" in str(error)
        )
