"""A recorded training is compared with: equal, within rounding, or different from the right place on.

Tests fsshard/parity/plain.py and fsshard/parity/trace.py too.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsshard.parity.runs
import fsshard.parity.trace
from fsshard.errors import ConfigurationError, RecipeError, TraceError
from fsshard.parity import Cell, ParityReport, Recipe, Trace, compare, record
from fsshard.parity.comparing import freedom
from tests.on_ranks import on_ranks
from tests.parity import faults
from tests.training_runs import DISTRIBUTED, check_equal

STEPS = 4


def recorded(ranks: Any, recipe: Callable[[], Recipe], **options: Any) -> Trace:
    """A training on record, as it comes out of its file."""
    return record(recipe, pool=ranks, **{"steps": STEPS, **options})


@pytest.fixture(scope="module")
def mlp(ranks: Any, tmp_path_factory: Any) -> Trace:
    """Two ranks under ddp, from its file."""
    file = tmp_path_factory.mktemp("traces") / "mlp.json"
    recorded(ranks, faults.mlp).save(file)
    return Trace.load(file)


def report(ranks: Any, trace: Trace, recipe: Callable[[], Recipe] = faults.mlp, **options: Any) -> ParityReport:
    return compare(recipe, against=trace, pool=ranks, **options)


def cell(ranks: Any, trace: Trace, recipe: Callable[[], Recipe] = faults.mlp, **options: Any) -> Cell:
    return report(ranks, trace, recipe, **options).cells[0]


# ------------------------------------------------------------------------------------------------------ what is kept


@on_ranks(1)
def test_tensors_lie_in_memory_as_they_did(tmp_path: Path) -> None:
    """A product with a basis that lies row by row is rounded otherwise than with one that lies column by column."""
    folder = str(tmp_path)
    basis = torch.arange(12.0).view(3, 4).T
    given = {"real": basis, "complex": basis + 1j, "rows": basis.T}
    fsshard.parity.trace.write_tensors(folder, 0, "state", given.items())
    found = fsshard.parity.trace.read_tensors(folder, 0, "state", 0)
    check_equal(dict(given), dict(found))
    assert {name: value.stride() for name, value in found.items()} == {
        "real": (1, 4),
        "complex": (1, 4),
        "rows": (4, 1),
    }


def test_numbers_are_those_of_a_loop_by_hand(ranks: Any) -> None:
    """One rank, plain torch: losses, gradient norm and weights."""
    trace = recorded(ranks, faults.mlp, world_size=1)
    torch.manual_seed(0)
    model, recipe = faults.real_mlp(), faults.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, step in enumerate(trace.ranks[0].steps):
        loss = recipe.loss(model, recipe.batches(0, 1, number))
        optimizer.zero_grad()
        loss.backward()
        squares = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
        assert (step.loss, step.norm) == (float(loss.detach()), math.sqrt(squares))
        optimizer.step()
        for name, weight in model.named_parameters():
            kept = step.sketches["weight"][name]
            assert (kept.norm, kept.shape) == (float(weight.detach().double().square().sum().sqrt()), (*weight.shape,))
    assert trace.losses == [step.loss for step in trace.ranks[0].steps]
    assert trace.parameters == [name for name, _ in model.named_parameters()]


def test_a_file_holds_all_of_it(ranks: Any, mlp: Trace, tmp_path: Path) -> None:
    mlp.save(tmp_path / "again.json")
    again = Trace.load(tmp_path / "again.json")
    assert dataclasses.replace(again, file=mlp.file) == mlp
    assert again.environment["torch"] == torch.__version__ and again.recipe["hyper"] == "{'lr': 0.1}"
    assert (again.world_size, again.backend, again.steps, again.detail) == (2, "ddp", STEPS, "digests")


def test_every_engine_equals_the_record(ranks: Any, mlp: Trace) -> None:
    found = report(ranks, mlp, backends=DISTRIBUTED)
    assert {(c.backend, c.world_size): c.verdict for c in found} == {(b, 2): "exact" for b in DISTRIBUTED}
    quantities = {"initial weight", "batch", "loss", "gradient", "norm", "param_groups", "weight", "random state"}
    assert set(found.cells[0].steps[0].differences) == quantities
    assert len(found.cells[0].steps) == STEPS and found.changes == []
    assert str(mlp.file) in str(found)


def test_dropout_and_buffers_on_the_same_ranks(ranks: Any) -> None:
    for recipe in (faults.dropout, faults.batchnorm):
        trace = recorded(ranks, recipe, steps=2, backend="fsdp2")
        found = cell(ranks, trace, recipe)
        assert (found.verdict, found.backend, trace.backend) == ("exact", "fsdp2", "fsdp2")


# ------------------------------------------------------------------------------------------------------ planted faults


def other_order(at: int) -> Recipe:
    """Rank 1 takes its batches in another order from step ``at`` on."""
    recipe = faults.mlp()

    def batches(rank: int, world_size: int, number: int) -> Any:
        return recipe.batches(rank, world_size, number + (rank == 1 and number >= at))

    return dataclasses.replace(recipe, batches=batches)


class LowerRate(faults.Sabotaged):
    """Takes another learning rate from step 3 on, by one part in a million."""

    name = "lower rate"

    def step(self) -> None:
        super().step()
        self.count += 1
        if self.count == 3:
            self.optimizer.param_groups[0]["lr"] *= 1 - 2.0**-20


@pytest.mark.parametrize(
    ("recipe", "engine", "step", "quantity", "name", "rank"),
    [
        pytest.param(functools.partial(other_order, 2), "ddp", 2, "batch", "", 1, id="another order of batches"),
        pytest.param(faults.mlp, LowerRate, 3, "param_groups", "group 0: lr", 0, id="learning rate"),
        pytest.param(faults.mlp, faults.SkippedStep, 2, "weight", "0.weight", 1, id="skipped step"),
    ],
)
def test_a_fault_is_found_at_its_place(
    ranks: Any, mlp: Trace, recipe: Any, engine: Any, step: int, quantity: str, name: str, rank: int
) -> None:
    found = cell(ranks, mlp, recipe, backends=[engine])
    first = found.first_divergence
    assert found.verdict == "different" and found.reproducible is True and first is not None
    assert (first.step, first.quantity, first.name, first.rank) == (step, quantity, name, rank), str(first)


# ------------------------------------------------------------------------------------------------------ rounding


class OtherKernel(nn.Module):
    """A linear layer that adds in two halves, as another kernel would."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        later = nn.functional.linear(x[..., half:], self.weight[:, half:])
        return nn.functional.linear(x[..., :half], self.weight[:, :half]) + (later + self.bias)


