"""Modules whose forward hands weights of others to autograd are found by their code, and nothing else is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsshard.planning.plan import plan
from fsshard.planning.weight_readers import readers_of_weights
from tests.zoo import ZOO


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.w).abs()


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
        return module(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return None, gradient


def weights_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters()]


def adjoint(module: nn.Module, x: Tensor) -> Any:
    return Identity.apply(module, x, *weights_of(module))


def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(*args: Any) -> Any:
        return forward(*args)

    return call


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()
        self.own = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Any:
        return self.part(x) + self.own


class HandsList(Outer):
    def forward(self, x: Tensor) -> Any:
        return Identity.apply(self.part, x, *self.part.parameters())


class HandsOne(Outer):
    def forward(self, x: Tensor) -> Any:
        return torch.autograd.grad(self.part(x).sum(), self.part.w)


class ByMethod(Outer):
    def forward(self, x: Tensor) -> Any:
        return self.solve(x)

    @staticmethod
    def whole(module: nn.Module) -> Any:
        return tuple(p for _, p in module.named_parameters())

    def solve(self, x: Tensor) -> Any:
        return [Identity.apply(each, x, *self.whole(each)) for each in self.children()]


class ByFunction(Outer):
    def forward(self, x: Tensor) -> Any:
        return adjoint(self.part, x)


class Decorated(Outer):
    @decorated
    def forward(self, x: Tensor) -> Any:
        return adjoint(self.part, x)


class AsksDevice(Outer):
    """What very many models ask."""

    def forward(self, x: Tensor) -> Any:
        return self.part(x.to(next(self.parameters()).device))


class GradientOfInput(Outer):
    """Physics-informed models."""

    def forward(self, x: Tensor) -> Any:
        return torch.autograd.grad(self.part(x).sum(), x, create_graph=True)[0] + self.own


class GradientOfOwn(Outer):
    def forward(self, x: Tensor) -> Any:
        return torch.autograd.grad((self.part(x) * self.own).sum(), self.own)


class ElsewhereOnly(Outer):
    """Lightning's modules have such methods; the forward calls none of them."""

    def configure_optimizers(self) -> Any:
        return torch.autograd.grad(self.own.sum(), [*self.parameters()])


@pytest.mark.parametrize("kind", [HandsList, HandsOne, ByMethod, ByFunction, Decorated])
def test_what_is_handed_to_autograd_is_no_unit_by_default(kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind(), Part())
    assert readers_of_weights(model.modules()) == [model[0]]
    made = plan(model)
    assert [unit.name for unit in made.units] == ["", "1"]
    assert made.dropped == {
        "0.part": f"'0', a {kind.__name__}, hands its weights to a custom Function or to autograd.grad"
    }
    assert "no unit: 0.part" in made.explain()
    assert [unit.name for unit in plan(model, auto_wrap_policy={Part}).units] == ["", "0.part", "1"]  # by name: theirs


@pytest.mark.parametrize("kind", [Outer, AsksDevice, GradientOfInput, GradientOfOwn, ElsewhereOnly])
def test_other_code_changes_no_plan(kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind(), Part())
    assert readers_of_weights(model.modules()) == []
    assert [unit.name for unit in plan(model).units] == ["", "0.part", "1"]


def test_a_forward_that_was_put_on_an_object_is_read() -> None:
    model = Outer()
    model.forward = functools.partial(adjoint, model.part)  # type: ignore[method-assign]
    assert readers_of_weights([model]) == []  # which is no function, and is not followed: it raises when it runs
    model.forward = ByFunction.forward.__get__(model)  # type: ignore[method-assign]
    assert readers_of_weights([model]) == [model]


@pytest.mark.parametrize("name", ZOO)
def test_no_known_model_is_taken_for_a_reader(name: str) -> None:
    assert readers_of_weights(ZOO[name].build().modules()) == []
