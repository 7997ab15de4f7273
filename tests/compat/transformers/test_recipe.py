"""A Hugging Face model as a recipe: the training that Hugging Face's Trainer does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import ChainDataset

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import transformers

from fsshard.compat.transformers.recipe import INSTEAD, from_transformers
from fsshard.errors import RecipeError
from fsshard.parity import compare
from tests.compat.transformers import recipes


@pytest.fixture(autouse=True)
def as_users_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as a rank: TrainingArguments would make a process group where it finds a launcher's variables."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("case", [c if c == "t5" else pytest.param(c, marks=pytest.mark.long) for c in recipes.CASES])
def test_four_engines_train_it_alike_and_as_their_trainer_does(ranks: Any, case: str, tmp_path: Path) -> None:
    engines = ["ddp", "fsdp2", "fsdp", "fairscale"]
    source = f"{recipes.__name__}:{case}_recipe"
    report = compare(source, backends=engines, world_sizes=[2], steps=2, pool=ranks)
    assert report.ok and [cell.verdict for cell in report.cells] == ["exact"] * 4, str(report)
    theirs = ranks.run(recipes.by_trainer, 2, case, str(tmp_path))
    assert len(theirs[0]) >= 2
    assert ranks.run(recipes.by_recipe, 2, case, "fsdp2", len(theirs[0])) == theirs


@pytest.mark.long
def test_a_compiled_model_as_the_error_advises(ranks: Any) -> None:
    args: Any = transformers.TrainingArguments(use_cpu=True, torch_compile=True)
    with pytest.raises(RecipeError, match=re.escape('pass settings={"compile": True} to from_transformers')):
        from_transformers(None, [], args=args)
    report = compare(f"{recipes.__name__}:compiled_recipe", backends=["fsdp2"], world_sizes=[2], steps=2, pool=ranks)
    assert report.ok and [cell.verdict for cell in report.cells] == ["exact"], str(report)


def test_what_a_recipe_cannot_say_is_refused() -> None:
    for name in INSTEAD:
        args: Any = transformers.TrainingArguments(use_cpu=True)
        setattr(args, name, 1)
        with pytest.raises(RecipeError, match=rf"TrainingArguments\({name}=1\): "):
            from_transformers(None, [], args=args)
    for given, words in (
        ({"train_sampling_strategy": "group_by_length"}, "'random' and 'sequential'"),
        ({"eval_strategy": "epoch", "lr_scheduler_type": "reduce_lr_on_plateau"}, "watches a metric"),
        ({"gradient_accumulation_steps": 3}, "an epoch has 4 batches on each of 1 ranks"),
    ):
        args = transformers.TrainingArguments(use_cpu=True, per_device_train_batch_size=2, **given)
        with pytest.raises(RecipeError, match=words):
            from_transformers(recipes.t5, recipes.samples(), args=args)
    with pytest.raises(RecipeError, match="ChainDataset has no samples by index"):
        from_transformers(recipes.t5, ChainDataset([]), args=transformers.TrainingArguments(use_cpu=True))
