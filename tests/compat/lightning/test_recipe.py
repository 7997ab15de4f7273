"""A LightningModule as a recipe: the training that Lightning's Trainer does.

Tests compat/recipes.py too.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning.pytorch")

from torch.utils.data import ChainDataset, DataLoader, WeightedRandomSampler

from fsshard.compat.lightning import from_lightning
from fsshard.errors import RecipeError
from fsshard.parity import compare
from tests.compat.lightning import recipes as made

SOURCE = "tests.compat.lightning.recipes:recipe"


def test_four_engines_train_it_alike_and_as_lightning_does(ranks: Any) -> None:
    engines = ["ddp", "fsdp2", "fsdp", "fairscale"]
    report = compare(SOURCE, backends=engines, world_sizes=[2], steps=made.STEPS, pool=ranks)
    assert report.ok and [cell.verdict for cell in report.cells] == ["exact"] * 4, str(report)
    theirs = ranks.run(made.by_lightning, 2)
    assert theirs[0][0] != theirs[1][0] and len(theirs[0][0]) == made.STEPS
    assert ranks.run(made.by_recipe, 2, SOURCE, "fsdp2", made.STEPS) == theirs


def test_what_a_recipe_cannot_say_is_refused() -> None:
    for kind, words in (
        (made.Manual, "takes its own steps"),
        (made.Hooked, "on_before_optimizer_step is not called in a recipe"),
        (made.Several, "gave 2 optimizers"),
        (made.Plateau, "ReduceLROnPlateau watches a metric"),
        (dict, "expected a LightningModule"),
    ):
        with pytest.raises(RecipeError, match=words):
            from_lightning(kind, made.Data())
    for said in ("build", "hyper", "loss", "optimizer", "param_groups", "scheduler"):
        with pytest.raises(RecipeError, match=rf"from_lightning\({said}=...\): the LightningModule defines it"):
            from_lightning(made.Module, made.Data(), **{said: None})
    assert from_lightning(made.Hooked(), made.Data(), without=("on_before_optimizer_step",)).name == "Hooked"
    for loader, words in (
        (DataLoader([1], sampler=WeightedRandomSampler([1.0], 1)), "WeightedRandomSampler cannot be divided"),
        (DataLoader(ChainDataset([])), "cannot be selected by index"),
    ):
        with pytest.raises(RecipeError, match=words + r".* pass batches="):
            from_lightning(made.Module, loader)


def test_the_loss_alone_of_a_module_that_takes_its_steps_itself(ranks: Any) -> None:
    """The advice of the error, followed."""
    report = compare(
        "tests.compat.lightning.recipes:loss_alone", backends=["ddp"], world_sizes=[2], steps=1, pool=ranks
    )
    assert report.ok, str(report)


def test_a_step_across_two_epochs_is_refused() -> None:
    found = from_lightning(made.Module, made.Data(), accumulate=2)
    with pytest.raises(RecipeError, match="an epoch has 3 batches on each of 2 ranks"):
        found.batches(0, 2, 0)
