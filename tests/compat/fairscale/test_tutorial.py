"""FairScale's tutorial, by the library that is installed and by fsshard's front: the same losses and weights."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD


def job_script(root: str) -> tuple[list[float], list[Tensor]]:
    """On the CPU the real library's scaler turns itself off: a power of two less or more is exact.

    Args:
        root: the package that is imported in place of ``fairscale``.
    """
    oss, scalers = (importlib.import_module(f"{root}.optim.{name}") for name in ("oss", "grad_scaler"))
    parallel: Any = importlib.import_module(f"{root}.nn.data_parallel")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer: Any = oss.OSS(params=net.parameters(), optim=SGD, lr=0.1, momentum=0.9)
    model: Any = parallel.ShardedDataParallel(net, optimizer)
    scaler: Any = scalers.ShardedGradScaler()
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(5):
        model.zero_grad()  # not the optimizer's, which leaves the real library's buckets as they are (row 1)
        inputs, labels = torch.randn(6, 4, generator=generator), torch.randint(3, (6,), generator=generator)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        losses.append(loss.item())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm(1e3)
        scaler.step(optimizer)
        scaler.update()
    return losses, [p.detach().clone() for p in net.parameters()]


def test_the_tutorial_has_the_same_losses_and_weights(ranks: Any) -> None:
    theirs, ours = (ranks.run(job_script, 2, root) for root in ("fairscale", "fsshard.compat.fairscale"))
    for (losses, weights), (our_losses, our_weights) in zip(theirs, ours, strict=True):
        assert losses == our_losses
        assert [torch.equal(a, b) for a, b in zip(weights, our_weights, strict=True)] == [True] * len(weights)