def other_kernel_model() -> nn.Module:
    model = faults.real_mlp()
    model[2] = OtherKernel(model[2])  # type: ignore[index, operator]
    return model


def other_kernel() -> Recipe:
    return dataclasses.replace(faults.mlp(), build=other_kernel_model)


def elsewhere(trace: Trace) -> Trace:
    """As if another torch had recorded it, whose kernels may round otherwise."""
    return dataclasses.replace(trace, environment={**trace.environment, "torch": "2.12.0"})


def test_another_kernel_is_within_rounding(ranks: Any, mlp: Trace) -> None:
    """And the module that computes otherwise is named."""
    found = report(ranks, elsewhere(mlp), other_kernel)
    first = found.cells[0].first_divergence
    assert found.cells[0].verdict == "bound" and found.ok and first is not None
    assert first.step == 0 and "forward of step 0, rank 0: the first module with a different output is '2'" in str(
        found
    )
    assert "~" in str(found) and "not equal, but within what rounding alone can do" in str(found)


def _nudged(rank: int, world_size: int, number: int) -> Tensor:
    batch = faults.mlp().batches(rank, world_size, number)
    return batch * (1 + 2.0**-23)


def _nudged_model() -> nn.Module:
    model = faults.real_mlp()
    with torch.no_grad():
        model[0].weight.mul_(1 + 2.0**-23)  # type: ignore[index, union-attr, operator]
    return model


def other_generators() -> Recipe:
    return dataclasses.replace(faults.mlp(), batches=_nudged, build=_nudged_model)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_random_numbers_of_other_kernels_are_within_rounding(ranks: Any, mlp: Trace, size: int) -> None:
    """Normal numbers are made by a logarithm and a cosine, whose last digits depend on the processor."""
    found = cell(ranks, elsewhere(mlp), other_generators, world_sizes=[size])
    step = found.steps[0]
    assert found.verdict == "bound" and step.worst("batch").note == "the batch differs in its last digits"
    assert step.differences["initial weight"]["0.weight"].verdict == "bound"


@pytest.mark.parametrize(
    ("commit", "engine", "verdict"),
    [
        ("abc", faults.OneUnitOff, "different"),
        ("abc", faults.OffBy5, "different"),
        ("abc+", faults.OneUnitOff, "bound"),
    ],
)
def test_nothing_may_round_where_nothing_has_changed(
    ranks: Any, monkeypatch: pytest.MonkeyPatch, commit: str, engine: Any, verdict: str
) -> None:
    """The same torch, machine, commit and ranks, and two summands have one order only; changed files are a change."""
    monkeypatch.setattr(fsshard.parity.runs, "commit_of", lambda _: commit)
    trace = recorded(ranks, faults.mlp, steps=1)
    found = cell(ranks, trace, backends=[engine])
    assert (found.verdict, found.first_divergence and found.first_divergence.quantity) == (verdict, "gradient")


