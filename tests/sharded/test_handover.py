"""Schedulers that were made before wrap() go on over the optimizer that it returns."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import fsshard
from fsshard.errors import OptimizerError
from tests.models import batch, net
from tests.on_ranks import on_ranks
from tests.optimizers import average
from tests.training_runs import DISTRIBUTED, check_equal


class Warmup:
    """As other libraries write them: no LRScheduler, with another one inside."""

    def __init__(self, optimizer: Any, after: Any) -> None:
        self.optimizer, self.after, self.number = optimizer, after, 0

    def step(self) -> None:
        self.number += 1
        if self.number > 2:
            self.after.step()
            return
        for group in self.optimizer.param_groups:
            group["lr"] = 0.001 * self.number


def sequential(optimizer: Any) -> Any:
    first = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [first, lr_scheduler.ExponentialLR(optimizer, 0.5)], milestones=[2])


SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=8),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "SequentialLR": sequential,
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "another library's": lambda o: Warmup(o, lr_scheduler.CosineAnnealingLR(o, T_max=4)),
}


def advance(name: str, scheduler: Any) -> None:
    scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()


def train(model: Any, optimizer: Any, scheduler: Any, name: str, between: Any = lambda: None) -> list[Any]:
    rates = []
    for number in range(5):
        optimizer.zero_grad()
        model(batch(number)).square().mean().backward()
        between()
        optimizer.step()
        advance(name, scheduler)
        rates.append([group["lr"] for group in optimizer.param_groups])
    return rates


@pytest.mark.parametrize(
    ("backend", "name"),
    [*(("fsdp2", name) for name in SCHEDULERS), *((b, "OneCycleLR") for b in DISTRIBUTED if b != "fsdp2")],
)
@on_ranks()
def test_a_scheduler_goes_on(backend: str, name: str) -> None:
    bare = net()
    reference = torch.optim.AdamW(bare.parameters(), lr=0.01)
    drives = SCHEDULERS[name](reference)
    expected = train(bare, reference, drives, name, lambda: average(bare))

    module = net()
    old = torch.optim.AdamW(module.parameters(), lr=0.01)
    before = SCHEDULERS[name](old)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of calls in another order, of a step that was overridden
        model, optimizer, scheduler = fsshard.wrap(module, old, before, backend=backend)
        rates = train(model, optimizer, scheduler, name)
    state = getattr(scheduler, "state_dict", dict)()
    same_state = [key for key in ("last_epoch", "_step_count", "_last_lr") if key in state]
    assert scheduler is before and rates == expected
    assert all(state[key] == drives.state_dict()[key] for key in same_state)
    check_equal(dict(bare.state_dict()), model.state_dict())


@on_ranks()
def test_several_of_each() -> None:
    module = net()
    halves = [list(module.parameters())[:3], list(module.parameters())[3:]]
    old = [torch.optim.SGD(half, lr=0.1) for half in halves]
    schedulers = [lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in old]
    model, optimizers, again = fsshard.wrap(module, old, schedulers, backend="fsdp2")
    model(batch(0)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    again[1].step()
    found = [type(optimizers), type(again), [o.param_groups[0]["lr"] for o in optimizers]]
    assert found == [list, list, [0.1, 0.05]]


@pytest.mark.parametrize("backend", ["fsdp2", "fairscale"])
@on_ranks()
def test_schedulers_that_were_not_handed_over_drive_the_new_optimizer_too(backend: str) -> None:
    """Schedulers that are not handed over, of which one leaves no mark on the optimizer, and one that is."""
    module = net()
    old = torch.optim.SGD(module.parameters(), lr=0.1)
    groups = old.param_groups
    schedulers = [lr_scheduler.StepLR(old, 1, 0.5), lr_scheduler.ReduceLROnPlateau(old, factor=0.5, patience=0)]
    handed = lr_scheduler.ExponentialLR(old, 0.5)
    model, optimizer, _ = fsshard.wrap(module, old, handed, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(batch(0)).square().mean().backward()
        optimizer.step()
        handed.step()
        schedulers[0].step()
        schedulers[1].step(1.0)
        schedulers[1].step(1.0)
    with pytest.raises(OptimizerError, match="use the one that wrap returned"):
        old.zero_grad()
    assert optimizer.param_groups[0]["lr"] == groups[0]["lr"] == 0.0125


class WithoutRate(torch.optim.Optimizer):
    """As Adafactor, which computes its rate."""

    def __init__(self, params: Any, lr: float | None = None) -> None:
        super().__init__(params, {"lr": lr})


class Holder:
    """A scheduler that has no rates to compute."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


@on_ranks()
def test_wrap_computes_no_rates() -> None:
    module = net()
    old = torch.optim.SGD(module.parameters(), lr=0.001)
    _, optimizer, _ = fsshard.wrap(module, old, lr_scheduler.ReduceLROnPlateau(old), backend="fsdp2")
    optimizer.param_groups[0]["lr"] = 0.1
    lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    module = net()
    computed = WithoutRate(module.parameters())
    _, without, _ = fsshard.wrap(module, computed, Holder(computed), backend="fsdp2")
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert without.param_groups[0]["lr"] is None
