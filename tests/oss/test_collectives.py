"""Ranks come together before a rare call, and those that do not are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsshard.comm import watchdog
from fsshard.compat.fairscale.optim.grad_scaler import ShardedGradScaler
from fsshard.oss.optimizer import OSS
from tests.on_ranks import on_ranks
from tests.oss.trainings import fill, mlp, refusal


def stepped() -> Any:
    model = mlp()
    optimizer = OSS(model.parameters(), lr=0.1, momentum=0.9)
    fill(model)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("what", ["step", "scaler", "barrier"])
@on_ranks()
def test_a_rank_that_consolidates_alone_is_told_where_the_other_waits(what: str) -> None:
    """Rank 0 consolidates alone and then does as rank 1 does, which waits for it; then both consolidate."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watchdog, "INTERVAL", 0.1)
        patch.setattr(watchdog, "FIRST_QUESTION", 0.2)
        patch.setattr(watchdog, "NEXT_QUESTION", 0.4)
        optimizer, scaler = stepped(), ShardedGradScaler()
        scaler.scale(torch.ones(()))
        told = refusal(optimizer.consolidate_state_dict) if dist.get_rank() == 0 else None
        {"step": optimizer.step, "scaler": lambda: scaler.unscale_(optimizer), "barrier": dist.barrier}[what]()
        told = told or refusal(optimizer.consolidate_state_dict)
        assert told is not None and told[0] == "NotTogether"
        if dist.get_rank() == 0:
            assert told[1].startswith("consolidate_state_dict(0): rank 1 waits in "), told
            assert "must call consolidate_state_dict(0) equally often: is it under `if rank == 0`" in told[1]
        else:
            assert "rank 0 timed out waiting for this rank" in told[1]
        optimizer.consolidate_state_dict(-1)
        assert len(optimizer.state_dict()["state"]) == 6


@on_ranks()
def test_ranks_that_consolidate_for_others_all_raise_and_go_on() -> None:
    optimizer = stepped()
    assert refusal(lambda: optimizer.consolidate_state_dict(dist.get_rank())) == (
        "NotTogether",
        "consolidate_state_dict must be called alike on all ranks of the group: "
        "rank 0 called consolidate_state_dict(0); rank 1 called consolidate_state_dict(1)",
    )
    optimizer.consolidate_state_dict()
