"""What is ours lies behind one private name: other names are the user's. Gradients are dropped by parameter."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsshard
from fsshard.errors import ModelError, OptimizerError
from fsshard.sharded.controller import ModelController
from tests import by_hand
from tests.advice.following import refused
from tests.models import net, take_step, with_sgd
from tests.on_ranks import on_backends, on_ranks
from tests.sharded.training import ALL
from tests.training_runs import DISTRIBUTED, check_equal

# ------------------------------------------------------------------------------------------- the user's names

OF_BEFORE = ("_looks", "_runs", "_whole", "_views", "_optimizers", "_step_counts", "buffers_held")
"""Some of the names that lay on the wrapper once."""


def inner_names() -> list[str]:
    """Return the names that are ours within, and are not public ones of the wrapper."""
    controller = fsshard.wrap(net(), backend="none")._fsshard
    names = {name for name in (*vars(ModelController), *vars(controller)) if not name.startswith("__")}
    return sorted({*OF_BEFORE, *names} - {*dir(fsshard.ShardedModule)} - {"backend"})


class Attention(nn.Module):
    """Has a meaning of its own for ``scaled``, and for every name that fsshard uses within."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query = nn.Linear(4, 4)
        self.key = nn.Linear(4, 4)
        for number, name in enumerate(names):
            setattr(self, name, f"the user's {number}")
        self.scaled = True

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        return (scores / 2.0 if self.scaled else scores).softmax(-1)


@pytest.mark.parametrize("backend", ALL)
@on_ranks(1)
def test_no_attribute_of_the_users_model_is_overwritten(backend: str) -> None:
    names = inner_names()
    assert {"scaled", "simulate", "find_entry", "step"} <= {*names}
    bare, inner = Attention(names), Attention(names)
    before = {name: getattr(inner, name) for name in names}
    model, optimizer = with_sgd(inner, backend=backend)
    judge = torch.optim.SGD(bare.parameters(), lr=0.1)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    for step in range(2):
        output = model(x)
        assert torch.equal(output, bare(x)), step
        for each, own in ((output, optimizer), (bare(x), judge)):
            each.square().sum().backward()
            take_step(own)
    assert {name: getattr(inner, name) for name in names} == before
    assert {name: getattr(model, name) for name in names} == before
    saved = model.state_dict()
    check_equal(dict(bare.state_dict()), dict(saved))
    model.load_state_dict(saved)


@pytest.mark.parametrize("backend", ALL)
@on_ranks(1)
def test_a_parameter_may_have_a_name_that_is_ours_within(backend: str) -> None:
    module = nn.Linear(2, 2)
    module.scaled = nn.Parameter(torch.ones(1))
    model = fsshard.wrap(module, backend=backend, find_unused_parameters=True)
    assert list(model.state_dict()) == ["weight", "bias", "scaled"]
    assert model.scaled.shape == (1,)


def set_parameter(model: Any) -> None:
    model.logit_scale = nn.Parameter(torch.ones(1))


def set_module(model: Any) -> None:
    model.logit_scale = nn.Linear(1, 1)


TRAINABLE: dict[str, Callable[[Any], Any]] = {
    "a parameter": set_parameter,
    "a registered parameter": lambda model: model.register_parameter("logit_scale", nn.Parameter(torch.ones(1))),
    "a module": set_module,
    "an added module": lambda model: model.add_module("logit_scale", nn.Linear(1, 1)),
    "a registered module": lambda model: model.register_module("logit_scale", nn.Linear(1, 1)),
}


class Scaled(nn.Module):
    """Its output is multiplied by what may lie on it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        scale = getattr(self, "logit_scale", nn.Identity())
        y = self.layer(x)
        return scale(y.mean().view(1, 1)) if isinstance(scale, nn.Module) else y * scale


@pytest.mark.parametrize("what", TRAINABLE)
@on_ranks(1)
def test_what_has_to_be_trained_cannot_be_put_on_a_wrapped_model(what: str) -> None:
    model = fsshard.wrap(Scaled(), backend="none")
    with refused("set it on your own model before fsshard.wrap", ModelError):
        TRAINABLE[what](model)
    assert not hasattr(model, "logit_scale")
    module = Scaled()
    TRAINABLE[what](module)
    model = fsshard.wrap(module, backend="none")
    before = model.state_dict()
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    after = model.state_dict()
    trained = [name for name in before if not torch.equal(before[name], after[name])]
    assert any("logit_scale" in name for name in trained)


@pytest.mark.parametrize("backend", ALL)
@on_ranks(1)
def test_what_needs_no_training_reaches_the_users_model(backend: str) -> None:
    model, optimizer = with_sgd(nn.Linear(3, 3), backend=backend)
    model.criterion = nn.MSELoss()
    model.history = [1, 2]
    model.teacher = nn.Linear(1, 1).requires_grad_(False)
    model.scale = nn.Buffer(torch.ones(1))
    model.register_buffer("mask", torch.ones(2), persistent=False)
    assert model.criterion(torch.ones(1), torch.zeros(1)) == 1 and model.history == [1, 2]
    assert {name for name, _ in model.named_buffers()} == {"scale", "mask"}
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert {*model.state_dict()} == {"weight", "bias", "teacher.weight", "teacher.bias", "scale"}


class Planned(nn.Module):
    """Has attributes with the names of ours that are public."""

    def __init__(self) -> None:
        super().__init__()
        self.backend, self.plan = "numpy", "the user's"
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.parametrize("name", ["backend", "plan", "module", "no_sync", "_fsshard"])
@on_ranks(1)
def test_names_of_the_wrapper_itself_cannot_be_written(name: str) -> None:
    model = fsshard.wrap(Planned(), backend="none")
    with refused(f"to change an attribute of your model, write model.module.{name} = ...", ModelError):
        setattr(model, name, "other")
    setattr(model.module, name, "other")
    assert getattr(model.module, name) == "other"
    assert torch.equal(model(torch.ones(2)), torch.ones(2)) and model.backend.name == "none"


# ------------------------------------------------------------------------------------------- gradients by parameter


class Two(nn.Module):
    """Two layers, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))  # type: ignore[no-any-return]


def loss_of(model: Any, rank: int, step: int) -> Tensor:
    return model(torch.full((1, 2), 1.0 + rank + step)).square().sum()


@on_backends(DISTRIBUTED)
def test_dropping_one_optimizers_gradients_leaves_the_others_local(backend: str) -> None:
    rank = torch.distributed.get_rank()
    model = fsshard.wrap(Two(), backend=backend)
    a = fsshard.build_optimizer(model, torch.optim.SGD, ["a.weight", "a.bias"], lr=0.1)
    b = fsshard.build_optimizer(model, torch.optim.SGD, ["b.weight", "b.bias"], lr=0.1)
    with model.no_sync():
        loss_of(model, rank, 0).backward()
    a.zero_grad()
    for call in (b.step, model.clip_grad_norm_):
        with pytest.raises(OptimizerError, match=re.escape("the gradients are local")):
            call(1.0) if call == model.clip_grad_norm_ else call()  # type: ignore[operator]
    b.zero_grad()
    loss_of(model, rank, 1).backward()  # what comes next is as if that had not been
    a.step()
    b.step()
    bare = Two()
    by_hand.train(bare, torch.optim.SGD(bare.parameters(), lr=0.1), lambda m, r, _: loss_of(m, r, 1), steps=1, ranks=2)
    saved = model.state_dict()
    check_equal(dict(bare.state_dict()), dict(saved))
