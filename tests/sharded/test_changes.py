"""What is added, replaced or removed after wrap is named at the next forward; what needs no training may come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsshard
from fsshard.errors import ModelError
from tests.models import Spectral, batch, net
from tests.sets import often
from tests.training_runs import DISTRIBUTED, ranks_of

BACKENDS = (*DISTRIBUTED, "none")


class LowRank(nn.Module):
    """A layer beside its base, as adapters are injected."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(6, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.down(x)  # type: ignore[no-any-return]


def replaced_head(model: Any) -> None:
    model.last = nn.Linear(6, 1)


def adapter(model: Any) -> None:
    model.module.middle[1] = LowRank(model.module.middle[1])


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a head is swapped": (replaced_head, "added: last.weight, last.bias; removed: last.weight, last.bias"),
    "an adapter is injected": (adapter, "added: middle.1.down.weight"),
    "a layer is appended": (lambda m: m.middle.append(Spectral()), "added: middle.2.weight, middle.2.bias"),
    "on the wrapped model": (lambda m: setattr(m, "extra", nn.Linear(2, 2)), "added: extra.weight, extra.bias"),
    "a complex parameter": (
        lambda m: m.first.register_parameter("z", nn.Parameter(torch.ones(1, dtype=torch.complex64))),
        "added: first.z",
    ),
    "a parameter is assigned": (
        lambda m: setattr(m.last, "weight", nn.Parameter(torch.ones(1, 6))),
        "replaced: last.weight",
    ),
    "a parameter becomes none": (lambda m: setattr(m.last, "bias", None), "replaced: last.bias"),
    "tied": (lambda m: setattr(m.middle[0], "bias", m.module.first.bias), "replaced: middle.0.bias"),
    "replaced by nothing": (lambda m: setattr(m.module, "last", nn.Identity()), "removed: last.weight, last.bias"),
}


def train(model: Any, steps: int = 1) -> None:
    """Some steps of a model that has an optimizer."""
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    for step in range(steps):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def job_changes(backend: str) -> dict[str, list[str]]:
    """Change -> what a forward, a state dict and a save say."""
    found: dict[str, list[str]] = {}
    for name, (change, _) in CHANGES.items():
        model: Any = fsshard.wrap(net(), backend=backend)
        train(model)
        try:
            change(model)
        except ModelError as error:
            found[name] = [str(error)] * 2
            continue
        told = found[name] = []
        for use in (lambda: model(batch(9)), model.state_dict):  # noqa: B023
            try:
                use()
                told.append("nothing was said")
            except ModelError as error:
                told.append(str(error))
    return found


@pytest.mark.parametrize("backend", often(BACKENDS, "fsdp2", "fairscale", "none"))
def test_a_change_of_the_model_is_named(ranks: Any, backend: str) -> None:
    for found in ranks.run(job_changes, ranks_of(backend), backend):
        for name, told in found.items():
            assert all(CHANGES[name][1] in text and "wrap it then" in text for text in told), (name, told)


def job_harmless(backend: str) -> list[Any]:
    """Changes that need no training, between steps and between evaluations; state dicts and buffers go with them."""
    model: Any = fsshard.wrap(net(), backend=backend, auto_wrap_policy={Spectral})
    train(model)
    with torch.no_grad():
        model.eval()(batch(0))  # engines leave the root gathered
        model(batch(1))
    model.train()
    model.module.activation = nn.Tanh()
    model.module.alias = model.module.first
    model.first.register_buffer("seen", torch.ones(2))
    model.module.norm = nn.BatchNorm1d(3, affine=False)
    teacher = nn.Linear(4, 1).requires_grad_(False)
    model.teacher = teacher
    train(model, 2)
    del model.module.alias
    train(model)
    norm = [buffer for buffer in model.buffers_held._now().values() if buffer is model.module.norm.running_mean]
    return ["first.seen" in model.state_dict(), len(norm), model.teacher is teacher]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_needs_no_training_may_come_and_go(ranks: Any, backend: str) -> None:
    for found in ranks.run(job_harmless, ranks_of(backend), backend):
        assert found == [True, 1, True]


def job_undone(backend: str) -> list[str]:
    """A change that is taken back, and one within full_parameters()."""
    model: Any = fsshard.wrap(net(), backend=backend)
    before = model.module.last
    model.module.last = nn.Linear(6, 1)
    with pytest.raises(ModelError, match=r"added: last\.weight"):
        model(batch(0))
    model.module.last = before
    train(model)
    with model.full_parameters():
        pass
    model.teacher = nn.Linear(4, 1).requires_grad_(False)
    model(batch(0))
    model.teacher.requires_grad_(True)
    with pytest.raises(ModelError, match=r"added: teacher\.weight"):
        model(batch(0))
    return []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_change_may_be_taken_back(ranks: Any, backend: str) -> None:
    assert ranks.run(job_undone, ranks_of(backend), backend) == [[]] * ranks_of(backend)
