"""Compares a step with a recorded one, quantity by quantity, and puts together what the ranks of a run have found.

There is one comparison, :meth:`StepComparison.compare_step`, and one rule: what changed says what may round, nothing
else may differ (:func:`freedom`). Two kinds of step pass through it: one that is trained now, with whole tensors
(:mod:`fsshard.parity.checking`, on the ranks), and one of another trace, with sketches (:func:`compare_traces`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar

import torch

from fsshard.backends import backend_names
from fsshard.errors import RecipeError
from fsshard.parity.bounds import ORDERS, BatchFacts, measured_bound
from fsshard.parity.difference import difference, number_difference, place_of, unequal, value_differences
from fsshard.parity.one_process import first_difference
from fsshard.parity.report import (
    QUANTITIES,
    SEVERITY,
    Cell,
    Difference,
    RankStep,
    StepReport,
    first_divergence,
    worst_verdict,
)
from fsshard.parity.sketch import PROJECTIONS, Sketch, apart, distance, least_distance
from fsshard.parity.trace import INITIAL, RankTrace, Shelf, Step, Trace, mean_loss
from fsshard.parity.training import Stage

__all__ = ["StepComparison", "cell_of", "check_deterministic", "compare_traces", "freedom", "merged", "needs_bounds"]

ROUNDED = ("initial weight", "batch", "loss", "gradient", "norm", "weight", "state", "buffer")
"""Quantities that another kernel may give other last digits; of the rest nothing but equality is right."""
Found = Iterator[tuple[str, Difference]]


class StepComparison(ABC):
    """Holds one rank's steps against recorded ones.

    Args:
        ranks: the recorded training, rank by rank.
        process: whose record these steps are held against.
        rank: of whoever trained the steps.
        regrouped: it trained on other samples than the recorded process, so only what all ranks share is compared.
        own_engine: an engine of the user's own trained them, which may show no more than weights.

    Attributes:
        before: the recorded step.
        number: of the step.
        result: the findings so far.
    """

    recorded_in: ClassVar[str]

    def __init__(self, ranks: list[RankTrace], process: int, *, rank: int, regrouped: bool, own_engine: bool) -> None:
        self.ranks, self.process, self.rank = ranks, process, rank
        self.regrouped, self.own_engine = regrouped, own_engine

    def compare_step(self, number: int, stages: Iterable[Stage]) -> RankStep:
        """Compare one step. Collective, if the stages are those of a training.

        Args:
            number: of the step.
            stages: as :meth:`fsshard.parity.training.Training.stages` yields them.
        """
        self.number, self.before = number, self.ranks[self.process].steps[number]
        self.result = RankStep(
            loss=0.0, reference_loss=self.before.loss, norm=math.nan, reference_norm=self.before.norm
        )
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
            for name, found in differences:
                known = self.result.differences.setdefault(quantity, {})
                if name not in known or SEVERITY[found.verdict] > SEVERITY[known[name].verdict]:
                    known[name] = found
        return self.result

    @abstractmethod
    def recorded(self, quantity: str) -> Mapping[str, Any] | None:
        """Return the recorded tensors of a quantity by name; None where they were not kept."""

    @abstractmethod
    def tensor(self, quantity: str, name: str, expected: Any, got: Any) -> Difference:
        """Compare one tensor."""

    @abstractmethod
    def owned(self, name: str) -> tuple[int, int]:
        """Return [start, stop) of the real numbers of a parameter that this rank updates."""

    @abstractmethod
    def batch(self, batches: Any) -> Found:
        """Compare the samples."""

    @abstractmethod
    def norm(self, value: tuple[float, float | None]) -> Found:
        """Compare the gradients' norm before clipping, and what the engine's clipping returned."""

    @abstractmethod
    def mean_loss(self, loss: float) -> float:
        """Return the mean of all ranks' losses, of which this rank's is given. Collective."""

    @abstractmethod
    def number_difference(self, quantity: str, expected: float, got: float) -> Difference:
        """Compare a number, which may round as far as was measured for its quantity."""

    def loss(self, value: tuple[float, Sequence[Sequence[str]]]) -> Found:
        """Compare the loss; the first module that put out something else is named beside a difference."""
        self.result.loss, outputs = value
        if self.regrouped:
            self.result.loss = self.mean_loss(value[0])
            self.result.reference_loss = mean_loss(self.ranks, self.number)
        found = self.number_difference("loss", self.result.reference_loss, self.result.loss)
        if found.verdict != "exact" and not self.regrouped and self.before.outputs and outputs:
            found = replace(found, note=first_difference(self.before.outputs, outputs))
        yield "", found

    def gradient(self, gradients: Mapping[str, Any]) -> Found:
        """Compare gradients; those that are None are missing."""
        yield from self.tensors("gradient", ((name, value) for name, value in gradients.items() if value is not None))

    def groups(self, groups: Sequence[Mapping[str, Any]]) -> Found:
        """Compare learning rates and the like."""
        # No engine computes these numbers, so nothing but equality is right.
        if groups or not self.own_engine:
            yield from value_differences(_flat(self.before.groups), _flat(groups), self.rank)

    def state(self, value: tuple[Iterable[tuple[str, Any]], Mapping[str, Any]]) -> Found:
        """Compare the optimizer's tensors, and its state that is no tensor."""
        tensors, plain = list(value[0]), value[1]
        yield from self.tensors("state", tensors)
        if tensors or plain or not self.own_engine:
            yield from value_differences(self.before.plain, plain, self.rank)

    def random(self, state: str) -> Found:
        """Compare the random generators' state."""
        if not self.regrouped:
            same = self.before.random == state
            note = f"this run has drawn other random numbers than {self.recorded_in}"
            yield "", Difference(rank=self.rank) if same else unequal(self.rank, note)

    def tensors(self, quantity: str, items: Iterable[tuple[str, Any]]) -> Found:
        """Compare tensors by name."""
        # Every item is taken, also where its name is unknown: taking them may be collective.
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
            found = self.tensor(quantity, name, recorded[name], value)
            start, stop = self.owned(name.partition(": ")[0])
            if found.verdict != "exact" and start <= place_of(value.shape, _is_complex(value), found.index) < stop:
                self.result.owner.add((quantity, name))
            yield name, found
        if shown or not self.own_engine or quantity in ("initial weight", "weight"):
            for name in left:
                yield name, unequal(self.rank, "missing here")


