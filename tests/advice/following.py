"""A refusal whose advice the same test follows, and the judge of what comes of it: replicas averaged by hand."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard
from fsshard.errors import FsshardError
from tests import by_hand
from tests.models import take_step

DIVIDED = ("fsdp", "fsdp2")


@contextlib.contextmanager
def refused(advice: str, kind: type[BaseException] = FsshardError) -> Iterator[None]:
    """Expect an error that has ``advice`` in its text; what stands below this block in the test does as it says."""
    with pytest.raises(kind, match=re.escape(advice)):
        yield


def cases(module: dict[str, Any]) -> list[Callable[..., None]]:
    """The functions of a test file that run on ranks, each with a refusal and what follows."""
    return [value for name, value in module.items() if name.startswith("case_")]


class Scale(nn.Module):
    """A sharding unit of one parameter."""

    def __init__(self, value: Tensor, **settings: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(value, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.to(x.dtype)


def plain() -> Any:
    """Three layers, the second of them a unit under ``auto_wrap_policy={Scale}``; the same weights at every call."""
    torch.manual_seed(0)
    # Not linspace: in a process that first entered torch.device("meta") within transformers' from_pretrained, which
    # replaces it meanwhile (5.23), torch (2.13) has cached its constructors without it, and makes it on the CPU.
    return nn.Sequential(nn.Linear(4, 6), Scale(0.5 + torch.arange(6) / 5), nn.Linear(6, 2))


def batch(step: int = 0, rank: int | None = None) -> Tensor:
    seed = 10 * step + (dist.get_rank() if rank is None else rank)
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


Loss = Callable[[Any, Tensor], Tensor]


def square(model: Any, x: Tensor) -> Tensor:
    return model(x).abs().square().mean()


def train(model: Any, loss: Loss = square, steps: int = 2) -> Any:
    optimizer = fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)
    for step in range(steps):
        loss(model, batch(step)).backward()
        take_step(optimizer)
    return model


def refuse(advice: str, build: Callable[[], Any] = plain, loss: Loss = square, **settings: Any) -> None:
    """Expect the advice when a model is wrapped, or at the latest when it is trained."""
    with refused(advice):
        train(fsshard.wrap(build(), **settings), loss)


def is_trained(state: Any, build: Callable[[], Any] = plain, loss: Loss = square, steps: int = 2) -> None:
    """Compare weights with those of replicas averaged by hand."""
    bare = build()
    optimizer = torch.optim.SGD([parameter for parameter in bare.parameters() if parameter.requires_grad], lr=0.1)

    def loss_of(model: Any, rank: int, step: int) -> Tensor:
        return loss(model, batch(step, rank))

    by_hand.train(bare, optimizer, loss_of, steps=steps, ranks=dist.get_world_size())
    for name, value in bare.named_parameters():
        assert torch.allclose(state[name], value, rtol=1e-5, atol=1e-6), name


def is_right(model: Any, build: Callable[[], Any] = plain, loss: Loss = square, reference: Loss | None = None) -> None:
    """Train what ``wrap`` returned for two steps, and compare its weights with those of replicas averaged by hand."""
    is_trained(train(model, loss).state_dict(), build, reference or loss)


def right(build: Callable[[], Any] = plain, judge: Callable[[], Any] | None = None, **settings: Any) -> None:
    """Wrap a model as the advice says, and train it; ``judge`` builds what it is compared with, if that differs."""
    is_right(fsshard.wrap(build(), **settings), judge or build)
