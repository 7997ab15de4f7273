"""The bare copy answers questions and leaves no trace."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn

from fsshard.parity import Recipe
from fsshard.parity.seeding import kept_random_numbers, random_state, seed_all
from fsshard.parity.shadow import Shadow


class Restless(nn.Module):
    """Draws from every generator, and grows a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.detach()])
        scale = random.random() + float(np.random.rand()) + torch.rand(())
        out: Tensor = self.linear(x) * scale * len(self.seen)
        return out


def recipe() -> Recipe:
    return Recipe(
        build=Restless,
        batches=lambda rank, world_size, number: torch.ones(2, 3) * (number + 1),
        loss=lambda model, batch: model(batch).square().mean(),
    )


def batches() -> list[Tensor]:
    return [torch.ones(2, 3), 2 * torch.ones(2, 3)]


def test_an_evaluation_repeats_itself_and_leaves_the_generators_alone() -> None:
    seed_all(5)
    before = random_state()
    shadow = Shadow(recipe(), "cpu")
    assert random_state() == before
    weights = {"linear.weight": torch.full((2, 3), 0.5), "linear.bias": torch.zeros(2)}
    shadow.load(weights.items(), [("seen", torch.zeros(0, 3))])
    one, other = shadow.evaluate(batches), shadow.evaluate(batches)
    assert random_state() == before
    assert one.drew
    assert one.loss == other.loss > 0
    assert torch.equal(one.gradients["linear.weight"], other.gradients["linear.weight"])


def test_moduli_are_of_each_batch() -> None:
    """Batches whose gradients cancel in their sum."""
    opposed = Recipe(
        build=lambda: nn.Linear(1, 1),
        batches=lambda rank, world_size, number: torch.ones(1, 1),
        loss=lambda model, batch: (model(torch.ones(1, 1)) * batch).sum(),
    )
    shadow = Shadow(opposed, "cpu")
    pair = [torch.ones(1, 1), -torch.ones(1, 1)]
    assert float(shadow.evaluate(lambda: pair).gradients["weight"]) == 0.0
    assert float(shadow.moduli(lambda: pair)["weight"]) == 1.0  # 1/2 + 1/2


def test_random_numbers_are_put_back() -> None:
    seed_all(1)
    with kept_random_numbers():
        drawn = (random.random(), np.random.rand(), float(torch.rand(())))
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == drawn
