"""Compares a step with a recorded one, quantity by quantity, and puts together what the ranks of a run have found.

There is one comparison, :meth:`StepComparison.compare_step`, and one rule: what changed says what may round, nothing
else may differ (:func:`freedom`). Two kinds of step pass through it: one that is trained now, with whole tensors
(:mod:`fsshard.parity.checking`, on the ranks), and one of another trace, with sketches (:func:`compare_traces`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from fsshard.parity.trace import INITIAL, RankTrace, Step, Trace, Values, mean_loss, read_tensors
from fsshard.recipes.recipe import Arguments

# Quantities that another kernel may give other last digits; of the rest nothing but equality is right.
ROUNDED = ("initial weight", "batch", "loss", "gradient", "norm", "weight", "state", "buffer")
Differences = Iterator[tuple[str, Difference]]
# Quantity -> name -> tensor, or its sketch.
Tensors = Mapping[str, Mapping[str, Any]]


class StepComparison:
    """Holds one rank's steps against those of a recorded process: ``self.now`` against ``self.before``.

    A subclass says what is recorded (``recorded``), how tensors, samples and norms are compared (``tensor``,
    ``batches``, ``norms``), how far a number may round (``number_bound``) and what the mean of all ranks' losses is.

    Attributes:
        recorded_in: where, in words.
        ranks: the recorded training, rank by rank.
        process: index of the recorded process that is compared with.
        rank: number of the rank that trained these steps.
        regrouped: it trained on other samples than the recorded process, so only what all ranks share is compared.
        is_users_engine: an engine of the user's own trained them, which may show no more than weights.
    """

    recorded_in: ClassVar[str]
    ranks: list[RankTrace]
    process: int
    rank: int
    regrouped: bool
    is_users_engine: bool
    owned: Callable[[str], tuple[int, int]]  # [start, stop) of the real numbers of a parameter that this rank updates
    recorded: Callable[[str], Arguments | None]
    tensor: Callable[[str, str, Any, Any], Difference]
    batches: Callable[[], Differences]
    norms: Callable[[], Differences]
    number_bound: Callable[[str, float], float]
    mean_loss: Callable[[], float]

    def compare_step(self, number: int, step: Step, tensors: Tensors) -> RankStep:
        """Compare one step, whose tensors are given as the record has them: by quantity and name."""
        self.number = number
        self.now = step
        self.before = self.ranks[self.process].steps[number]
        self.result = RankStep(
            loss=step.loss,
            reference_loss=self.before.loss,
            norm=step.norm,
            reference_norm=self.before.norm,
        )
        for quantity, differences in self._stages(tensors):
            for name, item in differences:
                worst = self.result.differences.setdefault(quantity, {})
                severity = SEVERITY[item.verdict]
                if name not in worst or severity > SEVERITY[worst[name].verdict]:
                    worst[name] = item
        return self.result

    def _stages(self, tensors: Tensors) -> Iterator[tuple[str, Differences]]:
        before = self.before
        now = self.now
        if "initial weight" in tensors:
            yield "initial weight", self._tensors("initial weight", tensors)
        yield "batch", self.batches()
        yield "loss", self._loss()
        yield "gradient", self._tensors("gradient", tensors)
        yield "norm", self.norms()
        # No engine computes learning rates and the like, so nothing but equality is right.
        if now.groups or not self.is_users_engine:
            settings = _flat(now.groups)
            yield "param_groups", value_differences(_flat(before.groups), settings, self.rank)
        yield "weight", self._tensors("weight", tensors)
        yield "state", self._tensors("state", tensors)
        # A user's engine that shows nothing of its optimizer is not compared in that.
        if tensors.get("state") or now.plain or not self.is_users_engine:
            yield "state", value_differences(before.plain, now.plain, self.rank)
        yield "buffer", self._tensors("buffer", tensors)
        if not self.regrouped:
            yield "random state", self._random_state()

    def _random_state(self) -> Differences:
        if self.before.random == self.now.random:
            yield "", Difference(rank=self.rank)
        else:
            yield "", unequal(self.rank, f"this run drew different random numbers than {self.recorded_in}")

    def number_difference(self, quantity: str, expected: float, got: float) -> Difference:
        """Compare a number, which may round as far as is known for its quantity."""
        bound = self.number_bound(quantity, got)
        return number_difference(expected, got, bound, rank=self.rank)

    def _loss(self) -> Differences:
        """Compare the loss; the first module that put out something else is named with a difference."""
        result = self.result
        if self.regrouped:
            result.loss = self.mean_loss()
            result.reference_loss = mean_loss(self.ranks, self.number)
        item = self.number_difference("loss", result.reference_loss, result.loss)
        outputs = (self.before.outputs, self.now.outputs)
        if item.verdict != "exact" and not self.regrouped and all(outputs):
            item = replace(item, note=first_difference(*outputs))
        yield "", item

    def _tensors(self, quantity: str, tensors: Tensors) -> Differences:
        """Compare tensors by name."""
        recorded = self.recorded(quantity)
        if recorded is None:
            return
        present = tensors.get(quantity, {})
        for name, value in present.items():
            if name not in recorded:
                yield name, unequal(self.rank, f"missing in {self.recorded_in}")
                continue
            item = self.tensor(quantity, name, recorded[name], value)
            if item.verdict != "exact":
                start, stop = self.owned(name.partition(": ")[0])
                pairs = "complex" in str(value.dtype)
                if start <= place_of(value.shape, pairs, item.index) < stop:
                    self.result.owner.add((quantity, name))
            yield name, item
        # A user's engine may leave out any quantity but weights; ours may leave out none.
        if present or not self.is_users_engine or quantity in ("initial weight", "weight"):
            for name in recorded:
                if name not in present:
                    yield name, unequal(self.rank, "missing here")


def _flat(groups: Sequence[Arguments]) -> Values:
    values = {}
    for number, group in enumerate(groups):
        for key, value in group.items():
            values[f"group {number}: {key}"] = value
    return values


# -------------------------------------------------------------------------------------------------------- two traces

Draws = Sequence[Sequence[RankTrace]]


def freedom(before: Trace, now: Trace) -> str:
    """Return what may round between two trainings on the same samples: "nothing", "sum over ranks" or "everything"."""
    # A commit with changed files, or an unknown one, counts as another one.
    if not before.commit or before.commit.endswith("+"):
        return "everything"
    if _circumstances(before) != _circumstances(now):
        return "everything"
    if before.backend == now.backend:
        return "nothing"
    # Sums have one order on two ranks, and where both engines add in the tree; accumulation adds more summands.
    rounding = before.ranks[0].rounding
    aligned = bool(rounding) and rounding[0].aligned and _adds_in_tree(now.backend)
    one_order = now.world_size <= 2 or aligned
    once = now.recipe.get("accumulate") == "1"
    return "nothing" if one_order and once else "sum over ranks"


def _circumstances(trace: Trace) -> tuple[Any, ...]:
    """Return what two trainings have in common if their kernels round alike."""
    return (
        trace.environment,
        trace.recipe,
        trace.commit,
        trace.device,
        trace.world_size,
        len(trace.ranks),
    )


def _adds_in_tree(name: str) -> bool:
    """Return whether the engine of a report, whose name may have options behind it, adds in the order of the tree."""
    return name in backend_names() and backend_class(name).facts.adds_in_tree


def compare_traces(
    before: Trace,
    now: Trace,
    *,
    regrouped: bool = False,
    draws: Draws = (),
    exactly: bool = False,
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
    ranks = now.ranks[:1] if regrouped else now.ranks
    steps_of_ranks = []
    for rank, trace in enumerate(ranks):
        comparison = TraceComparison(before, now, rank, regrouped, draws, exactly)
        steps = []
        for number, step in enumerate(trace.steps):
            tensors = dict(step.sketches)
            if number == 0:
                tensors["initial weight"] = trace.initial
            # The outputs of all steps are compared by first_output().
            without_outputs = replace(step, outputs=[])
            steps.append(comparison.compare_step(number, without_outputs, tensors))
        steps_of_ranks.append(steps)
    return merged(steps_of_ranks)


def needs_bounds(steps: Sequence[StepReport]) -> bool:
    """Return whether something that kernels round differs before anything differs that they do not round."""
    first = first_divergence(steps, [])
    if first is None:
        return False
    return first.quantity in ROUNDED


def first_output(before: Trace, now: Trace) -> str:
    """Return the first module whose output differs, of traces on the same batches; "" if none does, or none is kept."""
    for number in range(now.steps):
        for rank, (one, other) in enumerate(zip(before.ranks, now.ranks, strict=True)):
            expected = one.steps[number].outputs
            got = other.steps[number].outputs
            if not expected or not got:
                continue
            text = first_difference(expected, got)
            if text:
                return f"forward of step {number}, rank {rank}: {text}"
    return ""


class TraceComparison(StepComparison):
    """One rank of a recorded training held against the same rank of another one."""

    recorded_in = "the record"

    def __init__(
        self,
        before: Trace,
        now: Trace,
        rank: int,
        regrouped: bool,
        draws: Draws,
        exactly: bool,
    ) -> None:
        self.ranks = before.ranks
        self.process = rank
        self.rank = rank
        self.regrouped = regrouped
        engine = now.backend.partition("(")[0]
        self.is_users_engine = engine not in backend_names()
        self._now = now
        self._draws = draws
        self._exactly = exactly
        # Files are read only where sketches differ; cached, since all tensors of a quantity are read at once.
        self._read = lru_cache(maxsize=4)(read_tensors)
        self._files = [trace.tensors for trace in (before, now) if trace.tensors is not None]

    def owned(self, name: str) -> tuple[int, int]:
        return self._now.ranks[self.rank].owned.get(name, (0, 0))

    def _drawn(self) -> list[Step]:
        return [draw[self.rank].steps[self.number] for draw in self._draws]

    def recorded(self, quantity: str) -> Mapping[str, Sketch] | None:
        if quantity == "initial weight":
            return self.ranks[self.rank].initial
        if quantity == "buffer" and self.regrouped:
            return None
        return self.before.sketches.get(quantity)

    def batches(self) -> Differences:
        """Compare the samples of all ranks; rank 0 does."""
        if self.rank:
            return
        recorded = all_batches(self.ranks, self.number)
        got = all_batches(self._now.ranks, self.number)
        for place, (expected, samples) in recorded.items():
            digest, other_samples = got.get(place, ("", {}))
            rank = place[1]
            if digest == expected:
                yield "", Difference(rank=rank)
            else:
                yield "", self._other_batch(rank, samples, other_samples)

    def _other_batch(
        self,
        rank: int,
        before: Mapping[str, Sketch],
        now: Mapping[str, Sketch],
    ) -> Difference:
        """Compare two batches of other digests."""
        # Random numbers have other last digits under other kernels; anything more is another batch.
        worst = Difference()
        if before.keys() == now.keys():
            items = [self._apart(one, now[name], [], rank) for name, one in before.items()]
            worst = max(items, key=lambda item: (SEVERITY[item.verdict], item.max_abs), default=worst)
        if worst.verdict == "bound":
            return replace(worst, note="the batch differs in its last digits")
        return unequal(rank, "the batch holds different samples")

    def norms(self) -> Differences:
        """Compare the gradients' norm before clipping, and what the engine's clipping returned."""
        yield "", self.number_difference("norm", self.before.norm, self.now.norm)
        expected = self.before.clipped_norm
        got = self.now.clipped_norm
        # The recipe clips, and the engine has returned a norm.
        if expected is not None and got is not None:
            yield "clipping", self.number_difference("clipped_norm", expected, got)

    def mean_loss(self) -> float:
        ranks = self._now.ranks
        return mean_loss(ranks, self.number)

    def number_bound(self, quantity: str, got: float) -> float:
        if self._exactly:
            return 0.0
        if quantity == "loss" and self.regrouped:
            numbers = [mean_loss(draw, self.number) for draw in self._draws]
        else:
            values = [getattr(step, quantity) for step in self._drawn()]
            numbers = [value for value in values if value is not None]
        gaps = [abs(number - numbers[0]) for number in numbers[1:]]
        spread = max(gaps, default=0.0)
        bound = measured_bound(spread, abs(got), 1, len(gaps), torch.float32)
        return bound if math.isfinite(bound) else 0.0

    def tensor(
        self,
        quantity: str,
        name: str,
        expected: Sketch,
        got: Sketch,
    ) -> Difference:
        place = (INITIAL, "weight")
        draws = []
        if quantity != "initial weight":
            place = (self.number, quantity)
            sketches = [step.sketches[quantity] for step in self._drawn()]
            draws = [named[name] for named in sketches if name in named]
        estimate = self._apart(expected, got, draws, self.rank)
        if estimate.verdict == "exact" or len(self._files) < 2:
            return estimate
        # With the element that differs most, where both sides' tensors are kept.
        before, now = self._files
        one = self._read(before, *place, self.rank).get(name)
        other = self._read(now, *place, self.rank).get(name)
        if one is None or other is None:
            return estimate
        if one.shape != other.shape or one.dtype != other.dtype:
            return estimate
        exact = difference(one, other, rank=self.rank)
        # The digests differ by NaN of another kind, or by zeros of another sign.
        if exact.verdict == "exact":
            return estimate
        return replace(exact, verdict=estimate.verdict, bound=estimate.bound, apart=estimate.apart)

    def _apart(
        self,
        expected: Sketch,
        got: Sketch,
        draws: Sequence[Sketch],
        rank: int,
    ) -> Difference:
        """Compare by digest, then by projections."""
        if expected.digest == got.digest:
            return Difference(rank=rank)
        # A script's rank keeps only the digest of a tensor that another rank records.
        if not (expected.dtype and got.dtype):
            return unequal(rank, "the bits are others, and nothing else of this rank's copy is recorded")
        kind = f"{got.dtype}{list(got.shape)}"
        recorded_kind = f"{expected.dtype}{list(expected.shape)}"
        if kind != recorded_kind:
            result = unequal(rank, f"{kind} where the record has {recorded_kind}")
            return replace(result, max_abs=math.inf, ulps=math.inf)
        # A projection of a difference is a sum of rounding errors, as an element's difference is.
        worst = max(apart(expected, got))
        far = distance(expected, got)
        root = math.sqrt(max(1, got.elements))
        allowed = 0.0 if self._exactly else _allowed(got, draws)
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


def _allowed(got: Sketch, draws: Sequence[Sketch]) -> float:
    dtype = getattr(torch, got.dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    same_shape = [one for one in draws if one.shape == got.shape]
    base, *others = same_shape or [got]
    spread = max((max(apart(base, one)) for one in others), default=0.0)
    # Batches and initial weights have no draws, and come from generators: one rounding per number is allowed.
    draw_count = len(others) or ORDERS
    bound = measured_bound(spread, got.norm, PROJECTIONS, draw_count, dtype)
    return bound if math.isfinite(bound) else 0.0


# (Accumulated batch, rank) -> digest, and sketches of its tensors.
Batches = dict[tuple[int, int], tuple[str, dict[str, Sketch]]]


def all_batches(ranks: Sequence[RankTrace], number: int) -> Batches:
    """Return the batches of one step of all ranks; a process may have noted all ranks'."""
    batches = {}
    for process, trace in enumerate(ranks):
        step = trace.steps[number]
        samples = step.sketches.get("batch", {})
        for micro, digests in enumerate(step.batches):
            for place, digest in enumerate(digests):
                prefix = f"{micro}.{place}."
                tensors = {}
                for name, sketch in samples.items():
                    if name.startswith(prefix):
                        tensors[name.removeprefix(prefix)] = sketch
                rank = process if len(digests) == 1 else place
                batches[micro, rank] = digest, tensors
    return batches


