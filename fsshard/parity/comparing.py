"""Compares a step with a recorded one, quantity by quantity, and puts together what the ranks of a run have found.

There is one comparison, :meth:`StepComparison.compare_step`, and one rule: what changed says what may round, nothing
else may differ (:func:`freedom`). Two kinds of step pass through it: one that is trained now, with whole tensors
(:mod:`fsshard.parity.checking`, on the ranks), and one of another trace, with sketches (:func:`compare_traces`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar

import torch

from fsshard.backends import backend_names
from fsshard.backends.registry import backend_class
from fsshard.errors import RecipeError
from fsshard.parity.bounds import ORDERS, measured_bound
from fsshard.parity.one_process import first_difference
from fsshard.parity.report import (
    QUANTITIES,
    SEVERITY,
    Cell,
    Difference,
    RankStep,
    StepReport,
    difference,
    first_divergence,
    number_difference,
    place_of,
    unequal,
    value_differences,
    worst_of,
)
from fsshard.parity.sketch import PROJECTIONS, Sketch, apart, distance
from fsshard.parity.trace import INITIAL, RankTrace, Step, Trace, mean_loss, read_tensors

ROUNDED = ("initial weight", "batch", "loss", "gradient", "norm", "weight", "state", "buffer")
"""Quantities that another kernel may give other last digits; of the rest nothing but equality is right."""
Found = Iterator[tuple[str, Difference]]
Tensors = Mapping[str, Mapping[str, Any]]
"""Quantity -> name -> tensor, or its sketch."""


class StepComparison:
    """Holds one rank's steps against those of a recorded process: ``self.now`` against ``self.before``.

    A subclass says what is recorded (``recorded``), how tensors, samples and norms are compared (``tensor``,
    ``batches``, ``norms``), how far a number may round (``number_bound``) and what the mean of all ranks' losses is.

    Attributes:
        recorded_in: where, in words.
        ranks: the recorded training, rank by rank.
        process: whose record these steps are held against.
        rank: of whoever trained the steps.
        regrouped: it trained on other samples than the recorded process, so only what all ranks share is compared.
        own_engine: an engine of the user's own trained them, which may show no more than weights.
    """

    recorded_in: ClassVar[str]
    ranks: list[RankTrace]
    process: int
    rank: int
    regrouped: bool
    own_engine: bool
    owned: Callable[[str], tuple[int, int]]  # [start, stop) of the real numbers of a parameter that this rank updates
    recorded: Callable[[str], Mapping[str, Any] | None]
    tensor: Callable[[str, str, Any, Any], Difference]
    batches: Callable[[], Found]
    norms: Callable[[], Found]
    number_bound: Callable[[str, float], float]
    mean_loss: Callable[[], float]

    def compare_step(self, number: int, step: Step, tensors: Tensors) -> RankStep:
        """Compare one step, whose tensors are given as the record has them: by quantity and name."""
        self.number, self.now, self.before = number, step, self.ranks[self.process].steps[number]
        self.result = RankStep(
            loss=step.loss, reference_loss=self.before.loss, norm=step.norm, reference_norm=self.before.norm
        )
        for quantity, differences in self._stages(tensors):
            for name, found in differences:
                known = self.result.differences.setdefault(quantity, {})
                if name not in known or SEVERITY[found.verdict] > SEVERITY[known[name].verdict]:
                    known[name] = found
        return self.result

    def _stages(self, tensors: Tensors) -> Iterator[tuple[str, Iterable[tuple[str, Difference]]]]:
        before, now = self.before, self.now
        # An engine of one's own that shows nothing of its optimizer is not compared in that.
        states = bool(tensors.get("state") or now.plain or not self.own_engine)
        if "initial weight" in tensors:
            yield "initial weight", self._tensors("initial weight", tensors)
        yield "batch", self.batches()
        yield "loss", self._loss()
        yield "gradient", self._tensors("gradient", tensors)
        yield "norm", self.norms()
        # No engine computes learning rates and the like, so nothing but equality is right.
        if now.groups or not self.own_engine:
            yield "param_groups", value_differences(_flat(before.groups), _flat(now.groups), self.rank)
        yield "weight", self._tensors("weight", tensors)
        yield "state", self._tensors("state", tensors)
        yield "state", value_differences(before.plain, now.plain, self.rank) if states else ()
        yield "buffer", self._tensors("buffer", tensors)
        if not self.regrouped:
            note = f"this run drew different random numbers than {self.recorded_in}"
            same = before.random == now.random
            yield "random state", [("", Difference(rank=self.rank) if same else unequal(self.rank, note))]

    def number_difference(self, quantity: str, expected: float, got: float) -> Difference:
        """Compare a number, which may round as far as is known for its quantity."""
        return number_difference(expected, got, self.number_bound(quantity, got), rank=self.rank)

    def _loss(self) -> Found:
        """Compare the loss; the first module that put out something else is named with a difference."""
        if self.regrouped:
            self.result.loss, self.result.reference_loss = self.mean_loss(), mean_loss(self.ranks, self.number)
        found = self.number_difference("loss", self.result.reference_loss, self.result.loss)
        if found.verdict != "exact" and not self.regrouped and self.before.outputs and self.now.outputs:
            found = replace(found, note=first_difference(self.before.outputs, self.now.outputs))
        yield "", found

    def _tensors(self, quantity: str, tensors: Tensors) -> Found:
        """Compare tensors by name."""
        recorded, given = self.recorded(quantity), tensors.get(quantity, {})
        if recorded is None:
            return
        for name, value in given.items():
            if name not in recorded:
                yield name, unequal(self.rank, f"missing in {self.recorded_in}")
                continue
            found = self.tensor(quantity, name, recorded[name], value)
            start, stop = self.owned(name.partition(": ")[0])
            pairs = "complex" in str(value.dtype)
            if found.verdict != "exact" and start <= place_of(value.shape, pairs, found.index) < stop:
                self.result.owner.add((quantity, name))
            yield name, found
        if given or not self.own_engine or quantity in ("initial weight", "weight"):
            for name in recorded:
                if name not in given:
                    yield name, unequal(self.rank, "missing here")


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
    recorded = before.ranks[0].rounding
    aligned = bool(recorded) and recorded[0].aligned and _adds_in_tree(now.backend)
    one_order = now.world_size <= 2 or aligned
    if before.backend == now.backend or (one_order and now.recipe.get("accumulate") == "1"):
        return "nothing"
    return "sum over ranks"


def _adds_in_tree(name: str) -> bool:
    """Tell of an engine's name in a report, which has its options, too, whether the engine has the order of ranks."""
    return name in backend_names() and backend_class(name).facts.adds_in_tree


