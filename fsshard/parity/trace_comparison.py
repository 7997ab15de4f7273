"""Compares two recorded trainings, number by number; nothing is run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fsshard.parity.bounds import ORDERS, measured_bound
from fsshard.parity.difference import difference, number_difference, place_of, unequal, value_differences
from fsshard.parity.findings import QUANTITIES, Cell, Difference, Divergence, StepReport, first_divergence
from fsshard.parity.observing import BatchFacts
from fsshard.parity.recorded import RankTrace, StepTrace, Trace
from fsshard.parity.sketch import PROJECTIONS, Sketch, apart, distance, least_distance
from fsshard.parity.trace_tensors import Tensors
from fsshard.parity.training import INITIAL
from fsshard.parity.watch import first_difference

__all__ = ["compare_traces", "first_output", "first_unequal", "needs_bounds"]

ROUNDED = ("initial weight", "batch", "loss", "gradient", "norm", "weight", "state", "buffer")
"""Quantities that another kernel may give other last digits; of the rest nothing but equality is right."""
Draws = Sequence[Sequence[RankTrace]]


def compare_traces(
    before: Trace, now: Trace, *, batches: list[BatchFacts] | None = None, draws: Draws = ()
) -> list[StepReport]:
    """What differs in each step of ``now``, which may have fewer steps.

    Args:
        before: the recorded training.
        now: another.
        batches: where ranks train on other batches than the recorded ones, what is known of those that these were made
            of. Then only what all ranks share is compared.
        draws: one training as it is, then some with other rounding, each as its ranks saw it. How far these are from
            the first one measures the bounds. (It need not be ``now``, whose engine may be wrong.)
    """
    pair = _Pair(before, now, batches, draws)
    return [pair.step(number) for number in range(now.steps)]


def needs_bounds(steps: Sequence[StepReport]) -> bool:
    """Whether something that kernels round differs before anything differs that they do not round."""
    for step in steps:
        for quantity in QUANTITIES:
            if any(d.verdict != "exact" for d in step.differences.get(quantity, {}).values()):
                return quantity in ROUNDED
    return False


def first_unequal(steps: Sequence[StepReport], parameters: list[str]) -> Divergence | None:
    """The first difference at all, within its bound or not."""
    found = [first_divergence(Cell(backend="", world_size=0, verdict=v, steps=[*steps]), parameters) for v in _UNEQUAL]
    return min((one for one in found if one), key=lambda one: (one.step, QUANTITIES.index(one.quantity)), default=None)


_UNEQUAL = ("different", "bound")


def first_output(before: Trace, now: Trace) -> str:
    """The first module whose output differs, of traces on the same batches; "" if none does, or none is recorded."""
    for number in range(now.steps):
        for rank, (one, other) in enumerate(zip(before.ranks, now.ranks, strict=True)):
            sides = [[[*item] for item in trace.steps[number].outputs] for trace in (one, other)]
            if all(sides) and (said := first_difference(sides[0], sides[1])):
                return f"forward of step {number}, rank {rank}: {said}"
    return ""


class _Pair:
    def __init__(self, before: Trace, now: Trace, batches: list[BatchFacts] | None, draws: Draws) -> None:
        self._before, self._now, self._batches, self._draws = before, now, batches, draws
        self._tensors = Tensors(before), Tensors(now)
        # Where the ranks' batches are others, only what all ranks share can be compared: rank 0 speaks for it.
        self._ranks = range(len(now.ranks) if batches is None else 1)

    def step(self, number: int) -> StepReport:
        before, now = self._steps(self._before, number), self._steps(self._now, number)
        report = StepReport(
            loss=_mean([step.loss for step in now]),
            reference_loss=_mean([step.loss for step in before]),
            norm=now[0].norm,
            reference_norm=before[0].norm,
        )
        found: dict[str, Iterator[tuple[str, Difference]]] = {
            "initial weight": self._initial() if number == 0 else iter(()),
            "batch": self._batch(number, before, now),
            "loss": self._loss(number, report, before, now),
            "gradient": self._sketched(number, "gradient", before, now),
            "norm": self._norm(number, before[0], now[0]),
            "param_groups": self._groups(before[0], now[0]),
            "weight": self._sketched(number, "weight", before, now),
            "state": self._state(number, before, now),
            "buffer": self._sketched(number, "buffer", before, now) if self._batches is None else iter(()),
            "random state": self._random(before, now),
        }
        report.differences = {quantity: named for quantity, one in found.items() if (named := _worst_of(one))}
        return report

    def _steps(self, trace: Trace, number: int) -> list[StepTrace]:
        return [rank.steps[number] for rank in trace.ranks]

    def _drawn(self, number: int, rank: int) -> list[StepTrace]:
        return [draw[rank].steps[number] for draw in self._draws]

    def _initial(self) -> Iterator[tuple[str, Difference]]:
        for rank in self._ranks:
            sides = self._before.ranks[rank].initial, self._now.ranks[rank].initial
            yield from self._named(INITIAL, "weight", rank, *sides, drawn=[])

    def _batch(self, number: int, before: list[StepTrace], now: list[StepTrace]) -> Iterator[tuple[str, Difference]]:
        one, other = _all_batches(before), _all_batches(now)
        if self._batches is not None:
            digests, samples = self._batches[number]
            other = {
                (m, r): (text, _of_batch(samples, m, r)) for m, row in enumerate(digests) for r, text in enumerate(row)
            }
        for (micro, rank), (expected, samples) in one.items():
            got, others = other.get((micro, rank), ("", {}))
            yield "", Difference(rank=rank) if expected == got else _other_batch(rank, samples, others)

    def _loss(
        self, number: int, report: StepReport, before: list[StepTrace], now: list[StepTrace]
    ) -> Iterator[tuple[str, Difference]]:
        if self._batches is not None:
            drawn = [_mean([rank.steps[number].loss for rank in draw]) for draw in self._draws]
            yield "", _number(report.reference_loss, report.loss, drawn)
            return
        for rank, (one, other) in enumerate(zip(before, now, strict=True)):
            yield "", _number(one.loss, other.loss, [step.loss for step in self._drawn(number, rank)], rank)

    def _norm(self, number: int, before: StepTrace, now: StepTrace) -> Iterator[tuple[str, Difference]]:
        drawn = self._drawn(number, 0)
        yield "", _number(before.norm, now.norm, [step.norm for step in drawn])
        if before.clipped_norm is not None and now.clipped_norm is not None:
            clipped = [step.clipped_norm for step in drawn if step.clipped_norm is not None]
            yield "clipping", _number(before.clipped_norm, now.clipped_norm, clipped)

    def _groups(self, before: StepTrace, now: StepTrace) -> Iterator[tuple[str, Difference]]:
        if now.groups:
            yield from value_differences(_flat(before.groups), _flat(now.groups), 0)

    def _state(self, number: int, before: list[StepTrace], now: list[StepTrace]) -> Iterator[tuple[str, Difference]]:
        yield from self._sketched(number, "state", before, now)
        for rank in self._ranks:
            yield from value_differences(before[rank].plain, now[rank].plain, rank)

    def _random(self, before: list[StepTrace], now: list[StepTrace]) -> Iterator[tuple[str, Difference]]:
        for rank in self._ranks if self._batches is None else ():
            same = before[rank].random == now[rank].random
            yield "", Difference(rank=rank) if same else unequal(rank, "other random numbers were drawn")

    def _sketched(
        self, number: int, quantity: str, before: list[StepTrace], now: list[StepTrace]
    ) -> Iterator[tuple[str, Difference]]:
        for rank in self._ranks:
            sides = before[rank].sketches.get(quantity), now[rank].sketches.get(quantity)
            if sides[0] is not None and sides[1]:  # an engine of the user's own may show nothing
                drawn = [step.sketches[quantity] for step in self._drawn(number, rank)]
                yield from self._named(number, quantity, rank, sides[0], sides[1], drawn)

    def _named(
        self,
        number: int,
        quantity: str,
        rank: int,
        before: Mapping[str, Sketch],
        now: Mapping[str, Sketch],
        drawn: Sequence[Mapping[str, Sketch]],
    ) -> Iterator[tuple[str, Difference]]:
        for name in [*before, *(name for name in now if name not in before)]:
            if name not in before or name not in now:
                yield name, unequal(rank, "missing here" if name in before else "missing in the record")
                continue
            found = _sketch_difference(before[name], now[name], [one[name] for one in drawn if name in one], rank)
            yield name, found if found.verdict == "exact" else self._placed(found, number, quantity, name)

    def _placed(self, found: Difference, number: int, quantity: str, name: str) -> Difference:
        """With the element that differs most, where both sides' tensors are kept."""
        one, other = (tensors.get(number, quantity, found.rank, name) for tensors in self._tensors)
        if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
            return found
        exact = difference(one, other)
        if exact.verdict == "exact":  # NaN of another kind, or zeros of another sign
            return found
        rank = found.rank or self._owner(name.partition(": ")[0], one, exact.index)
        return replace(exact, verdict=found.verdict, bound=found.bound, apart=found.apart, rank=rank)

    def _owner(self, name: str, tensor: torch.Tensor, index: tuple[int, ...]) -> int:
        """The rank that updates an element, of those that say so."""
        flat = place_of(tensor, index)
        owners = [rank for rank, one in enumerate(self._now.ranks) if _within(flat, one.owned.get(name))]
        return owners[0] if owners else 0


