"""Checks that gradients of a unit's inputs are added in one order on every engine, and no input changes in place."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from fsshard.errors import FsshardError
from fsshard.model import unit_inputs
from tests.models import take_step, with_sgd
from tests.training_runs import differences


class Reader(nn.Module):
    """A unit that uses what enters it several times, or changes it."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.in_place = in_place

    def forward(self, x: Tensor, scale: float = 1.0, other: Tensor | None = None) -> Tensor:
        if self.in_place:
            x.mul_(2.0)
        found = self.first(x).tanh() * x.sin() + self.second(x.square())
        return found * scale if other is None else found * other


class Shared(nn.Module):
    """One tensor enters several units, and is read outside of them."""

    def __init__(self, how: str, in_place: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(16, 16)
        self.readers = nn.ModuleList([Reader(in_place) for _ in range(3)])
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        found = x.cos()
        for reader in self.readers:
            more = {"one": {}, "number": {"scale": 0.7}, "two": {"other": x}}[self.how]
            found = found + reader(x, **more)
        return found


def job_sums(backend: str, how: str, marked: bool = True) -> dict[str, Any]:
    units = {"merge_below": 0} if backend == "fsdp2" else {}
    with mock.patch.object(unit_inputs, "_through_node", (unit_inputs._through_node if marked else lambda *_: None)):
        model, optimizer = with_sgd(Shared(how), backend=backend, auto_wrap_policy={Reader}, **units)
        for step in range(3):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            model(x).square().sum().backward()
            model.clip_grad_norm_(1.0)
            take_step(optimizer)
        return model.state_dict()


@pytest.mark.parametrize("how", ["one", "number", "two"])
def test_sums_have_one_order(ranks: Any, how: str) -> None:
    reference = ranks.run(job_sums, 2, "fsdp2", how)[0]
    for backend in ("ddp", "fairscale", "fsdp"):
        found = ranks.run(job_sums, 2, backend, how)[0]
        assert not list(differences(reference, found)), backend
    unmarked = ranks.run(job_sums, 2, "ddp", how, False)[0]
    assert list(differences(reference, unmarked)), "this model shows nothing"


def job_in_place(backend: str, how: str) -> str:
    units = {"merge_below": 0} if backend == "fsdp2" else {}
    model, _ = with_sgd(Shared(how, in_place=True), backend=backend, auto_wrap_policy={Reader}, **units)
    with torch.no_grad():
        model(torch.ones(2, 16))  # nothing to go wrong
    try:
        model(torch.ones(2, 16))
    except FsshardError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(("backend", "how"), [("fsdp2", "one"), ("fsdp2", "two"), ("ddp", "two"), ("none", "two")])
def test_a_unit_may_not_change_what_enters_it_through_a_node(ranks: Any, backend: str, how: str) -> None:
    found = ranks.run(job_in_place, 1 if backend == "none" else 2, backend, how)
    assert all("a sharding unit changes its input in place" in text for text in found), found
    if how == "two" and backend == "ddp":  # one input may be changed, where the engine can
        assert ranks.run(job_in_place, 2, backend, "one") == ["no error"] * 2


class Product(nn.Module):
    """A unit that two tensors enter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(self.layer(x) * y)


@pytest.mark.parametrize("how", ["grad", "jvp", "jvp of grad", "vmap", "hessian", "dual"])
def test_unit_inputs_let_transforms_through(how: str) -> None:
    torch.manual_seed(0)
    bare = Product()
    marked = copy.deepcopy(bare)
    unit_inputs.mark_unit_inputs(marked)
    x = torch.randn(2, 3)

    def derived(unit: Product) -> Any:
        def value(x: Tensor) -> Tensor:
            return unit(x, x.sin()).square().sum()

        if how == "dual":
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(x.clone().requires_grad_(), x.cos())
                return [part.detach() for part in torch.autograd.forward_ad.unpack_dual(value(dual))]
        slope = torch.func.grad(value)
        return {
            "grad": lambda: [slope(x)],
            "jvp": lambda: torch.func.jvp(value, (x,), (x,)),
            "jvp of grad": lambda: torch.func.jvp(slope, (x,), (x,)),
            "vmap": lambda: [torch.func.vmap(value)(x)],
            "hessian": lambda: [torch.func.hessian(value)(x)],
        }[how]()

    for one, other in zip(derived(bare), derived(marked), strict=True):
        assert torch.equal(one, other)
