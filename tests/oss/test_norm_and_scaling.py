"""OSS and ShardedDataParallel under torch's own GradScaler."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.oss.optimizer import OSS
from fsshard.oss.sharded_ddp import ShardedDataParallel
from tests.on_ranks import on_ranks
from tests.oss.trainings import batches, build, ddp, mlp, same, weights


def train(kind: str, unscales: bool) -> tuple[list[Tensor], list[float]]:
    """Rank 0 meets an infinity in the gradient of one parameter, at the third step."""
    model, bad = mlp(), False
    optimizer = build(kind, model.parameters(), torch.optim.Adam, lr=0.02)
    wrapped = ShardedDataParallel(model, optimizer) if kind == "oss" else ddp(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    next(model.parameters()).register_hook(lambda g: g * float("inf") if bad else g)
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


@pytest.mark.parametrize("unscales", [False, True])
@on_ranks()
def test_all_ranks_step_or_none(unscales: bool) -> None:
    plain = train("plain", unscales)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself", FutureWarning)
        assert same(plain, train("oss", unscales))
    assert plain[1] == [8.0, 16.0, 8.0, 8.0, 16.0, 16.0]


class Stepping(OSS):
    """A subclass whose step takes no scaler."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


@pytest.mark.parametrize("kind", [OSS, Stepping])
@on_ranks()
def test_a_rank_without_gradients_takes_part(kind: Any) -> None:
    """It owns nothing; and gradients are unscaled for a step that takes no scaler, too."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = kind([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    if dist.get_rank() == 0 or kind is Stepping:
        parameter.grad = torch.full((3,), 2.0)
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [0.5] * 3