def _all_batches(steps: Sequence[StepTrace]) -> dict[tuple[int, int], tuple[str, dict[str, Sketch]]]:
    """(accumulated batch, rank) -> digest, and sketches of its tensors; one process may have trained on all."""
    found = {}
    for process, step in enumerate(steps):
        for micro, digests in enumerate(step.batches):
            for place, text in enumerate(digests):
                samples = _of_batch(step.sketches.get("batch", {}), micro, place)
                found[micro, place if len(steps) == 1 else process] = text, samples
    return found


def _of_batch(samples: Mapping[str, Sketch], micro: int, rank: int) -> dict[str, Sketch]:
    start = f"{micro}.{rank}."
    return {name.removeprefix(start): one for name, one in samples.items() if name.startswith(start)}


def _other_batch(rank: int, before: Mapping[str, Sketch], now: Mapping[str, Sketch]) -> Difference:
    """Random numbers have other last digits under other kernels; anything more is another batch."""
    found = [_sketch_difference(one, now[name], [], rank) for name, one in before.items() if name in now]
    alike = found and before.keys() == now.keys() and all(d.verdict != "different" for d in found)
    apart = [d for d in found if d.verdict == "bound"]
    if alike and apart:
        return replace(max(apart, key=lambda d: d.max_abs), note="the batch has other last digits")
    return unequal(rank, "the batch holds other samples")


