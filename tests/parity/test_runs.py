"""compare(): verdicts, references, refusals and what it says of bad arguments. Faults are in test_planted_faults.py.

Tests fsshard/parity/engine.py and fsshard/parity/training.py too.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsshard.errors import ConfigurationError, RecipeError, UnknownBackend
from fsshard.parity import Recipe, checking, compare, record
from fsshard.parity.training import Job, Training
from tests.on_ranks import on_ranks
from tests.parity import faults
from tests.sets import often
from tests.training_runs import DISTRIBUTED, call
from tests.zoo import ZOO


def from_zoo(case: str, **changes: Any) -> Recipe:
    found = ZOO[case]
    return Recipe(
        build=found.build,
        batches=lambda rank, world_size, number: found.batch(rank, number),
        loss=lambda model, batch: found.loss(call(model, batch)),
        **{"name": case, **changes},
    )


def verdicts(ranks: Any, recipe: Any, **options: Any) -> dict[tuple[str, int], str]:
    return {(c.backend, c.world_size): c.verdict for c in compare(recipe, steps=2, pool=ranks, **options)}


def test_a_unit_that_runs_several_times_is_bound_not_different(ranks: Any) -> None:
    """FSDP2 reduces what was accumulated at the first of a unit's uses (torch 2.13): another order, and known."""
    recipe = functools.partial(from_zoo, "recurrent", accumulate=2)
    apart = {"backend": "fsdp2", "merge_below": 0}  # else its small units are one
    found = verdicts(ranks, recipe, backends=["ddp", "fsdp", apart, "fairscale"], world_sizes=[2])
    assert list(found.values()) == ["exact", "exact", "bound", "exact"]


@pytest.mark.parametrize(
    ("case", "world_size"), [pytest.param("tfno_tucker", 2, marks=pytest.mark.long), ("mlp_complex", 3)]
)
def test_one_process_on_the_joined_batch(ranks: Any, case: str, world_size: int) -> None:
    """As a backend, and as the reference."""
    recipe = functools.partial(from_zoo, case)
    assert verdicts(ranks, recipe, backends=["none"], world_sizes=[world_size]) == {("none", world_size): "bound"}
    found = verdicts(ranks, recipe, backends=["fsdp2", "none"], world_sizes=[world_size], reference="none")
    assert found == {("fsdp2", world_size): "bound", ("none", world_size): "exact"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    often(
        [({"clip": 0.05}, "exact"), ({"accumulate": 2}, "exact"), ({"accumulate": 3}, "bound")],
        ({"clip": 0.05}, "exact"),
    ),
    ids=str,
)
def test_one_process_has_the_bits_of_the_ranks_whose_batches_it_takes(
    ranks: Any, changes: dict[str, Any], expected: str
) -> None:
    """By model.leaves; a rank adds up three micro-batches one after the other, which is no tree."""
    recipe = functools.partial(from_zoo, "mlp_complex", **changes)
    found = verdicts(ranks, recipe, backends=["none"], world_sizes=[2, 4])
    assert found == {("none", 2): expected, ("none", 4): expected}
    found = verdicts(ranks, recipe, backends=["fsdp2", "fairscale"], world_sizes=[4], reference="none")
    assert found == {("fsdp2", 4): expected, ("fairscale", 4): expected}


def test_the_joined_bound_is_sharp(ranks: Any) -> None:
    """A summed gradient is no rounding."""
    found = compare(faults.mlp, backends=[faults.Summed], world_sizes=[2], steps=2, reference="none", pool=ranks)
    assert found.cells[0].verdict == "different"
    assert found.cells[0].first_divergence is not None
    assert found.cells[0].first_divergence.quantity == "gradient"


@pytest.mark.parametrize(
    ("case", "backend", "text"),
    [
        ("conv_batchnorm", "none", "mixes samples"),
        ("dropout", "none", "draws random numbers"),
        ("two_precisions", "fairscale", "one optimizer per dtype"),
    ],
)
def test_what_a_backend_cannot_repeat_is_refused(ranks: Any, case: str, backend: str, text: str) -> None:
    recipe = functools.partial(from_zoo, case)
    report = compare(recipe, backends=[backend, "fsdp"], world_sizes=[2], steps=2, pool=ranks)
    assert report[backend, 2].verdict == "refused"
    assert text in report[backend, 2].reason
    assert report["fsdp", 2].verdict == "exact"
    assert not report.ok


def halves(names: list[str]) -> list[dict[str, Any]]:
    return [{"params": names[::2]}, {"params": names[1::2], "lr": 0.003, "weight_decay": 0.1}]