def compare_traces(
    before: Trace, now: Trace, *, regrouped: bool = False, draws: Draws = (), exactly: bool = False
) -> list[StepReport]:
    """Return the differences in each step of ``now``, which may have fewer steps than the record. Nothing is run.

    Args:
        before: the recorded training.
        now: another.
        regrouped: its processes have trained on other parts of the same samples than those of the record.
        draws: one training as it is, then some with other rounding, each as its ranks saw it. How far these are from
            the first one measures the bounds. (It need not be ``now``, whose engine may be wrong.)
        exactly: nothing may round: every bound is zero.
    """
    # Where samples are divided otherwise, only what all ranks share can be compared: rank 0 speaks for it.
    found = []
    for rank in range(1 if regrouped else len(now.ranks)):
        comparison, steps = TraceComparison(before, now, rank, regrouped, draws, exactly), []
        for number, step in enumerate(now.ranks[rank].steps):
            initial = {"initial weight": now.ranks[rank].initial} if number == 0 else {}
            # without outputs: first_output() compares those of all steps
            steps.append(comparison.compare_step(number, replace(step, outputs=[]), step.sketches | initial))
        found.append(steps)
    return merged(found)


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


class TraceComparison(StepComparison):
    """One rank of a recorded training held against the same rank of another one."""

    recorded_in = "the record"

    def __init__(self, before: Trace, now: Trace, rank: int, regrouped: bool, draws: Draws, exactly: bool) -> None:
        self.ranks, self.process, self.rank, self.regrouped = before.ranks, rank, rank, regrouped
        self.own_engine = now.backend.partition("(")[0] not in backend_names()
        self.owned = lambda name: now.ranks[rank].owned.get(name, (0, 0))
        self._now, self._draws, self._exactly = now, draws, exactly
        # Tensors are looked at where sketches differ: all of one quantity and step are read at once.
        self._read = lru_cache(maxsize=4)(lambda path, step, quantity: read_tensors(path, step, quantity, rank))
        self._files = [trace.tensors for trace in (before, now) if trace.tensors is not None]

    def _drawn(self) -> list[Step]:
        return [draw[self.rank].steps[self.number] for draw in self._draws]

    def recorded(self, quantity: str) -> Mapping[str, Sketch] | None:
        if quantity == "initial weight":
            return self.ranks[self.rank].initial
        return None if quantity == "buffer" and self.regrouped else self.before.sketches.get(quantity)

    def batches(self) -> Found:
        """Compare the samples of all ranks; rank 0 does."""
        got = all_batches(self._now.ranks, self.number)
        for place, (expected, samples) in all_batches(self.ranks, self.number).items() if self.rank == 0 else ():
            digest, others = got.get(place, ("", {}))
            rank = place[1]
            yield "", Difference(rank=rank) if expected == digest else self._other_batch(rank, samples, others)

    def _other_batch(self, rank: int, before: Mapping[str, Sketch], now: Mapping[str, Sketch]) -> Difference:
        """Compare two batches of other digests."""
        # Random numbers have other last digits under other kernels; anything more is another batch.
        found = [self._apart(one, now[name], [], rank) for name, one in before.items() if name in now]
        last_digits = [d for d in found if d.verdict == "bound"]
        if last_digits and before.keys() == now.keys() and all(d.verdict != "different" for d in found):
            return replace(max(last_digits, key=lambda d: d.max_abs), note="the batch differs in its last digits")
        return unequal(rank, "the batch holds different samples")

    def norms(self) -> Found:
        """Compare the gradients' norm before clipping, and what the engine's clipping returned."""
        yield "", self.number_difference("norm", self.before.norm, self.now.norm)
        if self.before.clipped_norm is not None and self.now.clipped_norm is not None:
            yield "clipping", self.number_difference("clipped_norm", self.before.clipped_norm, self.now.clipped_norm)

    def mean_loss(self) -> float:
        return mean_loss(self._now.ranks, self.number)

    def number_bound(self, quantity: str, got: float) -> float:
        if quantity == "loss" and self.regrouped:
            drawn = [mean_loss(list(draw), self.number) for draw in self._draws]
        else:
            drawn = [number for step in self._drawn() if (number := getattr(step, quantity)) is not None]
        spread = max((abs(value - drawn[0]) for value in drawn[1:]), default=0.0)
        bound = measured_bound(spread, abs(got), 1, max(0, len(drawn) - 1), torch.float32)
        return bound if math.isfinite(bound) and not self._exactly else 0.0

    def tensor(self, quantity: str, name: str, expected: Sketch, got: Sketch) -> Difference:
        drawn = [] if quantity == "initial weight" else [step.sketches[quantity] for step in self._drawn()]
        found = self._apart(expected, got, [one[name] for one in drawn if name in one], self.rank)
        if found.verdict == "exact":
            return found
        # With the element that differs most, where both sides' tensors are kept.
        step, kept = (INITIAL, "weight") if quantity == "initial weight" else (self.number, quantity)
        held = [self._read(file, step, kept).get(name) for file in self._files]
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
        if not (expected.dtype and got.dtype):  # of a copy that is not its holder's a script's rank keeps no more
            return unequal(rank, "the bits are others, and nothing else of this rank's copy is recorded")
        if (expected.dtype, expected.shape) != (got.dtype, got.shape):
            kinds = [f"{one.dtype}{list(one.shape)}" for one in (got, expected)]
            found = unequal(rank, f"{kinds[0]} where the record has {kinds[1]}")
            return replace(found, max_abs=math.inf, ulps=math.inf)
        worst, far, root = max(apart(expected, got)), distance(expected, got), math.sqrt(max(1, got.elements))
        allowed = 0.0 if self._exactly else _allowed(got, drawn)
        return Difference(
            verdict="bound" if worst <= allowed and not self._exactly else "different",
            max_abs=far / root,
            ulps=math.inf,
            apart=worst / root,
            bound=allowed / root,
            rank=rank,
            estimated=True,
            note=f"the distance is about {far:.2g} in a norm of {got.norm:.3g}",
        )


