"""DDP: what the backend adds.

Tests fsshard/backends/reducer_arrivals.py too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import fsshard
from tests.models import batch, net


def job_thaw(raw: bool) -> bool:
    """Whether the ranks still agree after a layer was unfrozen."""
    module = net()
    module.first.requires_grad_(False)
    if raw:
        model: Any = nn.parallel.DistributedDataParallel(fsshard.tensorfy(module))
        optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    else:
        model = fsshard.wrap(module, backend="ddp")
        optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    for number in range(4):
        if number == 2:
            module.first.requires_grad_(True)
        model(batch(number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    mine = module.first.weight.detach().clone()
    theirs = mine.clone()
    torch.distributed.broadcast(theirs, 0)
    return torch.equal(mine, theirs)


def test_unfreezing_keeps_the_ranks_together(ranks: Any) -> None:
    assert ranks.run(job_thaw, 2, True) == [True, False]
    assert ranks.run(job_thaw, 2, False) == [True, True]


def job_all_frozen() -> float:
    module = net().requires_grad_(False)
    model = fsshard.wrap(module, backend="ddp")
    with model.no_sync():
        return float(model(batch(0)).sum())


def test_a_wholly_frozen_model(ranks: Any) -> None:
    """Raw DDP refuses it: "any parameter that requires a gradient"."""
    assert len(ranks.run(job_all_frozen, 2)) == 2
