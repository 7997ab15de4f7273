"""The bare copy of a model leaves no trace; its modules' outputs are noted; other rounding is one unit off."""

from __future__ import annotations

import copy
import random

import numpy as np
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from fsshard.parity import Recipe
from fsshard.parity.one_process import ForwardWatch, Shadow, first_difference, perturbed, random_state
from fsshard.parity.report import ulps_between
from fsshard.recipes.recipe import seed_all


class Restless(nn.Module):
    """Draws from every generator, and grows a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.detach()])
        scale = random.random() + float(np.random.rand()) + torch.rand(())
        return self.linear(x) * scale * len(self.seen)


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


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cell(self.cell(x)))


def test_the_first_module_with_another_output_is_named() -> None:
    model = Twice()
    watch = ForwardWatch(model)
    x = torch.ones(2, 3)
    with watch.forward():
        model(x)
    before = [list(item) for item in watch.take()]
    assert [name for name, _ in before] == ["cell", "cell", "out", ""]
    with torch.no_grad():
        model.out.weight += 1
    model(x)  # outside, so not recorded
    with watch.forward():
        model(x)
    after = [list(item) for item in watch.take()]
    assert "different output is 'out'" in first_difference(before, after)
    assert first_difference(before, before) == ""
    assert first_difference(before, before[:2]) == "module 'out' ran 0 times, under the reference 1 times"
    assert (
        first_difference(before, [before[0], *before[2:]]) == "module 'out' ran where 'cell' does under the reference"
    )
    assert watch.take() == []


def test_a_copy_of_the_model_is_watched_too() -> None:
    """An engine may train a copy."""
    model = Twice()
    watch = ForwardWatch(model)
    with watch.forward():
        copy.deepcopy(model)(torch.ones(2, 3))
    assert [name for name, _ in watch.take()] == ["cell", "cell", "out", ""]


def test_what_is_compiled_is_not_looked_into() -> None:
    model, counter = Twice(), CompileCounter()
    watch = ForwardWatch(model)
    with watch.forward():
        torch.compile(model.forward, backend=counter)(torch.ones(2, 3)).sum().backward()
    assert counter.frame_count == 1 and watch.take() == []


def source(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_every_result_is_one_unit_off() -> None:
    x = torch.rand(1000, generator=source(0)).requires_grad_()
    exact = x * 3.0
    with perturbed(source(1)):
        moved = x * 3.0
    apart = (moved - exact).detach()
    assert 1 <= ulps_between(moved.detach(), exact.detach()) <= 2  # at a power of two a unit has two sizes
    assert bool((apart != 0).all()) and 300 < int((apart > 0).sum()) < 700


def test_the_backward_pass_too_and_complex_numbers() -> None:
    found = []
    for seed in (1, 1, 2):
        w = torch.tensor([1 + 1j, 2 - 1j], requires_grad=True)
        with perturbed(source(seed)):
            (w * torch.tensor([0.3 + 0.1j, 0.7j])).abs().square().sum().backward()
        found.append(w.grad)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert torch.allclose(found[0], found[2], rtol=1e-5)


def test_what_is_not_differentiated_is_left_alone() -> None:
    """An index that is computed in float must not become another one."""
    before = torch.get_rng_state()
    with perturbed(source(3)):
        place = (torch.arange(8.0) * 2 / 2).long()
        view = torch.ones(4, requires_grad=True).view(2, 2)
    assert place.tolist() == list(range(8)) and view.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert torch.equal(before, torch.get_rng_state())