def decaying(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def test_groups_schedules_and_checkpointing(ranks: Any) -> None:
    recipe = functools.partial(
        from_zoo, "tfno_tucker", param_groups=halves, scheduler=decaying, activation_checkpointing=True, clip=0.1
    )
    assert set(verdicts(ranks, recipe, backends=DISTRIBUTED, world_sizes=[2]).values()) == {"exact"}


def test_a_report_has_every_step_and_parameter(ranks: Any) -> None:
    cell = compare(faults.adam_mlp, backends=["fsdp"], world_sizes=[2], steps=3, pool=ranks)["fsdp", 2]
    names = [name for name, _ in faults.real_mlp().named_parameters()]
    assert len(cell.steps) == 3
    for step in cell.steps:
        assert list(step.differences["gradient"]) == names
        assert list(step.differences["weight"]) == names
        assert f"{names[0]}: exp_avg_sq" in step.differences["state"]
        assert step.loss == step.reference_loss > 0
        assert step.norm == step.reference_norm > 0
    assert cell.steps[0].loss != cell.steps[2].loss


def test_progress_is_told(ranks: Any) -> None:
    seen = []
    compare(
        faults.mlp,
        backends=["fsdp2"],
        world_sizes=[1, 2],
        steps=4,
        pool=ranks,
        progress=lambda done, total, text: seen.append((done, total, text)),
    )
    done = [item[0] for item in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1][1] == 6.0
    assert any(value % 1 for value in done)  # steps within a run
    assert any("fsdp2 on 2 ranks" in text for _, _, text in seen)


class NamedLikeABackend(faults.Summed):
    name = "ddp"


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"backends": ["ddp", NamedLikeABackend]}, ConfigurationError, "is named 'ddp', like a backend; give it"),
        ({"backends": "fsdp2"}, ConfigurationError, "expected a list"),
        ({"backends": []}, ConfigurationError, "expected a list"),
        ({"backends": ["fsdp3"]}, UnknownBackend, "fsdp3"),
        ({"backends": [3]}, ConfigurationError, "backends holds 3"),
        ({"world_sizes": []}, ConfigurationError, "positive integers"),
        ({"world_sizes": [0]}, ConfigurationError, "positive integers"),
        ({"steps": 0}, ConfigurationError, "steps=0"),
        ({"reference": "fsdp2"}, ConfigurationError, "expected 'ddp' or 'none'"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        compare(faults.mlp, **options)


def test_a_recipe_that_cannot_travel(ranks: Any) -> None:
    recipe = dataclasses.replace(faults.mlp(), build=lambda: nn.Linear(6, 3))
    with pytest.raises(RecipeError, match=r"cannot be sent to the ranks.*top level"):
        compare(recipe, pool=ranks)


class Wrong(faults.RawDDP):
    """Shows a weight that the model does not have."""

    name = "wrong"

    def weights(self) -> Any:
        yield from super().weights()
        yield "phantom", Tensor([1.0])


def test_names_that_do_not_match_are_named(ranks: Any) -> None:
    cell = compare(faults.adam_mlp, backends=[Wrong], world_sizes=[2], steps=1, pool=ranks).cells[0]
    assert cell.first_divergence is not None
    assert cell.first_divergence.name == "phantom"
    assert "missing in the reference" in str(cell.first_divergence)


class Lending(faults.RawDDP):
    """Shows what it takes back at the end, as ``FSDP.summon_full_params`` does."""

    name = "lending"

    def weights(self) -> Any:
        return lent(super().weights())

    def buffers(self) -> Any:
        return lent(super().buffers())


def lent(named: Any) -> Any:
    copies = [(name, value.clone()) for name, value in named]
    yield from copies
    for _, value in copies:
        value.zero_()


def test_what_an_engine_of_ones_own_shows_is_read_before_it_takes_it_back(ranks: Any) -> None:
    trace = record(faults.batchnorm, steps=1, pool=ranks)
    for options in ({"world_sizes": [2], "steps": 1}, {"against": trace}):
        report = compare(faults.batchnorm, backends=[Lending], pool=ranks, **options)  # type: ignore[arg-type]
        assert report.cells[0].verdict == "exact", str(report)


@on_ranks(1)
def test_initial_weights_are_not_held_while_it_trains() -> None:
    """The number of their tensors that are still held."""
    first, held = list[Any](), list[int]()

    class Noting(Training):
        def weights(self) -> dict[str, Tensor]:
            found = super().weights()
            first.extend(map(weakref.ref, () if first else found.values()))
            return found

        def step(self, *args: Any, **options: Any) -> Any:
            held.append(sum(one() is not None for one in first))
            return super().step(*args, **options)

    with mock.patch.object(checking, "Training", Noting):
        checking.observe(Job(source=faults.mlp, engine="ddp", steps=2, world_size=1), "digests")
    assert first
    assert held == [0, 0]


def loss_in_dtensor(model: Any, batch: Tensor) -> Any:
    return DTensor.from_local(faults.loss(model, batch), init_device_mesh("cpu", (1,)))


def test_a_dtensor_of_one_process_is_a_loss(ranks: Any) -> None:
    """Only on a mesh is it unknown what the ranks have of it."""
    recipe = functools.partial(faults.recipe, loss=loss_in_dtensor)
    assert verdicts(ranks, recipe, backends=["ddp"], world_sizes=[1]) == {("ddp", 1): "exact"}
