"""Compares steps, quantity by quantity, and puts together what the ranks of a run have found.

There is one comparison, :meth:`StepComparison.compare_step`: a step, trained now or recorded before, passes by stage
by stage and is held against a recorded one. What may round, and what a tensor is, its two kinds say:
:mod:`fsshard.parity.checking` (whole tensors, on the ranks) and :mod:`fsshard.parity.trace_comparison` (sketches).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from fsshard.errors import RecipeError
from fsshard.parity.difference import unequal, value_differences
from fsshard.parity.findings import (
    QUANTITIES,
    SEVERITY,
    Cell,
    Difference,
    RankStep,
    StepReport,
    first_divergence,
    worst_verdict,
)
from fsshard.parity.recorded import StepTrace
from fsshard.parity.training import Stage

__all__ = ["StepComparison", "cell_of", "check_deterministic", "merged"]

Found = Iterator[tuple[str, Difference]]


class StepComparison(ABC):
    """Holds one rank's steps against recorded ones.

    Attributes:
        rank: of whoever trained the steps.
        regrouped: it trained on other samples than the recorded process, so only what all ranks share is compared.
        before: the recorded step.
        number: of the step.
        result: what has been found so far.
    """

    recorded_in: ClassVar[str]

    def __init__(self, rank: int, regrouped: bool) -> None:
        self.rank, self.regrouped = rank, regrouped

    def compare_step(self, number: int, before: StepTrace, stages: Iterable[Stage]) -> RankStep:
        """Compare one step. Collective, if the stages are those of a training.

        Args:
            number: of the step.
            before: the recorded one.
            stages: as :meth:`fsshard.parity.training.Training.stages` yields them.
        """
        self.number, self.before = number, before
        self.result = RankStep(loss=0.0, reference_loss=before.loss, reference_norm=before.norm)
        compared: dict[str, Callable[[Any], Found]] = {
            "batch": self.batch,
            "loss": self.loss,
            "gradient": self.gradient,
            "norm": self.norm,
            "param_groups": self.groups,
            "state": self.state,
            "random state": self.random,
        }
        for quantity, value in stages:
            differences = compared[quantity](value) if quantity in compared else self.tensors(quantity, value)
            for name, difference in differences:
                known = self.result.differences.setdefault(quantity, {})
                if name not in known or SEVERITY[difference.verdict] > SEVERITY[known[name].verdict]:
                    known[name] = difference
        return self.result

    @abstractmethod
    def recorded(self, quantity: str) -> Mapping[str, Any] | None:
        """Return the recorded tensors of a quantity by name; None where they were not kept."""

    @abstractmethod
    def tensor(self, quantity: str, name: str, expected: Any, got: Any) -> Difference:
        """Compare one tensor."""

    @abstractmethod
    def owns(self, name: str, got: Any, difference: Difference) -> bool:
        """Return whether this rank updates the element that differs most."""

    @abstractmethod
    def may_be_silent(self, quantity: str) -> bool:
        """Return whether the engine may show nothing of a quantity: then it is not compared."""

    @abstractmethod
    def batch(self, batches: Any) -> Found:
        """Compare the samples."""

    @abstractmethod
    def loss(self, value: Any) -> Found:
        """Compare the loss; ``value`` is (loss, what modules put out)."""

    @abstractmethod
    def norm(self, value: tuple[float, float | None]) -> Found:
        """Compare the gradients' norm before clipping, and what the engine's clipping returned."""

    def gradient(self, gradients: Mapping[str, Any]) -> Found:
        """Compare gradients; those that are None are missing."""
        yield from self.tensors("gradient", ((name, value) for name, value in gradients.items() if value is not None))

    def groups(self, groups: Sequence[Mapping[str, Any]]) -> Found:
        """Compare learning rates and the like: numbers that no engine computes, so nothing but equality is right."""
        if groups or not self.may_be_silent("param_groups"):
            yield from value_differences(_flat(self.before.groups), _flat(groups), self.rank)

    def state(self, value: tuple[Iterable[tuple[str, Any]], Mapping[str, Any]]) -> Found:
        """Compare the optimizer's tensors, and its state that is no tensor."""
        tensors, plain = list(value[0]), value[1]
        yield from self.tensors("state", tensors)
        if tensors or plain or not self.may_be_silent("state"):
            yield from value_differences(self.before.plain, plain, self.rank)

    def random(self, state: str) -> Found:
        """Compare the random generators' state."""
        if not self.regrouped:
            same = self.before.random == state
            note = f"this run has drawn other random numbers than {self.recorded_in}"
            yield "", Difference(rank=self.rank) if same else unequal(self.rank, note)

    def tensors(self, quantity: str, items: Iterable[tuple[str, Any]]) -> Found:
        """Compare tensors by name; every item is taken, since taking them may be collective."""
        recorded = self.recorded(quantity)
        if recorded is None:
            return
        left, shown = dict.fromkeys(recorded), False
        for name, value in items:
            shown = True
            if name not in left:
                yield name, unequal(self.rank, f"missing in {self.recorded_in}")
                continue
            del left[name]
            difference = self.tensor(quantity, name, recorded[name], value)
            if difference.verdict != "exact" and self.owns(name, value, difference):
                self.result.owner.add((quantity, name))
            yield name, difference
        if shown or not self.may_be_silent(quantity):
            for name in left:
                yield name, unequal(self.rank, "missing here")


