"""Compares a run with the reference's, tensor by tensor and element by element, while it trains. Runs on the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.errors import RecipeError
from fsshard.launching.pool_worker import tell
from fsshard.parity.bounds import reduction_bound, reduction_roundings, underflow
from fsshard.parity.comparing import Found, StepComparison
from fsshard.parity.difference import difference, number_difference, place_of
from fsshard.parity.engine import WrappedEngine, norm_dtype, total_norm
from fsshard.parity.findings import Difference, RankStep
from fsshard.parity.recorded import StepTrace
from fsshard.parity.replay import Replay
from fsshard.parity.rounding import NotComparable, Rounding, measure
from fsshard.parity.split_causes import causes
from fsshard.parity.split_training import SplitTraining
from fsshard.parity.trace import TraceReader, digest
from fsshard.parity.training import INITIAL, Job, Training
from fsshard.parity.watch import first_difference

__all__ = ["rerun"]


def rerun(job: Job) -> list[RankStep]:
    """Train and compare with the reference, step by step. On every rank."""
    comparison = _RunComparison(Training(job) if job.mesh is None else SplitTraining(job))
    steps = []
    for number in range(job.steps):
        steps.append(comparison.step(number))
        tell((number + 1) / job.steps)
    return steps


class _RunComparison(StepComparison):
    """One run held against the reference's trace.

    Every step starts from the reference's weights and state: a run that has come apart within its bounds is put back.
    """

    recorded_in = "the reference"

    def __init__(self, run: Training) -> None:
        job = run.job
        super().__init__(run.rank, regrouped=run.joins or job.reference_joined)
        self.run = run
        self.reader = TraceReader(job.folder, 0 if job.reference_joined else run.rank)
        # The reference's own process once more: nothing can add in another order.
        self.again = job.reference_joined and job.mesh is None and dist.get_world_size() == 1
        self.lost = False  # a difference was beyond its bound: from then on there is no common start to restore
        self.gradients: dict[str, Tensor | None] = {}
        self.clipped: float | None = None
        self.rounding = Rounding()
        self.replay: Replay | None = None

    def step(self, number: int) -> RankStep:
        """Train and compare one step. Collective."""
        run, facts = self.run, self.reader.facts(number)
        self.rounding = Rounding(**facts.pop("bounds"), magnitudes=self.reader.open(number, "magnitude"))
        if run.joins and not run.job.reference_joined:
            self.rounding = measure(run.shadow(), run.recipe, lambda: run.batches(number), number)
        result = self.compare_step(number, StepTrace(**facts), run.stages(number))
        self.lost |= any(self._verdict(quantity) == "different" for quantity in result.differences)
        self._restore()
        self.gradients, self.replay = {}, None  # their memory is needed for the next step
        return result

    def recorded(self, quantity: str) -> Mapping[str, Tensor]:
        initial = quantity == "initial weight"
        return self.reader.open(INITIAL if initial else self.number, "weight" if initial else quantity)

    def owns(self, name: str, got: Tensor, difference: Difference) -> bool:
        start, stop = self.run.engine.owned(name.partition(": ")[0])
        return start <= place_of(got, difference.index) < stop

    def may_be_silent(self, quantity: str) -> bool:
        return not isinstance(self.run.engine, WrappedEngine) and quantity not in ("initial weight", "weight")

    def batch(self, batches: list[list[Any]]) -> Found:
        """Raise if the samples are not the reference's."""
        job, world = self.run.job, range(self.run.job.world_size)
        expected = self.before.batches
        if job.reference_joined and not self.run.joins:
            expected = [[parts[self.run.sample_rank]] for parts in expected]
        elif self.run.joins and not job.reference_joined:
            ranks = [self.reader.facts(self.number, rank)["batches"] for rank in world]
            expected = [[parts[0] for parts in column] for column in zip(*ranks, strict=True)]
        for micro, (mine, theirs) in enumerate(zip(batches, expected, strict=True)):
            for rank, (batch, one) in enumerate(zip(mine, theirs, strict=True)):
                if digest(batch) != one:
                    rank = rank if self.run.joins else self.rank
                    raise RecipeError(
                        f"recipe.batches gave rank {rank} another batch (number {self.number * len(batches) + micro}) "
                        "than in the reference's run: batches must depend on (rank, world_size, number) only, neither "
                        "on the engine nor on random numbers that are not seeded from these three"
                    )
        yield from ()

    def loss(self, value: tuple[float, list[tuple[str, str]]]) -> Found:
        run, result, (loss, outputs) = self.run, self.result, value
        if not self.regrouped:
            result.loss = loss
            found = number_difference(self.before.loss, loss, rank=self.rank)
            if found.verdict != "exact":
                found = replace(found, note=first_difference(self.before.outputs, outputs))
        else:
            result.loss = loss if run.joins else run.loss_of_all(loss)
            if run.joins and not run.job.reference_joined:
                world = range(run.job.world_size)
                result.reference_loss = sum(self.reader.facts(self.number, r)["loss"] for r in world) / len(world)
            found = number_difference(result.reference_loss, result.loss, self.rounding.loss, rank=self.rank)
        yield "", found

    def gradient(self, gradients: Mapping[str, Tensor | None]) -> Found:
        self.gradients = dict(gradients)
        if gradients:
            yield from super().gradient(gradients)
            if isinstance(self.run, SplitTraining):
                causes(self.run.mesh, self.result, self.recorded("gradient"), gradients, self.rounding.gradients)

    def norm(self, value: tuple[float, float | None]) -> Found:
        """The engine's norm is the reference's, or, where gradients differ by rounding, that of its own gradients."""
        self.result.norm, self.clipped = value
        clipped = self.clipped
        if clipped is None or self.before.clipped_norm is None:
            return
        found = number_difference(self.before.clipped_norm, clipped, rank=self.rank)
        wide = norm_dtype(self.gradients) is torch.float64
        near = self._verdict("gradient") == "bound"
        if found.verdict != "exact" and (near or wide) and self.run.recipe.clipping is not None:
            own = total_norm(self.gradients, self.run.recipe.clipping[1])
            # Summed in another order in float64, then rounded: the next float32 at most. A norm that stays float64
            # shows the order of its sum: at most a rounding per summand.
            summands = sum(g.numel() for g in self.gradients.values() if g is not None)
            ulp = (2.0**-53 * summands if wide else 2.0**-23) * abs(own)
            verdict = "bound" if abs(own - clipped) <= ulp else "different"
            found = replace(found, verdict=verdict, bound=abs(own - self.before.clipped_norm) + ulp)
        yield "", found

    def groups(self, groups: Sequence[Mapping[str, Any]]) -> Found:
        yield from super().groups(groups)
        verdicts = [self._verdict(quantity) for quantity in self.result.differences]
        # Weights and state are the reference's, or what the gradients of this run make of it.
        near = "bound" in (self._verdict("gradient"), self._verdict("norm"))
        if near and "different" not in verdicts and not self.lost:
            self.replay = Replay(self.run, self.reader, self.number, self.gradients, self.clipped, self.before.groups)

    def state(self, value: tuple[Iterable[tuple[str, Any]], Mapping[str, Any]]) -> Found:
        yield from super().state(value)
        world_size = self.run.job.world_size
        if not self.gradients and world_size > 2 and self._verdict("weight") == "different":
            raise NotComparable(
                f"engine {self.run.engine.name!r} shows no gradients, and on {world_size} ranks its "
                "weights differ: without gradients it cannot be decided whether that is rounding. Let its gradients() "
                "yield them, or compare on two ranks"
            )

    def tensor(self, quantity: str, name: str, expected: Tensor, got: Tensor) -> Difference:
        found = difference(expected, got, self._bound(name, got) if quantity == "gradient" else 0.0, rank=self.rank)
        if found.verdict == "exact" or self.replay is None or quantity not in ("weight", "state"):
            return found
        replayed = self.replay.weights(name) if quantity == "weight" else self.replay.states(name)
        if replayed is None:
            return found
        again = difference(replayed, got, rank=self.rank)
        if again.verdict == "exact":  # one process makes exactly these bits of this run's gradients
            return replace(found, verdict="bound", bound=found.max_abs)
        note = f"{again.ulps:.3g} ulp from what the optimizer makes of this run's gradients on one process"
        return replace(found, verdict="different", note=note)

    def _bound(self, name: str, gradient: Tensor) -> Tensor | float:
        """Return how far rounding may carry a gradient, as a number or element by element of the real view."""
        if self.regrouped:
            return 0.0 if self.again else float(self.rounding.gradients.get(name, 0.0))
        world_size, magnitudes = self.run.job.world_size, self.rounding.magnitudes
        least = underflow(gradient.dtype, world_size, self.run.recipe.accumulate)
        roundings = reduction_roundings(world_size, self.rounding.reductions.get(name, 1))
        return reduction_bound(magnitudes[name], roundings) + least if roundings and name in magnitudes else least

    # ------------------------------------------------------------------------------------------ a common start

    def _verdict(self, quantity: str) -> str:
        verdicts = {found.verdict for found in self.result.differences.get(quantity, {}).values()}
        return next((verdict for verdict in ("different", "bound") if verdict in verdicts), "exact")

    def _on_any_rank(self, flag: bool) -> bool:
        """Return whether the flag is up on any rank. Collective."""
        value = torch.tensor(float(flag), device=self.run.job.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value)

    def _restore(self) -> None:
        """Back onto the reference, if this step came apart within its bounds on any rank. Collective."""
        apart = any(self._verdict(quantity) != "exact" for quantity in ("weight", "state"))
        if not self._on_any_rank(apart) or self._on_any_rank(self.lost):
            return
        states: dict[str, dict[str, Any]] = {}
        for name, value in [*self.recorded("state").items(), *self.before.plain.items()]:
            parameter, _, key = name.rpartition(": ")
            if isinstance(value, dict):
                raise NotComparable(
                    f"the optimizer's state {key!r} is neither tensor nor number: it cannot be reset to the "
                    "reference's, which a comparison within a rounding bound needs; compare on two ranks"
                )
            states.setdefault(parameter, {})[key] = value
        self.run.engine.restore(self.recorded("weight").items(), states)
