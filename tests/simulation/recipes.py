"""Recipes for tests of the estimate, and what their ranks run."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import fsshard
from fsshard.comm import watchdog
from fsshard.recipes.recipe import Recipe
from fsshard.simulation.simulation import Job, Measured, measure


def real_run(job: Job) -> Measured:
    """This rank's step, on real tensors; collective."""
    warnings.filterwarnings("ignore")
    # A thread that tells other ranks where this one is holds its frames for a moment, and what lives in them.
    with patch.object(watchdog, "BUSY", -1.0):
        return measure(job)


class Net(nn.Module):
    """Two layers and a buffer."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, width), nn.Linear(width, 16)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))) * self.scale


class Branching(Net):
    """Goes one way or another by its numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class Selecting(Net):
    """How much it computes depends on its numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[x[:, 0] > 0])


class Broken(Net):
    """Its shapes do not fit."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.a(x))


class Copied(Net):
    """Its layers are deep copies, as those of nn.TransformerEncoder."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = copy.deepcopy(self.a), copy.deepcopy(self.b)
        self.norm = copy.deepcopy(nn.BatchNorm1d(16))  # it has a buffer whose number is known

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x) * copy.deepcopy({"scale": self.scale})["scale"])


class Converted(Net):
    """Made in one dtype, trained in another."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double())


class Recurrent(Net):
    """An LSTM, whose kernel on the CPU keeps memory in a form of its own for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.lstm(x[None])[0][0])


class Unused(Net):
    """A large layer takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(64, 64)


class Wide(Net):
    """The next two, with nothing frozen."""

    def __init__(self) -> None:
        super().__init__(256)


class Adapted(Wide):
    """Adapters alone are trained."""

    def __init__(self) -> None:
        super().__init__()
        fsshard.lora(self, rank=2, target="weight")


class HalfFrozen(Net):
    """The first layers, as large as the last one, are not trained."""

    def __init__(self) -> None:
        super().__init__(256)
        self.a.requires_grad_(False)


def noise(rank: int, world_size: int, number: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * rank + number))


def square(model: Callable[..., Tensor], batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def net(**changes: Any) -> Recipe:
    """A recipe of :class:`Net`."""
    return Recipe(**{"build": Net, "batches": noise, "loss": square, "name": "net", **changes})


def printing() -> Recipe:
    """One that prints."""
    print("printed by the recipe")
    return net()