def _within(place: int, span: tuple[int, int] | None) -> bool:
    return span is not None and span[0] <= place < span[1]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _number(expected: float, got: float, drawn: Sequence[float], rank: int = 0) -> Difference:
    spread = max((abs(value - drawn[0]) for value in drawn[1:]), default=0.0)
    bound = measured_bound(spread, abs(got), 1, max(0, len(drawn) - 1), torch.float32)
    return number_difference(expected, got, bound if math.isfinite(bound) else 0.0, rank=rank)


def _sketch_difference(expected: Sketch, got: Sketch, drawn: Sequence[Sketch], rank: int) -> Difference:
    """By digest, then by projections: their difference is a sum of rounding errors, as an element's is."""
    if expected.digest == got.digest:
        return Difference(rank=rank)
    if (expected.dtype, expected.shape) != (got.dtype, got.shape):
        kinds = [f"{one.dtype}{list(one.shape)}" for one in (got, expected)]
        return replace(unequal(rank, f"{kinds[0]} where the record has {kinds[1]}"), max_abs=math.inf, ulps=math.inf)
    worst, root = max(apart(expected, got)), math.sqrt(max(1, got.elements))
    allowed = _allowed(got, drawn)
    far, least = distance(expected, got), least_distance(expected, got)
    return Difference(
        verdict="bound" if worst <= allowed else "different",
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


def _flat(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {f"group {number}: {key}": value for number, group in enumerate(groups) for key, value in group.items()}


def _worst_of(found: Iterator[tuple[str, Difference]]) -> dict[str, Difference]:
    """Of several ranks' differences the most telling one; the lowest rank's among equals."""
    worst: dict[str, Difference] = {}
    for name, one in found:
        if name not in worst or _SEVERITY[one.verdict] > _SEVERITY[worst[name].verdict]:
            worst[name] = one
    return worst


_SEVERITY = {"exact": 0, "bound": 1, "different": 2}
