"""Compares two recorded trainings, number by number and sketch by sketch; nothing is run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fsshard.backends import backend_names
from fsshard.parity.bounds import ORDERS, measured_bound
from fsshard.parity.comparing import Found, StepComparison, merged
from fsshard.parity.difference import difference, number_difference, place_of, unequal
from fsshard.parity.findings import QUANTITIES, Difference, RankStep, StepReport
from fsshard.parity.recorded import RankTrace, StepTrace, Trace
from fsshard.parity.rounding import BatchFacts
from fsshard.parity.sketch import PROJECTIONS, Sketch, apart, distance, least_distance
from fsshard.parity.trace import Tensors
from fsshard.parity.training import INITIAL, Stage
from fsshard.parity.watch import first_difference

__all__ = ["compare_traces", "first_output", "freedom", "needs_bounds"]

ROUNDED = ("initial weight", "batch", "loss", "gradient", "norm", "weight", "state", "buffer")
"""Quantities that another kernel may give other last digits; of the rest nothing but equality is right."""
Draws = Sequence[Sequence[RankTrace]]


def compare_traces(
    before: Trace,
    now: Trace,
    *,
    batches: list[BatchFacts] | None = None,
    draws: Draws = (),
    exactly: bool = False,
) -> list[StepReport]:
    """Return what differs in each step of ``now``, which may have fewer steps.

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
    return merged([list(_TraceComparison(before, now, rank, batches, draws, exactly).steps()) for rank in ranks])


def freedom(before: Trace, now: Trace) -> str:
    """Return what may round between two trainings on the same samples: "nothing", "sum over ranks" or "everything".

    What changed says what may round; nothing else may differ. A commit with changed files, or an unknown one, counts as
    another one.
    """
    known = bool(before.commit) and not before.commit.endswith("+")
    sides = [(t.environment, t.recipe, t.commit, t.device, t.world_size, len(t.ranks)) for t in (before, now)]
    if not known or sides[0] != sides[1]:
        return "everything"
    # Two summands have one order only; where gradients are reduced more than once there are more summands.
    one_order = now.world_size <= 2 and now.recipe.get("accumulate") == "1"
    return "nothing" if one_order or before.backend == now.backend else "sum over ranks"


def needs_bounds(steps: Sequence[StepReport]) -> bool:
    """Return whether something that kernels round differs before anything differs that they do not round."""
    for step in steps:
        for quantity in QUANTITIES:
            if any(d.verdict != "exact" for d in step.differences.get(quantity, {}).values()):
                return quantity in ROUNDED
    return False


