"""Classes in front of users' own whose layout is not that of nn.Module: subclasses of typing.Generic."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import fsshard
from fsshard.complex_params.in_front import class_in_front, has_own_layout

T = TypeVar("T")


class First(Generic[T], nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.real = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.real(x).to(self.weight.dtype) @ self.weight).abs()


class Derived(First[int]):
    pass


class Last(nn.Module, Generic[T]):
    pass


class _Front(nn.Module):
    def extra_repr(self) -> str:
        return "in front"


def test_a_module_turns_into_it_and_back_and_what_is_in_front_wins() -> None:
    assert [has_own_layout(kind) for kind in (First, Derived, Last, nn.Linear)] == [True, True, False, False]
    for kind in (First, Derived, Last):
        module: Any = kind()
        found: Any = class_in_front(_Front, kind, kind.__name__, {})
        module.__class__ = found
        assert module.extra_repr() == "in front" and found.__mro__[1:3] == (_Front, kind)
        module.__class__ = kind


def _trained(backend: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Derived()
    wrapped, optimizer = fsshard.wrap(model, torch.optim.Adam(model.parameters()), backend=backend)
    losses = []
    for _ in range(3):
        loss = wrapped(torch.ones(2, 4)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, wrapped.state_dict()


def _both() -> tuple[Any, Any, str]:
    try:
        fully_shard(First())
    except TypeError as error:
        return _trained("fsdp2"), _trained("ddp"), str(error)
    return _trained("fsdp2"), _trained("ddp"), "nothing"


def test_a_subclass_of_generic_trains_under_fsdp2_which_torchs_own_refuses(ranks: Any) -> None:
    for (losses, state), (others, same), told in ranks.run(_both, 2):
        assert losses == others and all(torch.equal(state[name], same[name]) for name in same)
        if torch.__version__.startswith("2.13"):
            assert "object layout differs" in told


pytestmark = pytest.mark.filterwarnings("ignore:Complex modules are a new feature under active development")
