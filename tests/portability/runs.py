"""Training that stops, and goes on somewhere else."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.checkpoint.loading import Loaded
from fsshard.sharded.torch_checkpoint_calls import ByName
from tests.models import Spectral

SHARDED = ("ddp", "fairscale", "fsdp", "fsdp2")
STEPS = 2
GLOBAL_BATCH = 24  # every world size from 1 to 4 divides it, with two samples or more for each rank's batch norm


class Net(nn.Module):
    """Complex and tied weights, odd sizes, one 0-dim parameter, a frozen one, buffers, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.blocks = nn.ModuleList([Spectral(6), Spectral(6)])
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.dropout = nn.Dropout(0.25)
        self.head = nn.Linear(6, 5)
        self.tied = nn.Linear(5, 6, bias=False)
        self.tied.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.embed(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        x = self.dropout(self.frozen(x)) * self.scale
        return self.tied(self.head(x))[:, :5]


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda model: fsshard.build_optimizer(model, torch.optim.AdamW, lr=1e-2),
    "sgd": lambda model: fsshard.build_optimizer(model, torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "groups": lambda model: fsshard.build_optimizer(
        model,
        torch.optim.AdamW,
        param_groups=[
            {"params": ["embed.weight", "scale", "blocks.0.weight"], "lr": 1e-2, "amsgrad": True},
            {"params": ["norm.weight", "norm.bias", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias"]},
            {"params": ["head.weight", "head.bias"], "betas": (0.5, 0.9)},
        ],
    ),
}


class Run:
    """Everything that a training loop holds."""

    def __init__(
        self, backend: str, optimizer: str = "adamw", seed: int = 0, net: Callable[[], nn.Module] = Net
    ) -> None:
        torch.manual_seed(seed)
        self.model = fsshard.wrap(net(), backend=backend)
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.02, total_steps=20)
        self.scaler = fsshard.GradScaler(self.model, init_scale=2.0**10, growth_interval=2)
        torch.manual_seed(seed + 1 + dist.get_rank())
        self.step = 0

    def train(self, steps: int = STEPS) -> list[float]:
        """``steps`` more steps; this rank's losses."""
        losses = []
        for _ in range(steps):
            generator = torch.Generator().manual_seed(100 + self.step)
            rows = GLOBAL_BATCH // dist.get_world_size()
            batch = torch.randn(GLOBAL_BATCH, 5, generator=generator)[rows * dist.get_rank() :][:rows]
            loss = (self.model(batch) - batch.roll(1, 1)).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            self.model.clip_grad_norm_(1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.step += 1
            losses.append(loss.item())
        return losses

    def save(self, path: str, **options: Any) -> Any:
        return fsshard.save(
            path, self.model, self.optimizer, self.scheduler, self.scaler, step=self.step, **{"timeout": 30.0} | options
        )

    def load(self, path: str, **options: Any) -> Loaded:
        options = {"timeout": 30.0} | options
        loaded = fsshard.load(path, self.model, self.optimizer, self.scheduler, self.scaler, **options)
        self.step = loaded.state["step"]
        return loaded

    def whole(self) -> dict[str, Any]:
        """All of it, whole. Collective."""
        return {
            "model": {key: value.clone() for key, value in self.model.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "step": self.step,
        }

    def set_whole(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`whole`, without a checkpoint."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])
        self.step = state["step"]


def job_save(folder: str, backend: str, optimizer: str) -> None:
    """Some steps, a checkpoint, and as many more; what was saved, and what came of it, on every rank."""
    run = Run(backend, optimizer)
    run.train()
    name = f"{backend}-{dist.get_world_size()}-{optimizer}"
    run.save(f"{folder}/{name}")
    saved = run.whole()
    losses = run.train()
    final = run.whole()
    torch.save((saved, losses, final), Path(folder) / f"{name}.rank{dist.get_rank()}.pt")


def job_load(folder: str, name: str, backend: str) -> list[str]:
    """Return what differs after loading ``name`` here, and after as many steps more."""
    saved_by, world, optimizer = name.split("-")
    before = torch.load(Path(folder) / f"{name}.rank0.pt", weights_only=False)[0]
    run = Run(backend, optimizer, seed=7)
    loaded = run.load(f"{folder}/{name}")
    found = [f"loaded: {line}" for line in unlike(run.whole(), before)]
    if loaded.origin["backend"] != saved_by or loaded.origin["world_size"] != int(world):
        found.append(f"origin: {loaded.origin}")
    if int(world) == dist.get_world_size():  # as if never stopped, under whatever engine
        _, losses, final = torch.load(Path(folder) / f"{name}.rank{dist.get_rank()}.pt", weights_only=False)
        if run.train() != losses:
            found.append("the losses that follow")
        return found + [f"later: {line}" for line in unlike(run.whole(), final)]
    torch.manual_seed(3 + dist.get_rank())
    losses = run.train()
    other = Run(backend, optimizer, seed=8)
    other.set_whole(before)
    torch.manual_seed(3 + dist.get_rank())
    if other.train() != losses:
        found.append("the losses that follow, compared with the same state loaded whole")
    return found + [f"later: {line}" for line in unlike(run.whole(), other.whole())]


def unlike(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two trees differ, by a bit or by their kind."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.cpu(), other.cpu())
        return [] if same else [f"{where}: {one.dtype} {tuple(one.shape)}, {other.dtype} {tuple(other.shape)}"]
    # What is sent from a rank is an OrderedDict, as in a file of torch.save.
    one, other = (OrderedDict(value) if isinstance(value, ByName) else value for value in (one, other))
    if type(one) is not type(other):
        return [f"{where}: {type(one).__name__}, {type(other).__name__}"]
    if isinstance(one, dict):
        if list(one) != list(other) and set(one) != set(other):
            return [f"{where}: keys {sorted(map(str, set(one) ^ set(other)))}"]
        return [line for key in one for line in unlike(one[key], other[key], f"{where}/{key}")]
    if isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return [f"{where}: {len(one)} and {len(other)} items"]
        pairs = enumerate(zip(one, other, strict=True))
        return [line for index, (a, b) in pairs for line in unlike(a, b, f"{where}/{index}")]
    return [] if one == other else [f"{where}: {one!r}, {other!r}"]