def first_output(before: Trace, now: Trace) -> str:
    """The first module whose output differs, of traces on the same batches; "" if none does, or none is recorded."""
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
        super().__init__(rank, regrouped=batches is not None)
        self._before, self._now, self._batches, self._draws, self._exactly = before, now, batches, draws, exactly
        self._kept = Tensors(before.tensors), Tensors(now.tensors)

    def steps(self) -> Iterator[RankStep]:
        """Compare all of them."""
        for number in range(self._now.steps):
            yield self.compare_step(number, self._before.ranks[self.rank].steps[number], self._stages(number))

    def _stages(self, number: int) -> Iterator[Stage]:
        """Return what a training yields, from the record of one."""
        step = self._now.ranks[self.rank].steps[number]
        if number == 0:
            yield "initial weight", self._now.ranks[self.rank].initial.items()
        yield "batch", _all_batches(self._now, number) if self.rank == 0 else None
        yield "loss", (step.loss, step.outputs)
        yield "gradient", step.sketches.get("gradient", {})
        yield "norm", (step.norm, step.clipped_norm)
        yield "param_groups", step.groups
        yield "weight", step.sketches.get("weight", {}).items()
        yield "state", (step.sketches.get("state", {}).items(), step.plain)
        if not self.regrouped:
            yield "buffer", step.sketches.get("buffer", {}).items()
        yield "random state", step.random

    def _drawn(self) -> list[StepTrace]:
        return [draw[self.rank].steps[self.number] for draw in self._draws]

    def recorded(self, quantity: str) -> Mapping[str, Sketch] | None:
        if quantity == "initial weight":
            return self._before.ranks[self.rank].initial
        return self.before.sketches.get(quantity)

    def may_be_silent(self, quantity: str) -> bool:
        return self._now.backend.partition("(")[0] not in backend_names()  # an engine of the user's own

    def owns(self, name: str, got: Sketch, difference: Difference) -> bool:
        start, stop = self._now.ranks[self.rank].owned.get(name.partition(": ")[0], (0, 0))
        place = place_of(torch.empty(got.shape, dtype=got.torch_dtype, device="meta"), difference.index)
        return start <= place < stop

    def batch(self, batches: Any) -> Found:
        """Compare what all ranks trained on; rank 0 does."""
        if batches is None:
            return
        if self._batches is not None:
            batches = _by_place(*self._batches[self.number])
        for (micro, rank), (expected, samples) in _all_batches(self._before, self.number).items():
            got, others = batches.get((micro, rank), ("", {}))
            yield "", Difference(rank=rank) if expected == got else self._other_batch(rank, samples, others)

    def _other_batch(self, rank: int, before: Mapping[str, Sketch], now: Mapping[str, Sketch]) -> Difference:
        """Random numbers have other last digits under other kernels; anything more is another batch."""
        found = [self._apart(one, now[name], [], rank) for name, one in before.items() if name in now]
        alike = found and before.keys() == now.keys() and all(d.verdict != "different" for d in found)
        last_digits = [d for d in found if d.verdict == "bound"]
        if alike and last_digits:
            return replace(max(last_digits, key=lambda d: d.max_abs), note="the batch has other last digits")
        return unequal(rank, "the batch holds other samples")

    def loss(self, value: tuple[float, Any]) -> Found:
        drawn = [step.loss for step in self._drawn()]
        self.result.loss = value[0]
        if self.regrouped:
            self.result.loss = self._now.losses[self.number]
            self.result.reference_loss = self._before.losses[self.number]
            drawn = [sum(rank.steps[self.number].loss for rank in draw) / len(draw) for draw in self._draws]
        yield "", self._number(self.result.reference_loss, self.result.loss, drawn)

    def norm(self, value: tuple[float, float | None]) -> Found:
        self.result.norm, clipped = value
        yield "", self._number(self.before.norm, value[0], [step.norm for step in self._drawn()])
        if self.before.clipped_norm is not None and clipped is not None:
            drawn = [step.clipped_norm for step in self._drawn() if step.clipped_norm is not None]
            yield "clipping", self._number(self.before.clipped_norm, clipped, drawn)

    def tensor(self, quantity: str, name: str, expected: Sketch, got: Sketch) -> Difference:
        drawn = [] if quantity == "initial weight" else [step.sketches[quantity] for step in self._drawn()]
        found = self._apart(expected, got, [one[name] for one in drawn if name in one], self.rank)
        if found.verdict == "exact":
            return found
        # With the element that differs most, where both sides' tensors are kept.
        step, kept = (INITIAL, "weight") if quantity == "initial weight" else (self.number, quantity)
        one, other = (tensors.get(step, kept, self.rank, name) for tensors in self._kept)
        if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
            return found
        exact = difference(one, other, rank=self.rank)
        if exact.verdict == "exact":  # NaN of another kind, or zeros of another sign
            return found
        return replace(exact, verdict=found.verdict, bound=found.bound, apart=found.apart)

    def _number(self, expected: float, got: float, drawn: Sequence[float]) -> Difference:
        spread = max((abs(value - drawn[0]) for value in drawn[1:]), default=0.0)
        bound = measured_bound(spread, abs(got), 1, max(0, len(drawn) - 1), torch.float32)
        possible = math.isfinite(bound) and not self._exactly
        return number_difference(expected, got, bound if possible else 0.0, rank=self.rank)

    def _apart(self, expected: Sketch, got: Sketch, drawn: Sequence[Sketch], rank: int) -> Difference:
        """By digest, then by projections: their difference is a sum of rounding errors, as an element's is."""
        if expected.digest == got.digest:
            return Difference(rank=rank)
        if (expected.dtype, expected.shape) != (got.dtype, got.shape):
            kinds = [f"{one.dtype}{list(one.shape)}" for one in (got, expected)]
            different = unequal(rank, f"{kinds[0]} where the record has {kinds[1]}")
            return replace(different, max_abs=math.inf, ulps=math.inf)
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


def _all_batches(trace: Trace, number: int) -> Batches:
    """(accumulated batch, rank) -> digest, and sketches of its tensors; one process may have trained on all."""
    found: Batches = {}
    for process, rank in enumerate(trace.ranks):
        places = _by_place(rank.steps[number].batches, rank.steps[number].sketches.get("batch", {}))
        found |= {(m, place if len(trace.ranks) == 1 else process): one for (m, place), one in places.items()}
    return found


def _by_place(digests: list[list[str]], samples: Mapping[str, Sketch]) -> Batches:
    return {
        (micro, place): (text, _below(f"{micro}.{place}.", samples))
        for micro, row in enumerate(digests)
        for place, text in enumerate(row)
    }


def _below(start: str, samples: Mapping[str, Sketch]) -> dict[str, Sketch]:
    return {name.removeprefix(start): one for name, one in samples.items() if name.startswith(start)}
