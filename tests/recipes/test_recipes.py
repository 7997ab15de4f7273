"""The recipes that come with fsshard are what they say: deterministic, mean losses, trainable, found by name.

Tests fsshard/recipes/models.py and fsshard/recipes/samples.py.
"""

from __future__ import annotations

import importlib.util
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from fsshard import MissingExtra, recipes
from fsshard.recipes.recipe import Recipe, join_batches, resolve
from fsshard.recipes.samples import SAMPLES
from tests.models import take_step

LATER = range(1000, 1008)
"""Numbers of batches that no training here uses."""


@pytest.fixture(params=recipes.__all__)
def recipe(request: pytest.FixtureRequest) -> Recipe:
    """Each recipe, as the command line finds it."""
    try:
        return resolve(request.param)
    except MissingExtra as error:
        pytest.skip(str(error))


def built(recipe: Recipe) -> torch.nn.Module:
    torch.manual_seed(recipe.seed)
    return recipe.build()


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", recipes.__all__)
def test_each_says_what_it_trains(name: str) -> None:
    assert (getattr(recipes, name).__doc__ or "").strip()


def test_it_is_found_by_name(recipe: Recipe) -> None:
    assert recipe.name in recipes.__all__
    assert resolve(f"fsshard.recipes:{recipe.name}").loss is recipe.loss


def test_it_travels(recipe: Recipe) -> None:
    """Its parts are at the top level of a module, so the recipe itself can be sent to another process."""
    there = pickle.loads(pickle.dumps(recipe))
    assert there.optimizer is recipe.optimizer and there.loss is recipe.loss
    assert equal(there.batches(0, 1, 0), recipe.batches(0, 1, 0))
    assert list(built(there).state_dict()) == list(built(recipe).state_dict())


def test_two_builds_from_one_seed_are_equal(recipe: Recipe) -> None:
    one, other = (built(recipe).state_dict() for _ in range(2))
    assert list(one) == list(other)
    assert equal({k: v for k, v in one.items() if isinstance(v, Tensor)}, other)


def test_batches_depend_on_rank_and_number_and_nothing_else(recipe: Recipe) -> None:
    before = torch.get_rng_state()
    batch = recipe.batches(1, 2, 3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert equal(batch, recipe.batches(1, 2, 3))
    assert equal(batch, recipe.batches(1, 4, 3))
    assert not equal(batch, recipe.batches(0, 2, 3))
    assert not equal(batch, recipe.batches(1, 2, 4))
    assert {tensor.shape[0] for tensor in batch.values()} == {SAMPLES}


def test_the_loss_is_a_mean_over_samples(recipe: Recipe) -> None:
    """The joined batch has the mean of its parts' losses and gradients; dropout and BatchNorm stand still."""
    model = built(recipe).eval()
    parts = [recipe.batches(rank, 3, 0) for rank in range(3)]
    for part in parts:
        (recipe.loss(model, part) / 3).backward()
    means = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with torch.no_grad():
        mean = sum(recipe.loss(model, part) for part in parts) / 3
    joined = recipe.loss(model, join_batches(parts))
    joined.backward()
    torch.testing.assert_close(joined.detach(), torch.as_tensor(mean))
    for gradient, parameter in zip(means, model.parameters(), strict=True):
        assert gradient is not None and parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_it_learns(recipe: Recipe) -> None:
    model = built(recipe)
    optimizer = recipe.optimizer(model.parameters(), **recipe.hyper)
    before = error(recipe, model)
    for number in range(20):
        recipe.loss(model.train(), recipe.batches(0, 1, number)).backward()
        take_step(optimizer)
    assert error(recipe, model) < 0.99 * before


def error(recipe: Recipe, model: torch.nn.Module) -> float:
    """On samples that it was not trained on."""
    with torch.no_grad():
        return sum(float(recipe.loss(model.eval(), recipe.batches(0, 1, number))) for number in LATER) / len(LATER)


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("tfno", "neuraloperator", "neuralop"),
        ("gino", "neuraloperator", "neuralop"),
        ("sfno", "neuraloperator", "sfno"),
        ("t5", "transformers", "transformers"),
    ],
)
def test_a_missing_package_is_said_before_any_rank_starts(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str, extra: str
) -> None:
    def nothing(module: str, *_: Any) -> None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", nothing)
    with pytest.raises(MissingExtra, match=rf"{package}.*fsshard\[{extra}\]"):
        resolve(name)
