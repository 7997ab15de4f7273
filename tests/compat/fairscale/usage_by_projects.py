"""How known projects call FairScale, each on a model of a few numbers.

A usage is a function of the library: FairScale's tree, real or ours, or None for what the same project does on torch's
DistributedDataParallel and a plain optimizer. It returns everything that it computed. The calls follow the projects'
public code: which names, in which order, by position or by keyword; the code is our own.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.models import take_step

STEPS = 4
Outcome = dict[str, Any]


def library(name: str) -> Any:
    """``"ddp"``: None; ``"real"`` and ``"ours"``: FairScale's tree."""
    return {
        "ddp": lambda: None,
        "real": lambda: importlib.import_module("fairscale"),
        "ours": lambda: importlib.import_module("fsshard.compat.fairscale"),
    }[name]()


def job(usage: str, name: str) -> Outcome:
    """Run a usage on this rank."""
    return USAGES[usage](library(name))


def net(seed: int = 0, width: int = 6) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, width), nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)
    )


def batches(count: int = STEPS, seed: int = 0, size: int = 4) -> Iterator[Tensor]:
    """This rank's."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    for _ in range(count):
        yield torch.randn(5, size, generator=generator)


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Copies of parameters and buffers, under the names that they have in the module itself."""
    while isinstance(model, DistributedDataParallel) or type(model).__name__ == "ShardedDataParallel":
        model = model.module
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def outcome(model: nn.Module, optimizers: Iterable[Any] = (), **more: Any) -> Outcome:
    """Weights and the optimizers' whole state, from every rank."""
    states = []
    for optimizer in optimizers:
        if hasattr(optimizer, "consolidate_state_dict"):
            optimizer.consolidate_state_dict(-1)  # -1: every rank
        states.append(sorted_state(optimizer.state_dict()))
    return {"weights": whole(model), "optimizers": states, **more}


def sorted_state(state: dict[str, Any]) -> dict[str, Any]:
    """A torch state dict, its entries by number and its groups' settings by name."""
    state = copy.deepcopy(state)
    groups = [dict(sorted(group.items())) for group in state["param_groups"]]
    return {"state": dict(sorted(state["state"].items())), "param_groups": groups}


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and biases apart, as for weight decay in Hugging Face's, MMF's and fairseq's trainers."""
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for name, p in named if not name.endswith("weight")], "weight_decay": 0.0},
    ]


def clip(optimizer: Any, parameters: Iterable[Tensor], max_norm: float) -> float:
    """By the optimizer's own method where it has one, as all trainers look for it."""
    if hasattr(optimizer, "clip_grad_norm"):
        return float(optimizer.clip_grad_norm(max_norm))
    return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))


