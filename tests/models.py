"""Tiny models for tests that need no zoo."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsshard


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """End a training step as scripts do."""
    optimizer.step()
    optimizer.zero_grad()


def with_sgd(module: nn.Module, **settings: Any) -> tuple[Any, Any]:
    """Wrap a module, and build the plainest optimizer over it."""
    model = fsshard.wrap(module, **settings)
    return model, fsshard.build_optimizer(model, torch.optim.SGD, lr=0.1)


def with_adam(module: nn.Module, **settings: Any) -> tuple[Any, Any]:
    """Wrap a module, and build over it an optimizer that has state."""
    model = fsshard.wrap(module, **settings)
    return model, fsshard.build_optimizer(model, torch.optim.Adam, lr=0.01)


class Spectral(nn.Module):
    """A layer with its own complex weight next to a real one, as a spectral convolution has."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, dtype=torch.complex64) / width)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).real + self.bias


class Net(nn.Module):
    """Real and complex layers, an odd-sized parameter, and a buffer."""

    steps: Tensor

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.middle = nn.ModuleList([Spectral(width), Spectral(width)])
        self.last = nn.Linear(width, 1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.middle:
            x = x + torch.tanh(layer(x))
        if self.training:
            self.steps += 1
        return self.last(x)


def net() -> Net:
    """The same weights at every call."""
    torch.manual_seed(0)
    return Net()


class TwoHeads(nn.Module):
    """Uses one of two heads, or on some ranks another than on others."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = Spectral(4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor, head: str) -> Tensor:
        return getattr(self, head)(torch.tanh(self.body(x)))


def two_heads() -> TwoHeads:
    """The same weights at every call."""
    torch.manual_seed(0)
    return TwoHeads()


def batch(step: int, width: int = 4) -> Tensor:
    """This rank's batch of a step."""
    return torch.randn(3, width, generator=torch.Generator().manual_seed(17 * step + dist.get_rank()))
