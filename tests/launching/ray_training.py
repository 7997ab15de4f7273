"""A training by Ray Train on two workers, for ``test_ray.py``: ``python -m tests.launching.ray_training FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard

STEPS, RANKS = 3, 2
BACKENDS = ("ddp", "fairscale", "fsdp", "fsdp2")


class Net(nn.Module):
    """Complex weights between real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.modes = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.fft.irfft(torch.fft.rfft(self.first(x)) * self.modes, n=8).tanh())


def bare() -> tuple[Net, dict[str, Any]]:
    """Return the model as each worker builds it, and its optimizer's settings."""
    torch.manual_seed(0)
    return Net(), {"lr": 1e-2}


def loss(model: Any, rank: int, step: int) -> Tensor:
    """Return the loss of a rank's batch."""
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + rank))
    return (model(x) - x.mean(dim=1, keepdim=True)).square().mean()


def train(ctx: fsshard.Context, backend: str) -> tuple[list[float], dict[str, Tensor]]:
    """Return this rank's losses and the whole weights."""
    model, settings = bare()
    wrapped = fsshard.wrap(model.to(ctx.device), backend=backend)
    optimizer = fsshard.build_optimizer(wrapped, torch.optim.AdamW, **settings)
    losses = []
    for step in range(STEPS):
        value = loss(wrapped, ctx.rank, step)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses, wrapped.state_dict()


def worker(config: dict[str, str]) -> None:
    """Train by init() under each backend, then by launch(), in the process group that Ray has made."""
    made_by_ray = dist.group.WORLD
    ctx = fsshard.init()
    runs = {f"init {backend}": train(ctx, backend) for backend in BACKENDS}
    runs["launch fsdp2"] = fsshard.launch(train, args=("fsdp2",))
    assert dist.group.WORLD is made_by_ray and ctx.world_size == ctx.local_world_size == RANKS
    torch.save(runs, Path(config["folder"], f"rank{ctx.rank}.pt"))


def main(folder: str) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=RANKS, include_dashboard=False, object_store_memory=80_000_000)
    scaling, run = ScalingConfig(num_workers=RANKS), RunConfig(storage_path=f"{folder}/runs")
    TorchTrainer(worker, train_loop_config={"folder": folder}, scaling_config=scaling, run_config=run).fit()
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