def _is_complex(value: Any) -> bool:
    return "complex" in str(value.dtype)


def _flat(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {f"group {number}: {key}": value for number, group in enumerate(groups) for key, value in group.items()}


# -------------------------------------------------------------------------------------------------------- two traces

Draws = Sequence[Sequence[RankTrace]]


def freedom(before: Trace, now: Trace) -> str:
    """Return what may round between two trainings on the same samples: "nothing", "sum over ranks" or "everything"."""
    # A commit with changed files, or an unknown one, counts as another one.
    known = bool(before.commit) and not before.commit.endswith("+")
    sides = [(t.environment, t.recipe, t.commit, t.device, t.world_size, len(t.ranks)) for t in (before, now)]
    if not known or sides[0] != sides[1]:
        return "everything"
    # Two summands have one order only; where gradients are reduced more than once there are more summands.
    one_order = now.world_size <= 2 and now.recipe.get("accumulate") == "1"
    return "nothing" if one_order or before.backend == now.backend else "sum over ranks"


def compare_traces(
    before: Trace,
    now: Trace,
    *,
    batches: list[BatchFacts] | None = None,
    draws: Draws = (),
    exactly: bool = False,
) -> list[StepReport]:
    """Return the differences in each step of ``now``, which may have fewer steps. Nothing is run.

    Args:
        before: the recorded training.
        now: another.
        batches: where ranks train on other batches than the recorded ones, what is known of those that these were made
            of. Then only what all ranks share is compared.
        draws: one training as it is, then some with other rounding, each as its ranks saw it. How far these are from
            the first one measures the bounds. (It need not be ``now``, whose engine may be wrong.)
        exactly: nothing may round: every bound is zero.
    """
    # Where the ranks' batches are others, only what all ranks share can be compared: rank 0 speaks for it.
    ranks = range(len(now.ranks) if batches is None else 1)
    comparisons = [_TraceComparison(before, now, rank, batches, draws, exactly) for rank in ranks]
    return merged([[one.compare_step(n, one.stages(n)) for n in range(now.steps)] for one in comparisons])


def needs_bounds(steps: Sequence[StepReport]) -> bool:
    """Return whether something that kernels round differs before anything differs that they do not round."""
    first = first_divergence(steps, [])
    return first is not None and first.quantity in ROUNDED


def first_output(before: Trace, now: Trace) -> str:
    """Return the first module whose output differs, of traces on the same batches; "" if none does, or none is kept."""
    for number in range(now.steps):
        for rank, (one, other) in enumerate(zip(before.ranks, now.ranks, strict=True)):
            sides = [trace.steps[number].outputs for trace in (one, other)]
            if all(sides) and (said := first_difference(sides[0], sides[1])):
                return f"forward of step {number}, rank {rank}: {said}"
    return ""


class _TraceComparison(StepComparison):
    """One rank of a recorded training held against the same rank of another one."""

    recorded_in = "the record"

    def __init__(
        self, before: Trace, now: Trace, rank: int, batches: list[BatchFacts] | None, draws: Draws, exactly: bool
    ) -> None:
        own_engine = now.backend.partition("(")[0] not in backend_names()
        super().__init__(before.ranks, rank, rank=rank, regrouped=batches is not None, own_engine=own_engine)
        self._now, self._batches, self._draws, self._exactly = now, batches, draws, exactly
        # Tensors are looked at where sketches differ; a shelf has all of one quantity and step.
        self._shelf = lru_cache(maxsize=8)(lambda path, step, quantity: Shelf(path, step, quantity, rank))
        self._files = [trace.tensors for trace in (before, now) if trace.tensors is not None]

    def stages(self, number: int) -> Iterator[Stage]:
        """Yield from the record of a step what a training of it yields."""
        rank = self._now.ranks[self.rank]
        step = rank.steps[number]
        stages: dict[str, Any] = {
            "batch": all_batches(self._now.ranks, number) if self.rank == 0 else None,
            "loss": (step.loss, ()),  # the outputs of all steps are compared by first_output()
            "gradient": step.sketches.get("gradient", {}),
            "norm": (step.norm, step.clipped_norm),
            "param_groups": step.groups,
            "state": (step.sketches.get("state", {}).items(), step.plain),
            "random state": step.random,
        }
        for quantity in QUANTITIES:  # those without a stage above are tensors by name
            if quantity == "initial weight":
                yield from [(quantity, rank.initial.items())] if number == 0 else []
            elif quantity != "buffer" or not self.regrouped:
                yield quantity, stages.get(quantity, step.sketches.get(quantity, {}).items())

    def _drawn(self) -> list[Step]:
        return [draw[self.rank].steps[self.number] for draw in self._draws]

    def recorded(self, quantity: str) -> Mapping[str, Sketch] | None:
        if quantity == "initial weight":
            return self.ranks[self.rank].initial
        return self.before.sketches.get(quantity)

    def owned(self, name: str) -> tuple[int, int]:
        return self._now.ranks[self.rank].owned.get(name, (0, 0))

    def batch(self, batches: Any) -> Found:
        """Compare what all ranks trained on; rank 0 does."""
        if batches is None:
            return
        if self._batches is not None:
            batches = _by_place(*self._batches[self.number])
        for place, (expected, samples) in all_batches(self.ranks, self.number).items():
            got, others = batches.get(place, ("", {}))
            rank = place[1]
            yield "", Difference(rank=rank) if expected == got else self._other_batch(rank, samples, others)

    def _other_batch(self, rank: int, before: Mapping[str, Sketch], now: Mapping[str, Sketch]) -> Difference:
        """Compare two batches of other digests."""
        # Random numbers have other last digits under other kernels; anything more is another batch.
        found = [self._apart(one, now[name], [], rank) for name, one in before.items() if name in now]
        alike = found and before.keys() == now.keys() and all(d.verdict != "different" for d in found)
        last_digits = [d for d in found if d.verdict == "bound"]
        if alike and last_digits:
            return replace(max(last_digits, key=lambda d: d.max_abs), note="the batch has other last digits")
        return unequal(rank, "the batch holds other samples")

    def mean_loss(self, loss: float) -> float:
        return mean_loss(self._now.ranks, self.number)

    def norm(self, value: tuple[float, float | None]) -> Found:
        self.result.norm, clipped = value
        yield "", self.number_difference("norm", self.before.norm, value[0])
        if self.before.clipped_norm is not None and clipped is not None:
            yield "clipping", self.number_difference("clipped_norm", self.before.clipped_norm, clipped)

    def number_difference(self, quantity: str, expected: float, got: float) -> Difference:
        if quantity == "loss" and self.regrouped:
            drawn = [mean_loss(list(draw), self.number) for draw in self._draws]
        else:
            drawn = [number for step in self._drawn() if (number := getattr(step, quantity)) is not None]
        spread = max((abs(value - drawn[0]) for value in drawn[1:]), default=0.0)
        bound = measured_bound(spread, abs(got), 1, max(0, len(drawn) - 1), torch.float32)
        possible = math.isfinite(bound) and not self._exactly
        return number_difference(expected, got, bound if possible else 0.0, rank=self.rank)

    def tensor(self, quantity: str, name: str, expected: Sketch, got: Sketch) -> Difference:
        drawn = [] if quantity == "initial weight" else [step.sketches[quantity] for step in self._drawn()]
        found = self._apart(expected, got, [one[name] for one in drawn if name in one], self.rank)
        if found.verdict == "exact":
            return found
        # With the element that differs most, where both sides' tensors are kept.
        step, kept = (INITIAL, "weight") if quantity == "initial weight" else (self.number, quantity)
        held = [self._shelf(file, step, kept).get(name) for file in self._files]
        sides = [tensor for tensor in held if tensor is not None]
        if len(sides) < 2 or sides[0].shape != sides[1].shape or sides[0].dtype != sides[1].dtype:
            return found
        exact = difference(sides[0], sides[1], rank=self.rank)
        if exact.verdict == "exact":  # NaN of another kind, or zeros of another sign
            return found
        return replace(exact, verdict=found.verdict, bound=found.bound, apart=found.apart)

    def _apart(self, expected: Sketch, got: Sketch, drawn: Sequence[Sketch], rank: int) -> Difference:
        """Compare by digest, then by projections."""
        # A projection of a difference is a sum of rounding errors, as an element's difference is.
        if expected.digest == got.digest:
            return Difference(rank=rank)
        if (expected.dtype, expected.shape) != (got.dtype, got.shape):
            kinds = [f"{one.dtype}{list(one.shape)}" for one in (got, expected)]
            found = unequal(rank, f"{kinds[0]} where the record has {kinds[1]}")
            return replace(found, max_abs=math.inf, ulps=math.inf)
        worst, root = max(apart(expected, got)), math.sqrt(max(1, got.elements))
        allowed = 0.0 if self._exactly else _allowed(got, drawn)
        far, least = distance(expected, got), least_distance(expected, got)
        return Difference(
            verdict="bound" if worst <= allowed and not self._exactly else "different",
            max_abs=far / root,
            ulps=math.inf,
            apart=worst / root,
            bound=allowed / root,
            rank=rank,
            estimated=True,
            note=f"the distance is about {far:.2g} (at least {least:.2g}) in a norm of {got.norm:.3g}",
        )


def _allowed(got: Sketch, drawn: Sequence[Sketch]) -> float:
    if not (got.torch_dtype.is_floating_point or got.torch_dtype.is_complex):
        return 0.0
    base, *others = [one for one in drawn if one.shape == got.shape] or [got]
    spread = max((value for one in others for value in apart(base, one)), default=0.0)
    # What has no draws (batches, initial weights) comes from generators: as if each number were one rounding off.
    bound = measured_bound(spread, got.norm, PROJECTIONS, len(others) or ORDERS, got.torch_dtype)
    return bound if math.isfinite(bound) else 0.0


Batches = dict[tuple[int, int], tuple[str, dict[str, Sketch]]]


def all_batches(ranks: Sequence[RankTrace], number: int) -> Batches:
    """Return (accumulated batch, rank) -> digest, and sketches of its tensors; one process may have trained on all."""
    found: Batches = {}
    for process, rank in enumerate(ranks):
        places = _by_place(rank.steps[number].batches, rank.steps[number].sketches.get("batch", {}))
        found |= {(m, place if len(ranks) == 1 else process): one for (m, place), one in places.items()}
    return found


def _by_place(digests: list[list[str]], samples: Mapping[str, Sketch]) -> Batches:
    def below(start: str) -> dict[str, Sketch]:
        return {name.removeprefix(start): one for name, one in samples.items() if name.startswith(start)}

    return {
        (micro, place): (text, below(f"{micro}.{place}."))
        for micro, row in enumerate(digests)
        for place, text in enumerate(row)
    }


# --------------------------------------------------------------------------------------------------------- all ranks


def merged(ranks: Sequence[Sequence[RankStep]]) -> list[StepReport]:
    """Return the findings of each step, of all ranks' steps."""
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
    """Return the ranks' difference that says most; of equal ones that of the rank which owns the place."""
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


def check_deterministic(again: Cell, parameters: list[str], undone: str) -> None:
    """Raise RecipeError with the place where they part, unless a second run gave what the first one did.

    Args:
        again: the second run, held against the first.
        parameters: their names, in the model's order.
        undone: what was not done therefore, such as "compared".
    """
    if again.verdict == "exact":
        return
    first = first_divergence(again.steps, parameters)
    of_all = first_divergence(again.steps, parameters, quantities=("initial weight", "gradient", "weight", "state"))
    also = f"; of all parameters first at {of_all}" if of_all not in (None, first) else ""
    raise RecipeError(
        f"the recipe is not deterministic: two runs under {again.backend!r} at world size {again.world_size} "
        f"differ, first at {first}{also}. Nothing was {undone}. Seed whatever is drawn outside of torch's, numpy's and "
        "random's global generators, and avoid operations without a deterministic form"
    )