def test_with_tensors_only_the_sum_over_ranks_may_round(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On three ranks of one machine and commit; what eight draws of whole trainings would let pass is different."""
    monkeypatch.setattr(fsshard.parity.runs, "commit_of", lambda _: "abc")
    trace = recorded(ranks, faults.adam_mlp, steps=2, world_size=3, detail="tensors")
    found = report(ranks, trace, faults.adam_mlp, backends=[{"backend": "fsdp2", "fast_collectives": False}])
    assert {cell.verdict for cell in found} == {"bound"}, "torch's own collectives have an order of their own"
    assert 0 < max(d.bound for cell in found for d in cell.steps[1].differences["gradient"].values()) < 1e-5
    assert not any(d.estimated for cell in found for d in cell.steps[1].differences["weight"].values())
    ours = report(ranks, trace, faults.adam_mlp, backends=["fsdp2", {"backend": "fairscale"}])
    assert {cell.verdict for cell in ours} == {"exact"}


def test_what_changed_says_what_may_round(mlp: Trace) -> None:
    known = dataclasses.replace(mlp, commit="abc")
    assert freedom(known, known) == "nothing"
    assert freedom(known, dataclasses.replace(known, backend="fsdp2")) == "nothing"
    several = dataclasses.replace(known, world_size=3)
    assert freedom(several, several) == "nothing"
    assert freedom(several, dataclasses.replace(several, backend="fsdp2")) == "sum over ranks"
    accumulated = dataclasses.replace(known, recipe={**known.recipe, "accumulate": "2"})
    assert freedom(accumulated, dataclasses.replace(accumulated, backend="fsdp2")) == "sum over ranks"
    for other in (elsewhere(known), several, accumulated, dataclasses.replace(known, commit="abd")):
        assert freedom(known, other) == freedom(other, known) == "everything"
    for unknown in ("", "abc+"):
        unclear = dataclasses.replace(known, commit=unknown)
        assert freedom(unclear, unclear) == "everything"


@pytest.mark.parametrize(
    ("size", "backend", "verdict"),
    [(1, "ddp", "exact"), pytest.param(4, "fsdp2", "bound", marks=pytest.mark.long), (2, "none", "exact")],
)
def test_another_number_of_ranks(ranks: Any, mlp: Trace, size: int, backend: str, verdict: str) -> None:
    """The record has two ranks: fewer take their batches one by one, more divide each, which rounds."""
    found = cell(ranks, mlp, world_sizes=[size], backends=[backend])
    assert (found.verdict, found.world_size, found.reason.count("different")) == (verdict, size, 0)
    assert "batch" in found.steps[0].differences and "random state" not in found.steps[0].differences


@pytest.mark.parametrize(
    ("recipe", "why"), [(faults.dropout, "draws random numbers"), (faults.batchnorm, "mixes samples")]
)
def test_what_depends_on_the_number_of_ranks_is_refused(ranks: Any, recipe: Any, why: str) -> None:
    found = cell(ranks, recorded(ranks, recipe, steps=1), recipe, world_sizes=[1])
    assert found.verdict == "refused" and why in found.reason


# ------------------------------------------------------------------------------------------------------ tensors


def test_tensors_name_the_element(ranks: Any, tmp_path: Path) -> None:
    trace = recorded(ranks, faults.mlp, steps=2, detail="tensors")
    trace.save(tmp_path / "t.json")
    assert trace.tensors is not None and trace.tensors.parent == tmp_path
    trace = Trace.load(tmp_path / "t.json")
    assert cell(ranks, trace).verdict == "exact"
    first = cell(ranks, trace, backends=[faults.Summed]).first_divergence
    assert first is not None and (first.quantity, first.name) == ("gradient", "0.weight")
    expected, got = float(first.difference.expected), float(first.difference.got)
    assert got == pytest.approx(2 * expected) and len(first.difference.index) == 2 and not first.difference.estimated
    assert first.difference.max_abs == pytest.approx(abs(got - expected))


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_tensors_of_another_trace_are_told(ranks: Any, tmp_path: Path, damage: str) -> None:
    trace = recorded(ranks, faults.mlp, steps=1, detail="tensors", world_size=1)
    trace.save(tmp_path / "t.json")
    (file,) = tmp_path.glob("*.safetensors")
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    said = "is missing" if damage == "gone" else "is not the file that was recorded"
    with pytest.raises(TraceError, match=rf"t\.json: field tensors: .*{said}"):
        Trace.load(tmp_path / "t.json")


# ------------------------------------------------------------------------------------------------------ bad files


def _edited(mlp: Trace, tmp_path: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    data = json.loads(mlp.file.read_text())  # type: ignore[union-attr]
    edit(data)
    (tmp_path / "bad.json").write_text(json.dumps(data))
    return tmp_path / "bad.json"


@pytest.mark.parametrize(
    ("edit", "field", "said"),
    [
        (lambda d: d.update(version=2), "version", "expected 1, got 2"),
        (lambda d: d.pop("world_size"), "world_size", "is missing"),
        (lambda d: d.update(world_size=3), "ranks", "expected 3 ranks"),
        (lambda d: d["ranks"].pop(), "", ""),
        (lambda d: d["ranks"][1]["steps"].pop(), "ranks[1].steps", "expected 4 steps"),
        (
            lambda d: d["ranks"][1]["steps"][3].update(loss="low"),
            "ranks[1].steps[3].loss",
            "expected a number, got 'low'",
        ),
        (lambda d: d["ranks"][1]["steps"][3].pop("sketches"), "ranks[1].steps[3].sketches", "is missing"),
        (lambda d: d["ranks"][0]["initial"]["0.weight"].pop(), "ranks[0].initial.0.weight", "expected 18 elements"),
    ],
)
def test_a_damaged_file_is_told_with_its_field(mlp: Trace, tmp_path: Path, edit: Any, field: str, said: str) -> None:
    path = _edited(mlp, tmp_path, edit)
    if not field:  # one rank is what the backend none leaves
        assert len(Trace.load(path).ranks) == 1
        return
    with pytest.raises(TraceError) as caught:
        Trace.load(path)
    assert str(caught.value).startswith(f"{path}: field {field}: ") and said in str(caught.value)
    assert (caught.value.file, caught.value.field) == (str(path), field)


def test_files_that_are_no_trace(mlp: Trace, tmp_path: Path) -> None:
    text = mlp.file.read_bytes()  # type: ignore[union-attr]
    cases = {"cut": text[: len(text) // 2], "empty": b"", "pickle": b"\x80\x04N.", "list": b"[1]"}
    cases |= {word: text.replace(b'"loss":', f'"loss":{word},"was":'.encode(), 1) for word in ("NaN", "-Infinity")}
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TraceError, match=rf"{name}: .*(cut off|not a recorded training).*record it again"):
            Trace.load(tmp_path / name)
    with pytest.raises(TraceError, match=r"absent: cannot be read: No such file"):
        Trace.load(tmp_path / "absent")


def test_a_save_that_fails_leaves_what_was_there(mlp: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp_file = tmp_path / "kept.json"
    dataclasses.replace(mlp).save(mlp_file)
    before = mlp_file.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fsshard.parity.trace.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        dataclasses.replace(mlp, commit="other").save(mlp_file)
    assert mlp_file.read_bytes() == before and list(tmp_path.iterdir()) == [mlp_file]
    with pytest.raises(ConfigurationError, match="there is no folder"):
        mlp.save(tmp_path / "nowhere" / "t.json")


# ------------------------------------------------------------------------------------------------------ arguments


def test_what_changed_is_told(ranks: Any, mlp: Trace) -> None:
    older = dataclasses.replace(mlp, environment={**mlp.environment, "torch": "2.12.0"}, commit="0" * 40)
    found = report(ranks, older, half_rate)
    assert f"torch 2.12.0 -> {torch.__version__}" in found.changes
    assert "recipe.hyper {'lr': 0.1} -> {'lr': 0.05}" in found.changes
    assert any(text.startswith("commit 000") for text in found.changes)
    assert "since it was recorded:\n  torch 2.12.0 ->" in str(found)
    assert found.cells[0].first_divergence is not None and found.cells[0].first_divergence.quantity == "param_groups"
    assert ParityReport.from_json(found.to_json()) == found


def half_rate() -> Recipe:
    return dataclasses.replace(faults.mlp(), hyper={"lr": 0.05})


def test_bad_arguments(ranks: Any, mlp: Trace) -> None:
    with pytest.raises(ConfigurationError, match=r"steps=5: .*has 4"):
        report(ranks, mlp, steps=5)
    assert len(cell(ranks, mlp, steps=2).steps) == 2
    with pytest.raises(ConfigurationError, match="detail='everything'"):
        recorded(ranks, faults.mlp, detail="everything")
    with pytest.raises(RecipeError, match=r"not deterministic.*first at step 0, initial weight"):
        recorded(ranks, faults.restless, steps=1)
