"""Compares a run with the reference, stage by stage of every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.errors import RecipeError
from fsshard.launching.pool_worker import tell
from fsshard.parity.bounds import reduction_bound, reduction_roundings, underflow
from fsshard.parity.difference import difference, number_difference, place_of, unequal, value_differences
from fsshard.parity.engine import WrappedEngine, norm_dtype, total_norm
from fsshard.parity.findings import Difference, RankReport, RankStep
from fsshard.parity.replay import Replay
from fsshard.parity.rounding import NotComparable, Rounding, measure
from fsshard.parity.seeding import random_state
from fsshard.parity.split_causes import causes
from fsshard.parity.split_training import SplitTraining
from fsshard.parity.trace import TraceReader, digest
from fsshard.parity.training import INITIAL, Job, Training, gradients_of, groups_of, norm_of, states_of
from fsshard.parity.watch import first_difference

__all__ = ["Comparison", "rerun"]


def rerun(job: Job) -> RankReport:
    """Train and compare with the trace, step by step. On every rank."""
    run = Training(job) if job.mesh is None else SplitTraining(job)
    report, comparison = RankReport(name=run.recipe.name), Comparison(run)
    for step in range(job.steps):
        report.steps.append(comparison.step(step))
        tell((step + 1) / job.steps)
    return report


class Comparison:
    """One run held against a trace."""

    def __init__(self, run: Training) -> None:
        self.run = run
        self.reader = TraceReader(run.job.folder, 0 if run.job.reference_joined else run.rank)
        self.joined = run.joins or run.job.reference_joined
        # The reference's own process once more: nothing can add in another order.
        self.again = run.job.reference_joined and run.job.mesh is None and dist.get_world_size() == 1
        self.silent = False  # the engine shows no gradients
        self.lost = False  # a difference was beyond its bound: from then on there is no common start to restore

    def step(self, number: int) -> RankStep:
        run = self.run
        facts = self.reader.facts(number)
        batches = run.batches(number)
        self._check_batches(number, batches)
        result = RankStep(loss=0.0, reference_loss=facts["loss"], reference_norm=facts["norm"])
        if number == 0:
            self._tensors(result, INITIAL, "weight", run.engine.weights(), shown_as="initial weight")
        rounding = None
        if self._measures_here():
            rounding = measure(run.shadow(), run.recipe, lambda: run.batches(number), number)
        run.watch.take()
        result.loss = run.losses(batches)
        self._loss(result, facts, number, rounding)
        gradients = gradients_of(run.engine)
        self._gradients(result, facts, number, gradients, rounding)
        result.norm, clipped = norm_of(gradients), run.clip()
        self._norms(result, facts, gradients, clipped)
        self._groups(result, facts)
        run.finish()
        self._updates(result, facts, number, Replay(run, self.reader, number, gradients, clipped, facts["groups"]))
        self._tensors(result, number, "buffer", run.engine.buffers())
        self._random(result, facts)
        self._restore(result, number)
        return result

    def _measures_here(self) -> bool:
        return self.run.joins and not self.run.job.reference_joined

    def _check_batches(self, number: int, batches: list[list[Any]]) -> None:
        if self.run.job.reference_joined and not self.run.joins:
            expected = [[parts[self.run.sample_rank]] for parts in self.reader.facts(number)["batches"]]
        elif self.joined and not self.run.job.reference_joined:
            ranks = [self.reader.facts(number, rank)["batches"] for rank in range(self.run.job.world_size)]
            expected = [[parts[0] for parts in column] for column in zip(*ranks, strict=True)]
        else:
            expected = self.reader.facts(number)["batches"]
        for micro, (mine, theirs) in enumerate(zip(batches, expected, strict=True)):
            for rank, (batch, one) in enumerate(zip(mine, theirs, strict=True)):
                if digest(batch) != one:
                    rank = rank if self.run.joins else self.run.rank
                    raise RecipeError(
                        f"recipe.batches gave rank {rank} another batch (number {number * len(batches) + micro}) than "
                        "in the reference's run: batches must depend on (rank, world_size, number) only, neither on "
                        "the engine nor on random numbers that are not seeded from these three"
                    )

    def _loss(self, result: RankStep, facts: dict[str, Any], number: int, rounding: Rounding | None) -> None:
        outputs = self.run.watch.take()
        if not self.joined:
            found = number_difference(facts["loss"], result.loss, rank=self.run.rank)
            found = (
                found
                if found.verdict == "exact"
                else replace(found, note=first_difference(facts["outputs"], [list(item) for item in outputs]))
            )
        else:
            world = range(self.run.job.world_size)
            if self.run.joins and not self.run.job.reference_joined:
                expected = sum(self.reader.facts(number, rank)["loss"] for rank in world) / len(world)
            else:
                expected = facts["loss"]
            got = result.loss if self.run.joins else self.run.loss_of_all(result.loss)
            bound = rounding.loss if rounding is not None else facts["bounds"]["loss"]
            found = number_difference(expected, got, bound, rank=self.run.rank)
            result.loss, result.reference_loss = got, expected
        self._put(result, "loss", "", found, mine=True)

    def _gradients(
        self,
        result: RankStep,
        facts: dict[str, Any],
        number: int,
        gradients: dict[str, Tensor | None],
        rounding: Rounding | None,
    ) -> None:
        held = [(name, gradient) for name, gradient in gradients.items() if gradient is not None]
        if gradients:
            bound = self._gradient_bound(facts, number, gradients, rounding)
            self._tensors(result, number, "gradient", held, bound)
            if isinstance(self.run, SplitTraining):
                shelf = self.reader.open(number, "gradient")
                causes(self.run.mesh, result, shelf, gradients, facts["bounds"]["gradients"])
        self.silent = not gradients

    def _gradient_bound(
        self, facts: dict[str, Any], number: int, gradients: dict[str, Tensor | None], rounding: Rounding | None
    ) -> Callable[[str], Tensor | float]:
        """Name -> how far rounding may carry a gradient, as a number or element by element of the real view."""
        bounds = facts["bounds"] if rounding is None else vars(rounding)
        magnitudes = self.reader.open(number, "magnitude") if rounding is None else rounding.magnitudes

        def bound(name: str) -> Tensor | float:
            if self.joined:
                return 0.0 if self.again else float(bounds["gradients"].get(name, 0.0))
            least = underflow(gradients[name].dtype, self.run.job.world_size, self.run.recipe.accumulate)  # type: ignore[union-attr]
            roundings = reduction_roundings(self.run.job.world_size, bounds["reductions"].get(name, 1))
            return reduction_bound(magnitudes[name], roundings) + least if roundings and name in magnitudes else least

        return bound

    def _norms(
        self, result: RankStep, facts: dict[str, Any], gradients: dict[str, Tensor | None], clipped: float | None
    ) -> None:
        """The engine's norm is the reference's, or, where gradients differ by rounding, that of its own gradients."""
        if clipped is None or facts["clipped norm"] is None:
            return
        found = number_difference(facts["clipped norm"], clipped, rank=self.run.rank)
        near = bool(result.differences.get("gradient")) and self._worst(result, "gradient") == "bound"
        wide = norm_dtype(gradients) is torch.float64
        if found.verdict != "exact" and (near or wide) and self.run.recipe.clipping is not None:
            own = total_norm(gradients, self.run.recipe.clipping[1])
            # Summed in another order in float64, then rounded: the next float32 at most. A norm that stays float64
            # shows the order of its sum: at most a rounding per summand.
            summands = sum(g.numel() for g in gradients.values() if g is not None)
            ulp = (2.0**-53 * summands if wide else 2.0**-23) * abs(own)
            verdict = "bound" if abs(own - clipped) <= ulp else "different"
            found = replace(found, verdict=verdict, bound=abs(own - facts["clipped norm"]) + ulp)
        self._put(result, "norm", "", found, mine=True)

    def _groups(self, result: RankStep, facts: dict[str, Any]) -> None:
        """Learning rates and the like: numbers that no engine computes, so nothing but equality is right."""
        mine = groups_of(self.run.engine)
        if not mine and not isinstance(self.run.engine, WrappedEngine):
            return  # an engine of the user's own that does not show them
        if len(mine) != len(facts["groups"]):
            counts = [f"{len(groups)} groups" for groups in (facts["groups"], mine)]
            self._put(result, "param_groups", "", unequal(self.run.rank, "not equal", *counts), mine=True)
        for number, (expected, got) in enumerate(zip(facts["groups"], mine, strict=False)):
            self._compare_values(result, "param_groups", expected, got, f"group {number}: ")

    def _compare_values(
        self, result: RankStep, quantity: str, expected: dict[str, Any], got: dict[str, Any], prefix: str = ""
    ) -> None:
        for key, found in value_differences(expected, got, self.run.rank):
            self._put(result, quantity, f"{prefix}{key}", found, mine=True)

    def _updates(self, result: RankStep, facts: dict[str, Any], number: int, replay: Replay) -> None:
        """Weights and optimizer state: the reference's, or what the gradients of this run make of it."""
        near = "bound" in (self._worst(result, "gradient"), self._worst(result, "norm")) and not self.lost
        self._tensors(result, number, "weight", self.run.engine.weights(), replay=replay.weights if near else None)
        tensors, plain = states_of(self.run.engine)
        self._tensors(result, number, "state", tensors, replay=replay.states if near else None)
        if tensors or plain or not self._may_be_silent("state"):
            self._compare_values(result, "state", facts["state"], plain)
        if self.silent and self.run.job.world_size > 2 and self._worst(result, "weight") == "different":
            raise NotComparable(
                f"engine {self.run.engine.name!r} shows no gradients, and on {self.run.job.world_size} ranks its "
                "weights differ: without gradients it cannot be decided whether that is rounding. Let its gradients() "
                "yield them, or compare on two ranks"
            )

    def _random(self, result: RankStep, facts: dict[str, Any]) -> None:
        if not self.joined:
            same = facts["random"] == random_state()
            note = "" if same else "this run has drawn other random numbers than the reference"
            found = Difference(verdict="exact" if same else "different", rank=self.run.rank, note=note)
            self._put(result, "random state", "", found, mine=True)

    # ------------------------------------------------------------------------------------------ bookkeeping

    def _tensors(
        self,
        result: RankStep,
        number: int,
        quantity: str,
        items: Iterable[tuple[str, Tensor]],
        bound: Any = None,
        replay: Any = None,
        shown_as: str = "",
    ) -> None:
        """Compare tensors by name; every item is taken, since taking them may be collective."""
        shelf, left, shown = self.reader.open(number, quantity), [], shown_as or quantity
        expected = set(shelf)
        given = False
        for name, value in items:
            given = True
            if name not in expected:
                left.append((name, "missing in the reference"))
                continue
            expected.discard(name)
            found = difference(shelf[name], value, 0.0 if bound is None else bound(name), rank=self.run.rank)
            if found.verdict != "exact" and replay is not None:
                found = _replayed(found, replay(name), value)
            self._put(result, shown, name, found, mine=self._owns(name, value, found))
        if result.differences.get(shown) or left or not (self._may_be_silent(quantity) and not given):
            left += [(name, "missing here") for name in sorted(expected)]
        for name, note in left:
            self._put(result, shown, name, unequal(self.run.rank, note), mine=True)

    def _may_be_silent(self, quantity: str) -> bool:
        """An engine of the user's own may show nothing of a quantity."""
        return not isinstance(self.run.engine, WrappedEngine) and quantity != "weight"

    def _owns(self, name: str, value: Tensor, found: Difference) -> bool:
        start, stop = self.run.engine.owned(name.partition(": ")[0])
        return start <= place_of(value, found.index) < stop

    def _put(self, result: RankStep, quantity: str, name: str, found: Difference, *, mine: bool) -> None:
        result.differences.setdefault(quantity, {})[name] = found
        self.lost |= found.verdict == "different"
        if mine:
            result.owner.add((quantity, name))

    def _on_any_rank(self, flag: bool) -> bool:
        """Whether the flag is up on any rank. Collective."""
        value = torch.tensor(float(flag), device=self.run.job.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value)

    def _worst(self, result: RankStep, quantity: str) -> str:
        verdicts = {found.verdict for found in result.differences.get(quantity, {}).values()}
        return next((verdict for verdict in ("different", "bound") if verdict in verdicts), "exact")

    def _restore(self, result: RankStep, number: int) -> None:
        """Back onto the reference, if this step came apart within its bounds on any rank. Collective."""
        apart = any(d.verdict != "exact" for q in ("weight", "state") for d in result.differences.get(q, {}).values())
        if not self._on_any_rank(apart) or self._on_any_rank(self.lost):
            return
        states: dict[str, dict[str, Any]] = {}
        shelf = self.reader.open(number, "state")
        for name, value in [*shelf.items(), *self.reader.facts(number)["state"].items()]:
            parameter, _, key = name.rpartition(": ")
            if isinstance(value, dict):
                raise NotComparable(
                    f"the optimizer's state {key!r} is neither tensor nor number: it cannot be reset to the "
                    "reference's, which a comparison within a rounding bound needs; compare on two ranks"
                )
            states.setdefault(parameter, {})[key] = value
        self.run.engine.restore(self.reader.open(number, "weight").items(), states)


def _replayed(found: Difference, expected: Tensor | None, got: Tensor) -> Difference:
    """Within the bound if this run's own gradients, stepped on one process, give exactly these bits."""
    if expected is None:
        return found
    again = difference(expected, got, rank=found.rank)
    if again.verdict == "exact":
        return replace(found, verdict="bound", bound=found.max_abs)
    return replace(
        found,
        verdict="different",
        note=f"{again.ulps:.3g} ulp from what the optimizer makes of this run's gradients on one process",
    )
