"""Divided models compared with one process: what is right is within the bound, what is wrong is found and named."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsshard.errors import ConfigurationError, RecipeError
from fsshard.parity import Cell, Engine, ParityReport, Recipe, Split, Trace, compare
from fsshard.parity.training import Bare
from tests.models import take_step
from tests.parity import split_recipes as recipes


def mesh(data: int, cp: int, tp: int) -> dict[str, int]:
    return {"data": data, "cp": cp, "tp": tp}


def test_a_transformer_that_is_split_by_hand(ranks: Any) -> None:
    """Along tensors: what the report says."""
    report = compare(recipes.right, mesh=mesh(1, 1, 2), backends=["fsdp2"], steps=1, pool=ranks)
    assert [(cell.mesh, cell.world_size, cell.verdict) for cell in report] == [("data=1,cp=1,tp=2", 2, "bound")]
    assert report.reference == "one process" and not report.warnings, str(report)
    assert report["fsdp2", "data=1,cp=1,tp=2"] is report.cells[0]
    assert ParityReport.from_json(report.to_json()) == report
    text = str(report)
    assert "backend              mesh  verdict" in text and "fsdp2 on data=1,cp=1,tp=2: not equal, but within" in text


@pytest.mark.long
def test_split_along_every_dimension(ranks: Any) -> None:
    """Along data, context, tensors, and two of them; SGD with clipping, and Adam with accumulation."""
    meshes = [mesh(2, 1, 1), mesh(1, 2, 1), mesh(1, 1, 2), mesh(2, 2, 1)]
    report = compare(recipes.right, mesh=meshes, backends=["fsdp2", "ddp"], steps=2, pool=ranks)
    assert [(cell.mesh, cell.world_size) for cell in report.cells[::2]] == [
        ("data=2,cp=1,tp=1", 2),
        ("data=1,cp=2,tp=1", 2),
        ("data=1,cp=1,tp=2", 2),
        ("data=2,cp=2,tp=1", 4),
    ]
    assert {cell.verdict for cell in report} == {"bound"} and not report.warnings, str(report)
    assert report["ddp", "data=2,cp=2,tp=1"] is report.cells[-1]
    adam = compare(recipes.adam, mesh=mesh(1, 2, 2), backends=["fairscale"], steps=2, pool=ranks)
    assert adam.cells[0].verdict == "bound", str(adam)


def test_slabs_of_the_samples_over_all_ranks(ranks: Any) -> None:
    meshes = [{"data": 1, "domain": 2}, {"data": 2, "domain": 2}]
    report = compare(recipes.slabs, mesh=meshes, backends=["fsdp2"], steps=1, pool=ranks)
    assert {cell.verdict for cell in report} <= {"exact", "bound"}, str(report)


@pytest.mark.long
def test_an_operator_on_slabs(ranks: Any) -> None:
    pytest.importorskip("neuralop")
    meshes = [{"data": data, "domain": 4 // data} for data in (4, 2, 1)]
    report = compare("examples.mesh_recipes:fno", mesh=meshes, backends=["fsdp2"], steps=1, pool=ranks)
    assert {cell.verdict for cell in report} == {"bound"}, str(report)


@pytest.mark.long
def test_the_examples_and_replicas_of_shards(ranks: Any) -> None:
    """Layers by hand; DTensors of parallelize_module; and a mesh of data alone, of which a recipe says nothing."""
    for recipe, sizes in (("weather", {"data": 1, "cp": 2, "tp": 2}), ("perceptron", {"data": 2, "tp": 2})):
        report = compare(f"examples.mesh_recipes:{recipe}", mesh=sizes, backends=["fsdp"], steps=1, pool=ranks)
        assert report.cells[0].verdict == "bound", str(report)
    hybrid = {"replicate": 2, "shard": 2}
    report = compare(recipes.of_data, mesh=hybrid, backends=["fsdp2", "none"], steps=1, pool=ranks)
    assert [cell.verdict for cell in report] == ["bound", "refused"], str(report)


def cell(ranks: Any, recipe: Callable[[], Recipe], **sizes: int) -> Cell:
    return compare(recipe, mesh=mesh(**sizes), backends=["ddp"], steps=1, pool=ranks).cells[0]


def test_a_loss_that_is_a_dtensor(ranks: Any) -> None:
    """The advice of the error, followed."""
    with pytest.raises(RecipeError, match=r"return loss\.full_tensor\(\)"):
        cell(ranks, recipes.undecided, data=1, cp=1, tp=2)
    followed = cell(ranks, recipes.decided, data=1, cp=1, tp=2)
    assert followed.ok, followed


@pytest.mark.parametrize(
    ("recipe", "sizes", "quantity", "name", "note"),
    [
        (
            recipes.unreduced,
            (1, 1, 2),
            "gradient",
            "blocks.1.fc2.bias",
            "2 times too large, the number of ranks of 'tp'",
        ),
        pytest.param(
            recipes.averaged,
            (1, 2, 1),
            "gradient",
            "pos_embed",
            "2 times too small, the number of ranks of 'cp'",
            marks=pytest.mark.long,
        ),
        (recipes.misadded, (1, 2, 1), "loss", "", "2 times too small: if the losses of 'cp''s ranks add up"),
        (recipes.unsaid, (1, 2, 1), "gradient", "pos_embed", "the parts that the 2 ranks of 'cp' have add up to it"),
    ],
)
def test_a_wrong_split_is_named(
    ranks: Any, recipe: Callable[[], Recipe], sizes: tuple[int, int, int], quantity: str, name: str, note: str
) -> None:
    found = cell(ranks, recipe, **mesh(*sizes))
    first = found.first_divergence
    assert found.verdict == "different" and found.reproducible and first is not None
    assert (first.step, first.quantity, first.name) == (0, quantity, name), str(first)
    assert note in str(first)


def test_what_is_found_by_wrap_or_cannot_be_compared(ranks: Any) -> None:
    forgotten = cell(ranks, recipes.forgotten, data=1, cp=2, tp=1)
    assert forgotten.verdict == "failed" and not forgotten.traceback
    assert forgotten.reason.startswith(
        "the gradient of 'pos_embed' differs between the ranks along mesh dimension 'cp'"
    )
    dropping = cell(ranks, recipes.dropping, data=1, cp=1, tp=2)
    assert dropping.verdict == "refused" and "draws random numbers" in dropping.reason
    with pytest.raises(RecipeError, match=r"split\(model, mesh\) must return keyword arguments .*NoneType"):
        cell(ranks, recipes.returning_nothing, data=1, cp=1, tp=2)
    with pytest.raises(RecipeError, match=r"Split.adds names .sp.; the mesh has data, cp, tp"):
        cell(ranks, recipes.adding_unknown, data=1, cp=1, tp=2)


def test_mistakes_are_found_before_anything_runs(ranks: Any) -> None:
    asked = functools.partial(compare, recipes.right, pool=ranks)
    for options, message in [
        ({"mesh": {"data": 2, "tp": 2}, "world_sizes": iter([2])}, r"world_sizes=\[2\]: .* has 4 ranks; leave"),
        ({"mesh": []}, "expected one mesh or several"),
        ({"mesh": "data=2"}, "expected sizes by name"),
        ({"mesh": {"data": 0}}, "'data' has size 0"),
        ({"mesh": {"data": 2, "x": 2}}, "'x' does not say whether its ranks see the same samples"),
        ({"mesh": {"tp": 2}}, "no dimension is data-parallel; add data=1"),
        ({"mesh": {"data": 2}, "reference": "ddp"}, "compared with one process; leave reference out"),
        ({"mesh": {"data": 2}, "against": object.__new__(Trace)}, "a recorded training has no mesh"),
        ({"mesh": {"data": 2}, "backends": [Own]}, "Own: an engine of your own cannot be given a mesh"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            asked(**options)
    with pytest.raises(RecipeError, match="does not say how its model is divided over cp, tp; give it"):
        compare(recipes.of_data, mesh=mesh(2, 2, 2), pool=ranks)


class Own(Engine):
    name = "own"


def test_the_judge_is_the_recipe_alone() -> None:
    """The same numbers as a loop written out."""
    recipe = dataclasses.replace(
        recipes.right(), clip=None, param_groups=lambda names: [{"params": names[:2], "lr": 0.1}, {"params": names[2:]}]
    )
    torch.manual_seed(0)
    judge = Bare(recipe, recipe.build())
    torch.manual_seed(0)
    model = recipe.build()
    named = list(model.parameters())
    optimizer = torch.optim.SGD([{"params": named[:2], "lr": 0.1}, {"params": named[2:]}], lr=0.05, momentum=0.9)
    for number in range(2):
        for module, step in ((judge.model, judge), (model, optimizer)):
            recipe.loss(module, recipes.batch(0, 1, number)).backward()
            take_step(step)
    assert all(torch.equal(value, dict(model.named_parameters())[name]) for name, value in judge.weights())
    with pytest.raises(RecipeError, match=r"does not take recipe\.hyper"):
        Bare(dataclasses.replace(recipe, hyper={"rate": 1}), recipe.build())
    Bare(dataclasses.replace(recipe, hyper={"lr": 1, "whole": True, "separable": True}), recipe.build())


def test_dimensions_are_named_in_a_tuple() -> None:
    with pytest.raises(RecipeError, match=r"Split\.adds must name dimensions"):
        Split(adds="cp")  # type: ignore[arg-type]
