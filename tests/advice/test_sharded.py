"""The advice of fsshard/sharded, followed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsshard
from tests.advice.following import DIVIDED, batch, cases, is_right, is_trained, plain, refused, square, train
from tests.models import net, take_step
from tests.training_runs import check_equal

ENGINES = ("ddp", "fairscale", *DIVIDED)
SGD, Adam = torch.optim.SGD, torch.optim.Adam


def step(model: Any, optimizer: Any) -> None:
    square(model, batch()).backward()
    take_step(optimizer)


def case_schedulers() -> None:
    module, decay = plain(), torch.optim.lr_scheduler.ExponentialLR
    first, second = Adam(module[0].parameters()), Adam(module[2].parameters())
    rates = [decay(first, 0.5), decay(second, 0.5)]
    with refused("pass it to fsshard.wrap, too: wrap(model, [optimizer, other], [scheduler, ...])"):
        fsshard.wrap(module, first, rates[1], backend="fsdp2")
    model, optimizers, rates = fsshard.wrap(module, [first, second], rates, backend="fsdp2")
    square(model, batch()).backward()
    for optimizer, rate in zip(optimizers, rates, strict=True):
        optimizer.step()
        rate.step()
        assert optimizer.param_groups[0]["lr"] == 0.0005


def case_dicts_of_ranks() -> None:
    model = fsshard.wrap(plain(), backend="fsdp2")

    def fresh(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return {name: torch.randn(parameter.shape) for name, parameter in model.named_parameters()}

    own = fresh(dist.get_rank())
    with refused("load the same on every rank (start new layers from one seed), or pass broadcast_from_rank0=True"):
        model.load_state_dict(own)
    for given, from_rank0 in ((own, True), (fresh(0), False)):
        model.load_state_dict(given, broadcast_from_rank0=from_rank0)
        check_equal(dict(model.state_dict()), dict(fresh(0)))
        model.load_state_dict(fresh(7))


class KeepsModuli(torch.optim.Optimizer):
    """Its state is real for complex weights."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["moduli"] = parameter.grad.abs()
                parameter.data -= group["lr"] * parameter.grad


def case_kinds_of_optimizers() -> None:
    for backend in ENGINES:
        with refused("use foreach=True, or see_complex=False, which shows the optimizer real pairs"):
            fsshard.build_optimizer(fsshard.wrap(net(), backend=backend), torch.optim.AdamW, fused=True)
        for settings in ({"foreach": True}, {"fused": True, "see_complex": False}):
            model = fsshard.wrap(net(), backend=backend)
            step(model, fsshard.build_optimizer(model, torch.optim.AdamW, **settings))
    for backend, settings in (("fsdp2", {"see_complex": False}), ("fairscale", {}), ("ddp", {})):
        model = fsshard.wrap(net(), backend=backend)
        step(model, fsshard.build_optimizer(model, KeepsModuli, separable=True, **settings))
    model = fsshard.wrap(net(), backend="fsdp2")
    with refused("use 'fairscale' or 'ddp', or see_complex=False"):
        step(model, fsshard.build_optimizer(model, KeepsModuli, separable=True))


def scaled(model: Any) -> None:
    optimizer = fsshard.build_optimizer(model, SGD, lr=0.1)
    scaler = fsshard.GradScaler(model, init_scale=8.0)
    scaler.scale(square(model, batch())).backward()
    scaler.step(optimizer)
    scaler.update()
    is_trained(model.state_dict(), steps=1)


def case_loss_scales() -> None:
    model = fsshard.wrap(plain(), backend="ddp")
    optimizer = fsshard.build_optimizer(model, SGD, lr=0.1)
    scaler = fsshard.GradScaler(model, init_scale=2.0 ** dist.get_rank())
    scaler.scale(square(model, batch())).backward()
    with refused("create the scaler with the same init_scale, and load its state, on every rank"):
        scaler.step(optimizer)
    optimizer.zero_grad()
    scaled(model)


def case_copies_and_moves() -> None:
    for backend in ENGINES:
        model = fsshard.wrap(plain(), backend=backend)
        with refused("keep model.state_dict(), or"):
            copy.deepcopy(model)
        with refused("before fsshard.wrap"):
            model.double()
        is_right(
            fsshard.wrap(plain().double(), backend=backend),
            lambda: plain().double(),
            lambda m, x: square(m, x.double()),
        )
        with refused("use assign=False"):
            model.load_state_dict(plain().state_dict(), assign=True)
        model.load_state_dict(plain().state_dict(), assign=False)


def case_trackers() -> None:
    model = fsshard.wrap(plain(), backend="ddp")
    tracker = fsshard.MemoryTracker(model)
    with tracker:
        with refused("call step() after the optimizer's, or leave the context"):
            tracker.report()
        train(model, steps=1)
        tracker.step()
        tracker.report()
    with refused("hand over one model, or several"):
        fsshard.MemoryTracker()
    compiled = fsshard.wrap(plain(), backend="ddp", compile={"backend": "aot_eager"})
    with refused("track it without compile="):
        fsshard.MemoryTracker(compiled).__enter__()
    with refused("make another one, or leave it first"), tracker, tracker:
        pass


@pytest.mark.parametrize("case", cases(globals()), ids=lambda case: case.__name__)
def test_advice_is_right(ranks: Any, case: Any) -> None:
    ranks.run(case, 2)
