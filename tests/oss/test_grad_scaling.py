"""OSS and ShardedDataParallel under torch's own GradScaler."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.compat.fairscale.optim.grad_scaler import ShardedGradScaler
from fsshard.oss.optimizer import OSS
from fsshard.oss.sharded_ddp import ShardedDataParallel
from tests.oss.trainings import batches, ddp, mlp, same, weights


def train(kind: str, unscales: bool, cls: Any = torch.amp.GradScaler) -> tuple[list[Tensor], list[float]]:
    """Rank 0 meets an infinity in the gradient of one parameter, at the third step."""
    model, bad = mlp(), False
    parameters = list(model.parameters())
    optimizer: Any = (
        OSS(parameters, optim=torch.optim.Adam, lr=0.02) if kind == "oss" else torch.optim.Adam(parameters, lr=0.02)
    )
    wrapped = ShardedDataParallel(model, optimizer) if kind == "oss" else ddp(model)
    scaler = (
        cls("cpu", init_scale=8.0, growth_interval=2) if cls is torch.amp.GradScaler else cls(8.0, growth_interval=2)
    )
    parameters[0].register_hook(lambda g: g * float("inf") if bad else g)
    scales = []
    for number, batch in enumerate(batches(6)):
        bad = number == 2 and dist.get_rank() == 0
        optimizer.zero_grad()
        scaler.scale(wrapped(batch).square().mean()).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return weights(model), scales


def job_scaler(unscales: bool, sharded: bool) -> Any:
    plain = train("plain", unscales)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself", FutureWarning)
        ours = train("oss", unscales, *([ShardedGradScaler] if sharded else []))
    return same(plain, ours), plain[1]


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_all_ranks_step_or_none(ranks: Any, unscales: bool, sharded: bool) -> None:
    assert ranks.run(job_scaler, 2, unscales, sharded) == [(True, [8.0, 16.0, 8.0, 8.0, 16.0, 16.0])] * 2


def job_owns_nothing() -> Any:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = OSS([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    if dist.get_rank() == 0:
        parameter.grad = torch.full((3,), 2.0)
    scaler.step(optimizer)
    scaler.update()
    return parameter.tolist()


def test_a_rank_without_gradients_takes_part(ranks: Any) -> None:
    assert ranks.run(job_owns_nothing, 2) == [[0.5] * 3] * 2


class Stepping(OSS):
    """A subclass whose step takes no scaler."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


def job_subclass() -> list[float]:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = Stepping([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    return parameter.tolist()


def test_gradients_are_unscaled_for_a_step_that_takes_no_scaler(ranks: Any) -> None:
    assert ranks.run(job_subclass, 2) == [[0.0]] * 2
