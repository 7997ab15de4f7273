"""A model that comes back from its engine; with Lightning's Trainer in tests/compat/lightning/test_strategy.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsshard
from fsshard.sharded.unwrapping import ModelBeforeWrap
from tests.models import take_step
from tests.on_ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:Complex modules are a new feature under active development")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        self.weight = nn.Parameter(torch.randn(3, 5, dtype=torch.complex64))
        self.seen: list[int] = []
        self.register_forward_pre_hook(self._see)

    def _see(self, *_: Any) -> None:
        self.seen.append(len(self.seen))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layers(x).to(self.weight.dtype) @ self.weight).abs()


def _steps(model: Any, optimizer: Any) -> None:
    for _ in range(2):
        model(torch.arange(20.0).reshape(5, 4)).square().sum().backward()
        take_step(optimizer)


def _look(model: nn.Module) -> list[Any]:
    """Return what an engine may change of a module."""
    return [
        (type(part), sorted(vars(part)), [*part._parameters], [*part._modules], len(part._forward_pre_hooks))
        for part in model.modules()
    ]


def _twice(backend: str, settings: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Net()
    held, looks = dict(model.named_parameters()), _look(model)
    units = {"auto_wrap_policy": {nn.Linear}} if backend in ("fsdp", "fsdp2") else {}
    for _ in range(2):
        bare = ModelBeforeWrap(model)
        wrapped, optimizer = fsshard.wrap(
            model, torch.optim.Adam(model.parameters(), 0.1), backend=backend, **units, **settings
        )
        bare.wrapped()
        _steps(wrapped, optimizer)
        model.later = "the user's"
        before = wrapped.state_dict()
        bare.hand_back(wrapped)
        state = copy.deepcopy(model).state_dict()
        assert all(torch.equal(state[name], value) for name, value in before.items()) and list(state) == list(before)
        assert all(held[name] is value for name, value in model.named_parameters()) and len(held) == 5 + 2
        del model.later
        assert _look(model) == looks
    plain = {name: value.clone() for name, value in state.items()}
    _steps(model, torch.optim.Adam(model.parameters(), 0.1))  # where no engine hears of it
    return {"engine": plain, "alone": model.state_dict(), "seen": model.seen}


class Kept(nn.Parameter):
    """A kind of the user's."""


def _kind_of(backend: str) -> list[str]:
    model = nn.Linear(3, 3)
    model.weight = Kept(model.weight.data)
    bare = ModelBeforeWrap(model)
    wrapped = fsshard.wrap(model, backend=backend)
    bare.wrapped()
    bare.hand_back(wrapped)
    return [type(parameter).__name__ for parameter in model.parameters()]


@on_ranks()
def test_what_comes_back_is_the_model_of_before_with_whole_weights() -> None:
    recomputed = {"activation_checkpointing": {nn.Linear}, "mixed_precision": "bf16"}
    plain = {backend: _twice(backend, {}) for backend in ("ddp", "fsdp", "fsdp2", "fairscale")}
    _twice("fsdp2", recomputed)
    assert _kind_of("fsdp2") == ["Kept", "Parameter"]
    rank = plain
    for case, (ours, judge) in {case: (rank[case], rank["ddp"]) for case in ("fsdp", "fsdp2", "fairscale")}.items():
        assert ours["seen"] == judge["seen"] == [*range(6)]
        for part in ("engine", "alone"):
            assert all(torch.equal(ours[part][name], value) for name, value in judge[part].items()), (case, part)