class LightningModuleWrapper(nn.Module):
    """Lightning puts a module between the user's and the engine's, which chooses the step."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return loss_of(self.module(x))


def lightning(fairscale: Any, optimizer_class: type[torch.optim.Optimizer], **options: Any) -> Outcome:
    """Lightning before 2.0, ``strategy="ddp_sharded"``: the optimizer is rebuilt from a live one, and put into a list.

    Gradients are accumulated under no_sync, clipped by the optimizer, and forgotten by ``optimizer.zero_grad()``; the
    optimizer is saved from rank 0 after a consolidation that all ranks take part in.
    """
    model = net()
    optimizers = [optimizer_class(two_groups(model), lr=0.05)]
    if fairscale is None:
        run = DistributedDataParallel(LightningModuleWrapper(model))
    else:
        oss_class = fairscale.optim.OSS
        for index, built in enumerate(optimizers):
            assert not isinstance(built, oss_class)
            optimizers[index] = oss_class(params=built.param_groups, optim=type(built), **built.defaults)
            optimizers[index].broadcast_fp16 = False  # precision 32, or one node
        assert all(isinstance(each, (oss_class, torch.optim.Optimizer)) for each in optimizers)
        run = fairscale.nn.data_parallel.ShardedDataParallel(
            LightningModuleWrapper(model), sharded_optimizer=optimizers, **options
        )
        setattr(run, "require_backward_grad_sync", False)  # noqa: B010  (Lightning's DDP has it, and asks for it)
        assert run.require_backward_grad_sync is False and run.module.module is model
    (optimizer,) = optimizers
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    losses, norms = [], []
    for index, x in enumerate(batches(2 * STEPS)):
        last = index % 2 == 1
        with contextlib.nullcontext() if last else run.no_sync():
            loss = run(x) / 2
            loss.backward()
        losses.append(loss.item())
        if last:
            norms.append(clip(optimizer, model.parameters(), 0.05))
            take_step(optimizer)
            scheduler.step()
    if fairscale is not None:
        optimizer.consolidate_state_dict()  # to rank 0, Lightning's default
    saved = sorted_state(optimizer.state_dict()) if dist.get_rank() == 0 else {}
    return {"weights": whole(model), "losses": losses, "norms": norms, "saved": saved}


def hugging_face_simple(fairscale: Any) -> Outcome:
    """Trainer ``--sharded_ddp simple``: groups, a schedule, the scaler, clipping, ``model.zero_grad()``, resume."""
    model = net()
    arguments = {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-6}

    def build() -> tuple[Any, Any]:
        if fairscale is None:
            return torch.optim.AdamW(two_groups(model), **arguments), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        oss = fairscale.optim.OSS(params=two_groups(model), optim=torch.optim.AdamW, **arguments)
        scaler = fairscale.optim.grad_scaler.ShardedGradScaler(init_scale=2.0**10)
        return oss, scaler

    optimizer, scaler = build()
    run = DistributedDataParallel(model)
    if fairscale is not None:
        run = fairscale.nn.data_parallel.ShardedDataParallel(model, optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 10))
    losses, norms = [], []
    for index, x in enumerate(batches(2 * STEPS)):
        last = index % 2 == 1
        with contextlib.nullcontext() if last else run.no_sync():
            loss = loss_of(run(x)) / 2
            scaler.scale(loss).backward()
        losses.append(loss.item())
        if last:
            scaler.unscale_(optimizer)
            norms.append(clip(optimizer, run.parameters(), 1.0))
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            run.zero_grad()
    if fairscale is not None:
        optimizer.consolidate_state_dict()
    # What the Trainer does to go on from a checkpoint: rank 0 has written it, every rank reads it.
    file = [io.BytesIO()]
    if dist.get_rank() == 0:
        torch.save(optimizer.state_dict(), file[0])
    dist.broadcast_object_list(file, src=0)
    file[0].seek(0)
    optimizer.load_state_dict(torch.load(file[0], map_location="cpu"))
    for x in batches(2, seed=5):
        run.zero_grad()
        loss_of(run(x)).backward()
        optimizer.step()
    return outcome(run, [optimizer], losses=losses, norms=norms)


class Gan(nn.Module):
    """A generator and a discriminator in one module; each step uses the gradients of one."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = net(1), net(2)
        self.generator[-1] = nn.Linear(6, 4)

    def forward(self, x: Tensor, turn: str) -> Tensor:
        made = self.generator(x)
        return loss_of(self.discriminator(made if turn == "generator" else made.detach()))


def espnet_gan(fairscale: Any) -> Outcome:
    """ESPnet's GAN trainer: two OSS over the halves of one module; the zero_grad of both after the step of one."""
    torch.manual_seed(0)
    model = Gan()
    parts = [model.generator.parameters(), model.discriminator.parameters()]
    if fairscale is None:
        optimizers = [torch.optim.Adam(part, lr=0.01, betas=(0.5, 0.9)) for part in parts]
        run = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        oss = fairscale.optim.oss.OSS
        optimizers = [oss(params=part, optim=torch.optim.Adam, lr=0.01, betas=(0.5, 0.9)) for part in parts]
        run = fairscale.nn.data_parallel.ShardedDataParallel(module=model, sharded_optimizer=optimizers)
    for x in batches(6):
        for index, turn in enumerate(("generator", "discriminator")):
            run(x, turn).backward()
            optimizers[index].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    return outcome(run, optimizers)


USAGES: dict[str, Callable[[Any], Outcome]] = {
    "Lightning, Adam, one node": lambda f: lightning(f, torch.optim.Adam, **({"reduce_buffer_size": 0} if f else {})),
    "Lightning, AdamW": lambda f: lightning(f, torch.optim.AdamW),
    "Hugging Face, simple": hugging_face_simple,
    "ESPnet, GAN": espnet_gan,
}
