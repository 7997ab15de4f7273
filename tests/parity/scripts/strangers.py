"""A training that knows nothing of the recorder, under one engine or another, right or with one thing changed.

python strangers.py ddp "no average"    # 32 steps on two ranks, which are forked
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer

import fsshard

STEPS = 4
OURS = ("ours-none", "ours-ddp", "ours-fairscale", "ours-fsdp", "ours-fsdp2")


class Block(nn.Module):
    """A unit of FSDP1 and FSDP2."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.dropout = nn.Dropout(rate)
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.inner(self.dropout(x)))) * self.scale


class Net(nn.Module):
    """Two blocks, a frozen layer and a shared one."""

    HEAD = "last"

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.blocks = nn.ModuleList([Block(rate), Block(rate)])
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.shared = nn.Linear(16, 16)
        self.also = self.shared
        setattr(self, self.HEAD, nn.Linear(16, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return getattr(self, self.HEAD)(self.also(torch.tanh(self.shared(self.frozen(x)))))


class Renamed(Net):
    """The same with another name for a layer."""

    HEAD = "head"


def engine(name: str, model: nn.Module, make: Any) -> tuple[nn.Module, Any]:
    """Return the model and its optimizer under an engine."""
    if name.startswith("ours-"):
        wrapped = fsshard.wrap(model, backend=name.removeprefix("ours-"), auto_wrap_policy={Block})
        return wrapped, fsshard.build_optimizer(wrapped, torch.optim.AdamW, lr=1e-2)
    if name == "ddp":
        ddp = nn.parallel.DistributedDataParallel(model)
        return ddp, make(ddp.parameters())
    if name.startswith("fsdp1"):
        policy, kept = ModuleWrapPolicy({Block}), name == "fsdp1"
        cpu = torch.device("cpu")
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=cpu, use_orig_params=kept)
    elif name == "zero":
        ddp = nn.parallel.DistributedDataParallel(model)
        return ddp, ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-2)
    elif name == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in getattr(model, "blocks", model.children()):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif name == "fairscale":
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim import OSS

        oss = OSS(model.parameters(), torch.optim.AdamW, lr=1e-2)
        return ShardedDataParallel(model, oss), oss
    return model, make(model.parameters())


def build(fault: str) -> nn.Module:
    """Return the model before an engine takes it."""
    torch.manual_seed(1 if fault == "seed" else 0)
    if fault == "renamed":
        return Renamed()
    model = Net(0.1 if fault == "dropout" else 0.0)
    return model.requires_grad_(True) if fault == "all trained" else model


def samples(step: int, fault: str) -> Tensor:
    """Return this rank's part of 16 samples, which are the same at any number of ranks."""
    generator = torch.Generator().manual_seed(step + (100 if fault == "sampler" and step >= 2 else 0))
    everything = torch.randn(16, 6, generator=generator)
    if fault == "order":
        everything = everything.flip(0)
    size = 16 // dist.get_world_size()
    return everything[size * dist.get_rank() :][:size]


def train(name: str = "ddp", fault: str = "", steps: int = STEPS) -> nn.Module:
    """Train on all ranks, and return the model."""
    model, optimizer = engine(name, build(fault), lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    for step in range(steps):
        if fault == "rate" and step == (3 if steps == STEPS else 30):
            optimizer.param_groups[0]["lr"] = 5e-3
        x = samples(step, fault)
        quiet = fault == "no average" and step == 1
        with model.no_sync() if quiet else contextlib.nullcontext():  # type: ignore[operator]
            with torch.autocast("cpu", torch.bfloat16, enabled=fault == "bf16"):
                loss = model(x).square().mean()
            loss.backward()
        optimizer.step()
        if fault == "zero_grad":
            optimizer.zero_grad()
        else:
            model.zero_grad()
    return model


def job_train(folder: Path, name: str, fault: str = "", **settings: Any) -> None:
    with fsshard.trace(folder, **settings):
        train(name, fault)


def main(rank: int, rendezvous: str, name: str, fault: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    train(name, fault, steps=32)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            main, (f"{folder}/rendezvous", *sys.argv[1:]), nprocs=2, start_method="fork"
        )
