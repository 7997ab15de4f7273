"""A model that is hard to recompute, and what ranks train with it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.models import Spectral, batch, take_step, with_adam
from tests.training_runs import gradients

WIDTH = 6


class Counter:
    """Counts forwards and recomputations: what a module counts in an attribute, recomputation puts back."""

    def __init__(self) -> None:
        self.count = 0


class Notes:
    """Notes of what a module has seen, for the same reason kept outside of its own attributes."""

    def __init__(self) -> None:
        self.seen: list[Any] = []


class Inner(nn.Module):
    """Complex weights and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.spectral, self.drop = Spectral(WIDTH), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.spectral(x)))


class Block(nn.Module):
    """Statistics of a batch, a keyword that need not be given, a tuple as output; counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.linear = Inner(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.ones(WIDTH))
        self.counter = Counter()

    @property
    def calls(self) -> int:
        """How often the forward ran."""
        return self.counter.count

    def forward(self, x: Tensor, *, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.counter.count += 1
        if bias is None:
            bias = torch.tanh(self.bias)
        return x + self.norm(self.linear(self.inner(x))) + bias * self.bias, bias


class Pair(nn.Module):
    """Two blocks, the second of which gets what the first has made."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        x, bias = self.one(x)
        return self.two(x, bias=bias)[0]


class Stack(nn.Module):
    """Two pairs of blocks between tied layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pairs, self.last = (
            nn.Linear(4, WIDTH),
            nn.ModuleList([Pair(), Pair()]),
            nn.Linear(4, WIDTH, bias=False),
        )
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for pair in self.pairs:
            x = pair(x)
        return x @ self.last.weight


BLOCKS = [f"pairs.{index}.{name}" for index in (0, 1) for name in ("one", "two")]

LAYOUTS: dict[str, tuple[Any, Any]] = {
    "the units": ({Block}, True),
    "in the root, which is the only unit": (None, {Block}),
    "around units": ({Inner}, {Block}),
    "inside of units": ({Pair}, {Block}),
    "around a unit and inside of one": ({Inner, Pair}, {Block}),
}
"""Name -> sharding units, and what is recomputed."""


def stack() -> Stack:
    """The same weights at every call."""
    torch.manual_seed(0)
    return Stack()


def train(backend: str, steps: int = 3, **settings: Any) -> dict[str, Any]:
    """Everything that a short training computes; collective."""
    module = stack()
    blocks = [m for m in module.modules() if isinstance(m, Block)]
    names = list(module.state_dict())
    model, optimizer = with_adam(module, backend=backend, **settings)
    trace = {"losses": [], "gradients": [], "calls": []}
    for step in range(steps):
        torch.manual_seed(100 * step + dist.get_rank())
        loss = model(batch(step)).square().mean()
        trace["losses"].append(loss.item())
        loss.backward()
        trace["gradients"].append(gradients(model))
        take_step(optimizer)
        trace["calls"].append([block.calls for block in blocks])
    trace["weights"], trace["random"] = model.state_dict(), torch.get_rng_state()
    assert list(trace["weights"]) == names, "names"
    assert all(type(block).__name__.endswith("Block") and isinstance(block, Block) for block in blocks)
    return trace
