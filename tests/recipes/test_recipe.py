"""Checks what counts as a recipe, and what is said of what does not."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from fsshard.errors import RecipeError
from fsshard.parity import Recipe, resolve
from fsshard.recipes.recipe import join_batches


def parts() -> dict[str, Any]:
    return {
        "build": lambda: nn.Linear(2, 2),
        "batches": lambda rank, world_size, number: torch.zeros(3, 2),
        "loss": lambda model, batch: model(batch).mean(),
    }


def example() -> Recipe:
    return Recipe(**parts(), clip=2)


def with_lr(lr: float) -> Recipe:
    return Recipe(**parts(), hyper={"lr": lr})


NAMED = Recipe(**parts(), name="my own")


class LikeOne:
    """Three methods and one setting."""

    accumulate = 2

    def build(self) -> nn.Module:
        return nn.Linear(2, 2)

    def batches(self, rank: int, world_size: int, number: int) -> Any:
        return torch.zeros(3, 2)

    def loss(self, model: Any, batch: Any) -> Any:
        return model(batch).mean()


def test_what_counts_as_a_recipe() -> None:
    assert resolve(example).name == "example"
    assert resolve(example).clipping == (2.0, 2.0)
    assert resolve(functools.partial(with_lr, 0.5)).name == "with_lr"
    assert resolve(functools.partial(with_lr, 0.5)).hyper == {"lr": 0.5}
    assert resolve(NAMED) is NAMED
    assert resolve(LikeOne()).accumulate == 2
    assert resolve(LikeOne()).name == "LikeOne"
    assert resolve("tests.recipes.test_recipe:NAMED") is NAMED
    assert resolve("tests.recipes.test_recipe:example").name == "tests.recipes.test_recipe:example"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (3, "not a recipe"),
        (with_lr, "needs lr"),
        (dict, "not a recipe"),
        ("tests.recipes.test_recipe", "expected 'module:attribute'"),
        ("tests.parity.nowhere:x", "no module 'tests.parity.nowhere'"),
        ("tests.recipes.test_recipe:nothing", "it has .*example"),
    ],
)
def test_what_does_not(source: Any, text: str) -> None:
    with pytest.raises(RecipeError, match=text):
        resolve(source)


OFFERS: list[tuple[dict[str, Any], str]] = [
    ({"fast": functools.partial(with_lr, 0.5), "with_lr": with_lr}, "no 'nope'; it has fast$"),
    ({"nop": functools.partial(with_lr, 0.5)}, "it has nop; does it mean nop"),
    ({"ops": torch.ops, "mock": MagicMock(), "nn": nn, "kind": Recipe}, "it has no recipe$"),
]


@pytest.mark.parametrize(("holds", "text"), OFFERS, ids=[next(iter(holds)) for holds, _ in OFFERS])
def test_a_name_that_is_not_there_is_told_what_is(
    holds: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("offers")
    vars(module).update(holds)
    monkeypatch.setitem(sys.modules, "offers", module)
    with pytest.raises(RecipeError, match=text):
        resolve("offers:nope")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("clipping", "clip"), ("mixed_precision", "precision"), ("optimiser", "optimizer"), ("lr_scheduler", "scheduler")],
)
def test_a_misspelt_attribute_is_not_passed_over(name: str, meant: str) -> None:
    made = LikeOne()
    setattr(made, name, None)
    with pytest.raises(RecipeError, match=rf"LikeOne\.{name} is not an attribute of a recipe; does it mean {meant}\?"):
        resolve(made)
    setattr(made, meant, getattr(example(), meant))
    resolve(made)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"build": 3}, r"recipe\.build: expected a function"),
        ({"optimizer": "Adam"}, "expected a torch.optim.Optimizer class"),
        ({"accumulate": 0}, "expected a positive integer"),
    ],
)
def test_fields_are_checked(change: dict[str, Any], text: str) -> None:
    with pytest.raises(RecipeError, match=text):
        Recipe(**{**parts(), **change})


def test_batches_are_joined_along_their_samples() -> None:
    one = {"x": torch.zeros(2, 3), "more": (torch.zeros(2), "mean"), "scale": torch.tensor(0.5)}
    other = {"x": torch.ones(4, 3), "more": (torch.ones(4), "mean"), "scale": torch.tensor(0.5)}
    joined = join_batches([one, other])
    assert joined["x"].shape == (6, 3)
    assert joined["more"][0].tolist() == [0, 0, 1, 1, 1, 1]
    assert joined["more"][1] == "mean"
    assert joined["scale"].item() == 0.5
    with pytest.raises(RecipeError, match="give the recipe a join function"):
        join_batches([{"k": 1}, {"k": 2}])
    own = Recipe(**parts(), join=lambda batches: sum(batches))
    assert own.joined([1, 2, 3]) == 6
    assert own.joined([1]) == 1
