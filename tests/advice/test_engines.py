"""The advice of fsshard/backends, followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsshard
from tests.advice.following import DIVIDED, Scale, batch, cases, is_right, plain, refuse, refused, right, square

REPLICAS = ("ddp", "fairscale")


def units(backend: str, kind: type[nn.Module] = Scale) -> dict[str, Any]:
    """Make each ``kind`` a unit, where FSDP2 would merge those of a tiny model."""
    return {"backend": backend, "auto_wrap_policy": {kind}, **({"merge_below": 0} if backend == "fsdp2" else {})}


def case_values_are_assigned() -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    model = fsshard.wrap(plain(), backend="fsdp2")
    weight: Any = next(model.parameters())
    with refused("write within `with torch.no_grad(), model.full_parameters(writeback=True):`, alike on every rank"):
        weight[0] = 3.0
    with refused("change the model before fsshard.wrap"):
        weight.data = torch.ones(2, 2)
    whole = distribute_tensor(torch.full((6, 4), 2.0), weight.device_mesh, [Replicate()])
    with refused("give the whole tensor, or value.redistribute(...) to these"):
        weight.data = whole
    weight.data = whole.redistribute(weight.device_mesh, weight.placements)
    assert model.state_dict()["0.weight"].eq(2).all()
    weight.data = torch.full((6, 4), 3.0)
    assert model.state_dict()["0.weight"].eq(3).all()
    total: Any = sum(p.detach().square().sum() for p in model.parameters())
    with refused("On every rank write value.full_tensor().item(), or compute with the whole weights within"):
        total.item()
    with model.full_parameters():
        expected = float(sum(p.detach().double().square().sum() for p in model.module.parameters()))
    assert total.full_tensor().item() == pytest.approx(expected)


def case_backwards() -> None:
    told = "call model(x). Or every backward since the last step ran under no_sync(): run the last one outside"
    refuse(told, loss=lambda model, x: square(model.module, x), backend="ddp")
    with refused("call what wrap returned"):
        fsshard.wrap(plain(), **units("fsdp2")).module[1](torch.ones(3, 6))
    model = fsshard.wrap(plain(), backend="fsdp")
    model(batch())
    with refused("whole in forwards of the wrapped model (call model(x), not model.module(x))"):
        model.module(batch())
    is_right(model)


class Writes(Scale):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.6, 0.6)
        return super().forward(x)


class Clamps(Scale):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.clamp(-0.6, 0.6)


def with_unit(kind: type[Scale]) -> Callable[[], Any]:
    def build() -> Any:
        model = plain()
        model[1] = kind(model[1].weight.detach().clone())
        return model

    return build


class CallsFunctional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.unit, self.last = plain()

    def forward(self, x: Tensor) -> Any:
        weight = {"weight": self.first.bias * 2}
        return self.last(torch.func.functional_call(self.unit, weight, self.first(x)))


class ReadsUnit(CallsFunctional):
    def forward(self, x: Tensor) -> Any:
        return self.last(self.unit(self.first(x))) + self.unit.weight.abs().sum()


def reads_from_before(kept: bool) -> Callable[[], Any]:
    def build() -> Any:
        model = plain()
        weights = [model[0].weight] if kept else []
        model.register_forward_hook(lambda m, _, output: output * (weights or [m[0].weight])[0].sum())
        return model

    return build


def case_weights_in_forwards() -> None:
    for backend in DIVIDED:
        told = "Change weights after optimizer.step(), within `with torch.no_grad(), model.full_parameters("
        refuse(told, with_unit(Writes), **units(backend, Writes))
        right(with_unit(Clamps), backend=backend, auto_wrap_policy={Clamps})
        told = "Load values with model.load_state_dict, or use backend='fairscale' or 'ddp'"
        refuse(told, CallsFunctional, **units(backend))
        told = "with auto_wrap_policy=None the model is one unit), or use backend='fairscale' or 'ddp'"
        refuse(told, ReadsUnit, **units(backend))
        for policy in (None, {nn.Linear}):
            right(ReadsUnit, backend=backend, auto_wrap_policy=policy)
        right(reads_from_before(kept=False), backend=backend)
    told = "read it as an attribute of its module, and build the optimizer with fsshard.build_optimizer"
    refuse(told, reads_from_before(kept=True), backend="fsdp2")
    for backend in REPLICAS:
        right(with_unit(Writes), backend=backend)
        right(CallsFunctional, backend=backend, find_unused_parameters=True)
        right(ReadsUnit, backend=backend)


def squares(model: Any) -> Tensor:
    return sum((p.square().sum() for p in model.parameters()), torch.zeros(()))


def penalty(model: Any, x: Tensor) -> Tensor:
    return square(model, x) + 0.1 * squares(model)


class PenaltyInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = plain()

    def forward(self, x: Tensor) -> Any:
        return self.layers(x), 0.1 * squares(self)


def returned(model: Any, x: Tensor) -> Tensor:
    y, extra = model(x)
    return y.square().mean() + extra  # type: ignore[no-any-return]


def gathered(model: Any, x: Tensor) -> Tensor:
    weights: list[Any] = list(model.parameters())
    return square(model, x) + 0.1 * sum(p.full_tensor().square().sum() for p in weights)


def case_penalties_outside() -> None:
    told = "Compute a penalty in the forward and return it, or use the optimizer's weight_decay, or"
    refuse(told, loss=penalty, **units("fsdp", nn.Linear))
    for backend in DIVIDED:
        model = fsshard.wrap(plain(), **units(backend, nn.Linear))
        model(batch())
        ours = refused("Compute it in the forward of the weight's unit and return it, use the optimizer's weight_decay")
        with ours if backend == "fsdp" else refused("mixed torch.Tensor and DTensor", RuntimeError):
            (squares(model.module) + square(model, batch())).backward()
        is_right(fsshard.wrap(PenaltyInside(), backend=backend, auto_wrap_policy=None), PenaltyInside, returned)
    is_right(fsshard.wrap(plain(), backend="fsdp2"), loss=gathered, reference=penalty)
    for backend in REPLICAS:
        is_right(fsshard.wrap(plain(), backend=backend), loss=penalty)


@pytest.mark.parametrize("case", cases(globals()), ids=lambda case: case.__name__)
def test_advice_is_right(ranks: Any, case: Any) -> None:
    ranks.run(case, 2)