# --------------------------------------------------------------------------------------------------------- all ranks


def merged(ranks: Sequence[Sequence[RankStep]]) -> list[StepReport]:
    """Return the findings of each step, of all ranks' steps."""
    return list(map(_merged_step, zip(*ranks, strict=True)))


def _merged_step(steps: Sequence[RankStep]) -> StepReport:
    losses = [step.loss for step in steps]
    reference_losses = [step.reference_loss for step in steps]
    report = StepReport(
        loss=sum(losses) / len(steps),
        reference_loss=sum(reference_losses) / len(steps),
        norm=steps[0].norm,
        reference_norm=steps[0].reference_norm,
    )
    for quantity in QUANTITIES:
        names: Values = {}
        for step in steps:
            names |= step.differences.get(quantity, {})
        if names:
            worst = {name: _worst_rank(steps, quantity, name) for name in names}
            report.differences[quantity] = worst
    return report


def _worst_rank(steps: Sequence[RankStep], quantity: str, name: str) -> Difference:
    """Return the most severe difference of all ranks; of equally severe ones the owner's, then the lowest rank's."""
    candidates = []
    for step in steps:
        item = step.differences.get(quantity, {}).get(name)
        if item is not None:
            is_owner = (quantity, name) in step.owner
            candidates.append(((SEVERITY[item.verdict], is_owner), item))
    # Of equal ones max() takes the first.
    _, worst = max(candidates, key=operator.itemgetter(0))
    return worst


