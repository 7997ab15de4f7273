"""Forwards that hand weights to their own parts, or recompute these: as replicas averaged by hand, on all engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import by_hand
from tests.models import take_step, with_sgd
from tests.on_ranks import on_backends, on_ranks
from tests.training_runs import DISTRIBUTED, check_equal


class Inner(nn.Module):
    """A complex weight between real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.weight = nn.Parameter(torch.randn(5, 4, dtype=torch.complex64) * 0.4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = (self.first(x).to(torch.complex64) @ self.weight).abs()
        return self.last(y)  # type: ignore[no-any-return]


class OneInnerStep(nn.Module):
    """Takes a step of its own by ``torch.func.grad``, and computes with what that gives (MAML)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())

        def inner(values: dict[str, Tensor]) -> Tensor:
            output = torch.func.functional_call(self.net, values, (x[:3],))
            return output.square().mean()

        gradients = torch.func.grad(inner)(weights)
        stepped = {name: value - 0.5 * gradients[name] for name, value in weights.items()}
        return torch.func.functional_call(self.net, stepped, (x[3:],))  # type: ignore[no-any-return]


class Hyper(nn.Module):
    """Another network's output is the weight of a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make = nn.Linear(6, 18)
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.make(x.mean(0)).view(3, 6)
        given = {"weight": weight, "bias": self.layer.bias}
        return torch.func.functional_call(self.layer, given, (x,))  # type: ignore[no-any-return]


class Halved(nn.Module):
    """Hands all weights of a part, complex ones too, changed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Inner()

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: 0.5 * value for name, value in self.net.named_parameters()}
        return torch.func.functional_call(self.net, weights, (x,))  # type: ignore[no-any-return]


MODELS = (OneInnerStep, Hyper, Halved)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(6, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: Any, rank: int, step: int) -> Tensor:
    return model(batch(rank, step)).square().mean()


@pytest.mark.covering
@pytest.mark.parametrize("kind", MODELS)
@on_backends(DISTRIBUTED)
def test_weights_that_are_handed_in_are_computed_with(backend: str, kind: type[nn.Module]) -> None:
    model, optimizer = with_sgd(kind(), backend=backend, find_unused_parameters=True, auto_wrap_policy=None)
    rank = dist.get_rank()
    losses = []
    for step in range(3):
        loss = loss_of(model, rank, step)
        loss.backward()
        take_step(optimizer)
        losses.append(loss.item())
    bare = kind()
    want = by_hand.train(bare, torch.optim.SGD(bare.parameters(), lr=0.1), loss_of, steps=3, ranks=2)
    assert losses == want[rank]
    saved = model.state_dict()
    check_equal(dict(bare.state_dict()), dict(saved))


@on_ranks()
def test_raw_fsdp1_ignores_them() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    raw = FullyShardedDataParallel(Hyper(), use_orig_params=True, device_id=torch.device("cpu"))
    assert loss_of(raw, 0, 0).item() != loss_of(Hyper(), 0, 0).item()


class Recomputed(nn.Module):
    """Has parts that its own forward recomputes, as users write it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.last = nn.Linear(8, 2)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.middle, torch.tanh(self.first(x)), use_reentrant=self.reentrant)
        return self.last(y)  # type: ignore[no-any-return]


@pytest.mark.covering
@pytest.mark.parametrize("reentrant", [False, True])
@on_backends(DISTRIBUTED)
def test_parts_that_a_forward_recomputes_itself(backend: str, reentrant: bool) -> None:
    for policy in (None, {nn.Sequential}):
        model, optimizer = with_sgd(Recomputed(reentrant), backend=backend, auto_wrap_policy=policy)
        for step in range(3):
            loss_of(model, dist.get_rank(), step).backward()
            take_step(optimizer)
        bare = Recomputed(reentrant)
        by_hand.train(bare, torch.optim.SGD(bare.parameters(), lr=0.1), loss_of, steps=3, ranks=2)
        saved = model.state_dict()
        check_equal(dict(bare.state_dict()), dict(saved))
