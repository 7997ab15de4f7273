"""Ranks come together before a rare call, and those that do not are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsshard.comm import watchdog
from fsshard.compat.fairscale.optim.grad_scaler import ShardedGradScaler
from fsshard.oss.optimizer import OSS
from tests.oss.trainings import mlp, refusal

PACE = watchdog.INTERVAL, watchdog.FIRST_QUESTION, watchdog.NEXT_QUESTION


def stepped() -> tuple[nn.Module, Any]:
    model = mlp()
    optimizer = OSS(model.parameters(), lr=0.1, momentum=0.9)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return model, optimizer


def job_elsewhere(what: str) -> Any:
    """Rank 0 consolidates alone and then does as rank 1 does, which waits for it; then both consolidate."""
    watchdog.INTERVAL, watchdog.FIRST_QUESTION, watchdog.NEXT_QUESTION = 0.1, 0.2, 0.4
    try:
        _, optimizer = stepped()
        scaler = ShardedGradScaler()
        scaler.scale(torch.ones(()))
        calls = {
            "step": optimizer.step,
            "scaler": lambda: scaler.unscale_(optimizer),
            "barrier": dist.barrier,
        }
        found = refusal(optimizer.consolidate_state_dict) if dist.get_rank() == 0 else None
        calls[what]()
        late = None if dist.get_rank() == 0 else refusal(optimizer.consolidate_state_dict)
        return found, late, refusal(lambda: optimizer.consolidate_state_dict(-1)), len(optimizer.state_dict()["state"])
    finally:
        watchdog.INTERVAL, watchdog.FIRST_QUESTION, watchdog.NEXT_QUESTION = PACE


@pytest.mark.parametrize("what", ["step", "scaler", "barrier"])
def test_a_rank_that_consolidates_alone_is_told_where_the_other_waits(ranks: Any, what: str) -> None:
    (here, _, *again), (_, late, *also) = ranks.run(job_elsewhere, 2, what)
    assert here[0] == late[0] == "NotTogether"
    assert here[1].startswith("consolidate_state_dict(0): rank 1 waits in "), here
    assert "All ranks must call consolidate_state_dict(0) equally often: is it under `if rank == 0`" in here[1]
    assert "rank 0 has waited for this rank, and given up" in late[1]
    assert again == also == [None, 6]


def job_unlike() -> Any:
    _, optimizer = stepped()
    call = optimizer.consolidate_state_dict
    return refusal(lambda: call(dist.get_rank())), refusal(call)


def test_ranks_that_consolidate_for_others_all_raise_and_go_on(ranks: Any) -> None:
    (here, again), (there, also) = ranks.run(job_unlike, 2)
    assert here == there and here[0] == "NotTogether" and again is also is None
    assert here[1] == (
        "consolidate_state_dict must be called alike on all ranks of the group: "
        "rank 0 called consolidate_state_dict(0); rank 1 called consolidate_state_dict(1)"
    )
