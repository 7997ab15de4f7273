"""Golden runs come out again under every backend, and a change of the training is told."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from fsshard.parity import Recipe, Trace, compare, golden
from fsshard.parity.golden import FOLDER, RECIPES, check, file_of, spectral, uniform
from tests.sets import often
from tests.training_runs import DISTRIBUTED


@pytest.mark.parametrize("engines", [("ddp", "fsdp2"), pytest.param(DISTRIBUTED, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", often(RECIPES, "spectral"))
def test_golden_runs_come_out_again(ranks: Any, name: str, engines: tuple[str, ...]) -> None:
    """Bit for bit on the kind of processor they were made on, within rounding elsewhere, where all share its draws."""
    steps = 10 if engines == DISTRIBUTED else 4
    recorded = Trace.load(file_of(name))
    cells = compare(RECIPES[name], against=recorded, backends=engines, steps=steps, pool=ranks).cells
    assert [cell.backend for cell in cells] == list(engines)
    assert [(cell.backend, str(cell)) for cell in cells if cell.verdict not in golden.WORDS] == []
    assert len({cell.verdict for cell in cells}) == 1


def slower() -> Recipe:
    return dataclasses.replace(spectral(), hyper={"lr": 2.0**-8 * (1 - 2.0**-10)})


def shortened(monkeypatch: pytest.MonkeyPatch, folder: Any, recipe: Any, steps: int, factor: float = 1.0) -> None:
    """Put a golden run of few steps in the place of all, its last loss multiplied by ``factor``."""
    trace = Trace.load(file_of("spectral"))
    for rank in trace.ranks:
        del rank.steps[steps:]
        rank.steps[-1] = dataclasses.replace(rank.steps[-1], loss=rank.steps[-1].loss * factor)
    trace.save(folder / "off.json")
    monkeypatch.setattr(golden, "RECIPES", {"spectral": recipe})
    monkeypatch.setattr(golden, "file_of", lambda name: folder / "off.json")


def test_a_changed_training_is_different(ranks: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A learning rate 0.1 percent lower shows, and so do losses that are not those of the file."""
    shortened(monkeypatch, tmp_path, slower, 2)
    (found,) = check(pool=ranks)
    assert (found.verdict, found.equal, found.ok) == ("different", False, False)
    assert "step 0, param_groups of group 0: lr" in found.text and "recipe.hyper" in found.text


def test_one_ulp_is_within_rounding(ranks: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    shortened(monkeypatch, tmp_path, spectral, 2, 1 + 2.0**-23)
    (found,) = check(pool=ranks)
    assert (found.verdict, found.equal, found.ok) == ("within rounding", False, True)
    assert "expected" in found.text


def test_each_minor_version_of_torch_has_its_own() -> None:
    """And one that has none takes the nearest before it."""
    assert {file_of(name, "2.13.1+cpu").parent.name for name in RECIPES} == {"torch-2.13"}
    assert file_of("convnet", "2.15.0+cu132").parent.name == "torch-2.15"
    assert file_of("convnet", "2.99.0").parent.name == max(path.name for path in FOLDER.glob("torch-*"))
    assert file_of("convnet", "2.1.0").parent.name == "torch-2.13"
    for path in FOLDER.glob("*/*.json"):
        trace = Trace.load(path)
        assert trace.environment["torch"].startswith(path.parent.name.removeprefix("torch-") + ".")
        assert (trace.steps, trace.world_size, trace.detail) == (10, 2, "losses")


def test_the_rule_is_the_same_everywhere() -> None:
    """Pinned: integer arithmetic and powers of two leave no room for another machine."""
    values = uniform("weight", 10_000)
    assert values[:3].tolist() == [-0.20022809505462646, -0.14828360080718994, -0.7197030782699585]
    assert abs(float(values.mean())) < 0.03 and abs(float(values.square().mean()) - 1 / 3) < 0.02
    assert not torch.equal(uniform("other", 100), values[:100])
