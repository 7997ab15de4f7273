"""Checks that writes to model.parameters() arrive, or are refused in words, under every backend; complex too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsshard
from fsshard.errors import FsshardError
from tests.models import net, take_step
from tests.on_ranks import on_backends, on_ranks
from tests.sets import often
from tests.training_runs import DISTRIBUTED, check_equal, differences

BACKENDS = (*DISTRIBUTED, "none")
NAMES = ("first.weight", "middle.0.weight", "last.bias")


def like(parameter: Tensor) -> Tensor:
    """Another value of the same kind: a DTensor of one."""
    return torch.full_like(parameter.detach(), 0.25)


def plain(parameter: Tensor) -> Tensor:
    """The whole as a plain tensor."""
    numbers = torch.arange(1, parameter.numel() + 1).reshape(parameter.shape).to(parameter.dtype)
    return numbers / parameter.numel()


def assign(parameter: Any, value: Tensor) -> None:
    parameter.data = value


def put(parameter: Any, index: Any) -> None:
    parameter[index] = 0.25


def with_first(parameter: Tensor) -> Tensor:
    """All as it was but the first of its elements."""
    value = parameter.detach().clone()
    value.view(-1)[0] = 0.25
    return value


WRITES: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Tensor]]] = {
    "data = one alike": (lambda p: assign(p, like(p)), like),
    "data = a plain one": (lambda p: assign(p, plain(p)), plain),
    "vector_to_parameters": (lambda p: nn.utils.vector_to_parameters(plain(p).reshape(-1), [p]), plain),
    "copy_": (lambda p: p.copy_(like(p)), like),
    "out": (lambda p: torch.mul(like(p), 1.0, out=p.data), like),
    "an element": (lambda p: put(p, (0,) * p.dim()), with_first),
    "all elements": (lambda p: put(p, ...), like),
}


def one_step(model: Any, optimizer: Any) -> None:
    """The same batch on all ranks, so that one process does the same."""
    model(torch.linspace(-1, 1, 12).reshape(3, 4)).square().mean().backward()
    take_step(optimizer)


@on_backends(often(BACKENDS, "fsdp2", "ddp", "none"))
def test_a_write_arrives_or_is_refused(backend: str) -> None:
    """Where a write is neither there after a step nor refused."""
    found = []
    for way, (write, value) in WRITES.items():
        bare, model = net(), fsshard.wrap(net(), backend=backend)
        optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
        by_hand = torch.optim.SGD(bare.parameters(), lr=0.1)
        one_step(model, optimizer)
        one_step(bare, by_hand)
        for name in NAMES:
            with torch.no_grad():
                try:
                    write(dict(model.named_parameters())[name])
                except FsshardError:
                    continue
                parameter = dict(bare.named_parameters())[name]
                parameter.copy_(value(parameter))
        found += [f"{way}{d}" for d in differences(dict(bare.state_dict()), model.state_dict())]
        one_step(model, optimizer)
        one_step(bare, by_hand)
        found += [f"{way}, stepped{d}" for d in differences(dict(bare.state_dict()), model.state_dict())]
    assert not found, "\n".join(found)


@on_ranks()
def test_what_does_not_fit_is_refused() -> None:
    """Values that do not fit are refused, and nothing changes."""
    told = []
    model = fsshard.wrap(net(), backend="fsdp2")
    shown = dict(model.named_parameters())
    values = (torch.ones(4, 6), torch.ones(6, 4, dtype=torch.complex64), None)
    for name, value in [("first.weight", v) for v in values] + [("middle.0.weight", torch.ones(6, 6))]:
        with pytest.raises(FsshardError, match="expected torch") as error:
            assign(shown[name], value)  # type: ignore[arg-type]
        told.append(str(error.value))
    check_equal(dict(net().state_dict()), model.state_dict())
    assert "got torch.float32 (4, 6)" in told[0] and "got a NoneType" in told[2]
