"""Recipes for tests of the tuner, and what their ranks run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fsshard.recipes.recipe import Recipe

WIDTH, SAMPLES = 32, 64


class Block(nn.Module):
    """Keeps activations, and owns most of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(torch.tanh(self.up(x)))
        return x + self.down(torch.sin(torch.sin(y)))


class Repeated(nn.Module):
    """Called once per block: as a unit it would be gathered each time."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, 5 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mix(x).sum(-1, keepdim=True)


class Tower(nn.Module):
    """Blocks, and one module that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Repeated()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(self.shared(x))
        return x


def samples(rank: int, world_size: int, number: int) -> Tensor:
    """Ones: what they are means nothing to a simulation."""
    return torch.ones(SAMPLES, WIDTH)


def square(model: Any, batch: Tensor) -> Tensor:
    """A number."""
    return model(batch).square().mean()


def tower() -> Recipe:
    """A recipe of :class:`Tower`."""
    return Recipe(build=Tower, batches=samples, loss=square)