def _allowed(got: Sketch, drawn: Sequence[Sketch]) -> float:
    dtype = getattr(torch, got.dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    base, *others = [one for one in drawn if one.shape == got.shape] or [got]
    spread = max((value for one in others for value in apart(base, one)), default=0.0)
    # What has no draws (batches, initial weights) comes from generators: as if each number were one rounding off.
    bound = measured_bound(spread, got.norm, PROJECTIONS, len(others) or ORDERS, dtype)
    return bound if math.isfinite(bound) else 0.0


def all_batches(ranks: Sequence[RankTrace], number: int) -> dict[tuple[int, int], tuple[str, dict[str, Sketch]]]:
    """Return (accumulated batch, rank) -> digest, and sketches of its tensors; a process may have noted all ranks'."""
    found = {}
    for process, rank in enumerate(ranks):
        step = rank.steps[number]
        samples = step.sketches.get("batch", {})
        for micro, place in ((micro, place) for micro, row in enumerate(step.batches) for place in range(len(row))):
            start = f"{micro}.{place}."
            tensors = {name.removeprefix(start): one for name, one in samples.items() if name.startswith(start)}
            found[micro, process if len(step.batches[micro]) == 1 else place] = step.batches[micro][place], tensors
    return found


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


def cell_of(steps: list[StepReport], parameters: list[str]) -> Cell:
    """Return the cell of a run, whose place in the report is still to be filled in."""
    worst = worst_of(d.verdict for step in steps for named in step.differences.values() for d in named.values())
    first = None if worst == "exact" else first_divergence(steps, parameters, worst)
    return Cell(backend="", world_size=0, steps=steps, verdict=worst, first_divergence=first)


def check_deterministic(again: Cell, parameters: list[str], undone: str) -> None:
    """Raise RecipeError with the place where two runs part, unless the second, ``again``, gave what the first did."""
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
