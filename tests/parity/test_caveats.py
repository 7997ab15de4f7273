"""Recipes with which engines agree whatever they do: the report says so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsshard.parity import Engine, Recipe, compare
from tests.parity.faults import loss, normal, real_mlp


def recipe(**changes: Any) -> Recipe:
    return Recipe(**{"build": real_mlp, "batches": normal(4, 6), "loss": loss, **changes})


def _same(rank: int, world_size: int, number: int) -> Any:
    return normal(4, 6)(0, world_size, number)


same_batches = functools.partial(recipe, batches=_same, accumulate=2)


def _sometimes_other(rank: int, world_size: int, number: int) -> Any:
    return normal(4, 6)(rank if number == 3 else 0, world_size, number)


sometimes_other_batches = functools.partial(recipe, batches=_sometimes_other, accumulate=2)


def _diverging(model: Any, batch: Tensor) -> Tensor:
    return loss(model, batch) * 1e30


# finite at first; the update is so large that the next loss is not
diverging = functools.partial(recipe, loss=_diverging, optimizer=torch.optim.SGD, hyper={"lr": 1.0})


standing = functools.partial(recipe, hyper={"lr": 0.0})


@pytest.mark.parametrize(
    ("source", "reference", "text"),
    [
        (same_batches, "ddp", "all ranks get the same batches"),
        (same_batches, "none", "all ranks get the same batches"),
        (standing, "ddp", "no weight changed in 2 steps"),
        (diverging, "ddp", "at step 1 on rank 0"),
        (sometimes_other_batches, "ddp", ""),
        (sometimes_other_batches, "none", ""),
    ],
)
def test_what_a_recipe_cannot_show_is_told(ranks: Any, source: Callable[[], Recipe], reference: str, text: str) -> None:
    report = compare(source, backends=[reference], world_sizes=[2, 1], steps=2, reference=reference, pool=ranks)
    assert report.ok
    assert len(report.warnings) == bool(text)  # once, though two world sizes have it
    assert all(text in warning and f"warning: {warning}" in str(report) for warning in report.warnings)
    assert ("1 warning" in str(report)) == bool(text)


class Lonely(Engine):
    """Reduces nothing: every rank trains by itself."""

    name = "lonely"

    def __init__(self, recipe: Recipe, module: nn.Module) -> None:
        super().__init__(recipe, module)
        self.model = self.module = module
        self.optimizer = recipe.optimizer(module.parameters(), **recipe.hyper)


def test_an_engine_that_reduces_nothing_passes_only_with_a_warning(ranks: Any) -> None:
    found = [
        compare(source, backends=[Lonely], world_sizes=[2], steps=2, pool=ranks) for source in (same_batches, recipe)
    ]
    assert [(report.ok, len(report.warnings)) for report in found] == [(True, 1), (False, 0)]
    first = found[1].cells[0].first_divergence
    assert first is not None and (first.step, first.quantity, first.name) == (0, "gradient", "0.weight")