def cell_of(steps: list[StepReport], parameters: list[str]) -> Cell:
    """Return the cell of a run, whose place in the report is still to be filled in."""
    verdicts = set()
    for step in steps:
        for differences in step.differences.values():
            for item in differences.values():
                verdicts.add(item.verdict)
    cell = Cell(backend="", world_size=0, steps=steps, verdict=worst_of(verdicts))
    if cell.verdict != "exact":
        cell.first_divergence = first_divergence(steps, parameters, cell.verdict)
    return cell


def check_deterministic(again: Cell, parameters: list[str], undone: str) -> None:
    """Raise RecipeError with the place where two runs part, unless the second, ``again``, gave what the first did."""
    if again.verdict == "exact":
        return
    first = first_divergence(again.steps, parameters)
    of_parameters = ("initial weight", "gradient", "weight", "state")
    of_all = first_divergence(again.steps, parameters, quantities=of_parameters)
    also = ""
    if of_all not in (None, first):
        also = f"; of all parameters first at {of_all}"
    raise RecipeError(
        f"the recipe is not deterministic: two runs under {again.backend!r} at world size {again.world_size} "
        f"differ, first at {first}{also}. Nothing was {undone}. Seed whatever is drawn outside of torch's, numpy's and "
        "random's global generators, and avoid operations without a deterministic form"
    )