def _flat(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {f"group {number}: {key}": value for number, group in enumerate(groups) for key, value in group.items()}


# ------------------------------------------------------------------------------------------------------- all ranks


def merged(ranks: Sequence[Sequence[RankStep]]) -> list[StepReport]:
    """Return what each step gave, of all ranks' steps."""
    return [_merged_step(steps) for steps in zip(*ranks, strict=True)]


def _merged_step(steps: Sequence[RankStep]) -> StepReport:
    report = StepReport(
        loss=sum(step.loss for step in steps) / len(steps),
        reference_loss=sum(step.reference_loss for step in steps) / len(steps),
        norm=steps[0].norm,
        reference_norm=steps[0].reference_norm,
    )
    for quantity in QUANTITIES:
        names = dict.fromkeys(name for step in steps for name in step.differences.get(quantity, {}))
        if names:
            report.differences[quantity] = {name: _worst_rank(steps, quantity, name) for name in names}
    return report


def _worst_rank(steps: Sequence[RankStep], quantity: str, name: str) -> Difference:
    """The ranks' difference that says most; of equal ones that of the rank which owns the place."""
    found = [
        (SEVERITY[d.verdict], (quantity, name) in step.owner, -rank, d)
        for rank, step in enumerate(steps)
        if (d := step.differences.get(quantity, {}).get(name)) is not None
    ]
    return max(found, key=lambda item: item[:3])[3]


def cell_of(backend: str, world_size: int, steps: list[StepReport], parameters: list[str]) -> Cell:
    """Return one run's cell."""
    cell = Cell(backend=backend, world_size=world_size, steps=steps, verdict=worst_verdict(steps))
    if cell.verdict != "exact":
        cell.first_divergence = first_divergence(steps, parameters, cell.verdict)
    return cell


OF_PARAMETERS = ("initial weight", "gradient", "weight", "state")
"""Those of the quantities that have a parameter's name."""


def check_deterministic(again: Cell, parameters: list[str], undone: str) -> None:
    """Raise unless a second run gave what the first one did.

    Args:
        again: the second run, held against the first.
        parameters: their names, in the model's order.
        undone: what was not done therefore, such as "compared".

    Raises:
        RecipeError: it did not; says where they part.
    """
    if again.verdict == "exact":
        return
    first = first_divergence(again.steps, parameters)
    of_all = first_divergence(again.steps, parameters, quantities=OF_PARAMETERS)
    also = f"; of all parameters first at {of_all}" if of_all not in (None, first) else ""
    raise RecipeError(
        f"the recipe is not deterministic: two runs under {again.backend!r} at world size {again.world_size} "
        f"differ, first at {first}{also}. Nothing was {undone}. Seed whatever is drawn outside of torch's, numpy's and "
        "random's global generators, and avoid operations without a deterministic form"
    )
