"""Optimizers whose state is divided among ranks are recognised by class, and FairScale's own is refused."""

from __future__ import annotations

import pytest
import torch

from fsshard.compat.fairscale.optim.grad_scaler import ShardedGradScaler
from fsshard.oss.optimizer import OSS
from fsshard.oss.partitioned import local_optimizer, partitioned_within
from tests.on_ranks import on_ranks
from tests.oss.trainings import fill, mlp, refusal


@on_ranks()
def test_ours_is_recognised() -> None:
    ours, plain = OSS(mlp().parameters(), lr=0.1), torch.optim.SGD(mlp().parameters(), lr=0.1)
    assert partitioned_within(ours) is ours and local_optimizer(ours) is not ours
    assert partitioned_within(plain) is None and local_optimizer(plain) is plain


@on_ranks()
def test_fairscales_own_is_refused_on_every_rank() -> None:
    theirs = pytest.importorskip("fairscale.optim.oss").OSS
    model, scaler = mlp(), ShardedGradScaler()
    optimizer = theirs(model.parameters(), lr=0.1)
    fill(model)
    scaler.scale(torch.ones(()))
    kind, text = refusal(lambda: scaler.unscale_(optimizer))
    assert kind == "MisuseError" and "got FairScale's own" in text and "backend='fairscale'" in text
