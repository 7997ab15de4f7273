"""Gradients of shared parameters: summed once, whatever micro-batches and scalers there are."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.errors import GradientError
from tests.models import with_sgd
from tests.on_ranks import on_ranks
from tests.parallel.split_vit import batch, group_of, loss_of, mesh_of, said_of, serial, split
from tests.training_runs import DISTRIBUTED

BOUND = 4e-6
"""Bound for weights of order 1 in float32 that three steps have moved: each mesh adds in another order."""


def job_accumulated(backend: str, how: str) -> dict[str, Tensor]:
    mesh = mesh_of(1, 2, 1)
    cp = group_of(mesh, "cp")
    model, optimizer = with_sgd(split(mesh), backend=backend, device_mesh=mesh["data"], **said_of(mesh))
    scaler = fsshard.GradScaler(model, init_scale=2.0**7, enabled=how == "scaled")
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(3):
            last = micro == 2
            with contextlib.nullcontext() if last or how != "no_sync" else model.no_sync():
                scaler.scale(loss_of(model, batch(1, 3 * step + micro), cp) / 3).backward()
            if how == "looked at" and not last:
                model.clip_grad_norm_(1e9)  # who looks at them gets sums, and what comes then is added to these
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scaler.update()
    return model.state_dict()


def accumulated_on_one_process() -> dict[str, Tensor]:
    model = serial()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(3):
            (loss_of(model, batch(1, 3 * step + micro), None) / 3).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model.state_dict()


@pytest.mark.covering
@pytest.mark.parametrize("how", ["each", "no_sync", "looked at", "scaled"])
@pytest.mark.parametrize("backend", DISTRIBUTED)
def test_accumulated(ranks: Any, backend: str, how: str) -> None:
    theirs = accumulated_on_one_process()
    first, second = ranks.run(job_accumulated, 2, backend, how)
    for name, value in theirs.items():
        assert float((first[name] - value).abs().max()) < BOUND, name
        assert torch.equal(first[name], second[name]), name


def job_bf16(backend: str) -> tuple[list[float], bool]:
    mesh = mesh_of(1, 2, 1)
    cp = group_of(mesh, "cp")
    model = fsshard.wrap(
        split(mesh), backend=backend, device_mesh=mesh["data"], mixed_precision="bf16", **said_of(mesh)
    )
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, batch(1, step), cp)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    bits = torch.stack([value.double().abs().sum() for value in model.state_dict().values()])
    both = [torch.empty_like(bits) for _ in range(2)]
    dist.all_gather(both, bits)
    return losses, torch.equal(*both)


def test_in_bf16_ranks_stay_together(ranks: Any) -> None:
    """bf16 has eight bits: 2e-2 of losses of order 1, against float32 on one process."""
    model, losses = serial(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, batch(1, step), None)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    found = [ranks.run(job_bf16, 2, backend) for backend in ("ddp", "fsdp2")]
    for (first, alike), (second, _) in found:
        assert alike
        assert [a + b for a, b in zip(first, second, strict=True)] == pytest.approx(losses, abs=2e-2)


class Scale(nn.Module):
    """One number, which each rank multiplies what it has with."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        return x * self.factor * self.other if both else x * self.factor


def job_mean(reduce: str) -> list[float]:
    mesh = mesh_of(1, 2, 1)
    said = mesh["cp"] if reduce == "sum" else (mesh["cp"], reduce)
    model = fsshard.wrap(Scale(), backend="ddp", device_mesh=mesh["data"], replicated={".": said})
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=1.0)
    for _ in range(2):  # two backward passes, which add up
        (model(torch.ones(3) * (1 + dist.get_rank())).sum()).backward()
    optimizer.step()
    return [float(value) for value in model.state_dict()["factor"]]


def test_sum_and_mean(ranks: Any) -> None:
    assert ranks.run(job_mean, 2, "sum") == [[-5.0] * 3] * 2  # 1 - 2 (1 + 2)
    assert ranks.run(job_mean, 2, "mean") == [[-2.0] * 3] * 2  # 1 - 2 (1 + 2) / 2


@on_ranks()
def test_a_gradient_that_some_ranks_lack() -> None:
    mesh = mesh_of(1, 2, 1)
    model = fsshard.wrap(
        Scale(), backend="ddp", device_mesh=mesh["data"], replicated={".": mesh["cp"]}, find_unused_parameters=True
    )
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=1.0)
    model(torch.ones(3), both=dist.get_rank() == 0).sum().backward()
    with pytest.raises(GradientError) as raised:
        optimizer.step()
    assert "of the 2 ranks that share parameter 'other'" in str(raised.value)
