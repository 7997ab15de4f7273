"""Trains on the ranks and keeps what each step gives, for another training to be compared with."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.launching.pool_worker import tell
from fsshard.parity.bounds import batch_facts, measure, reduction_roundings
from fsshard.parity.environment import environment
from fsshard.parity.one_process import perturbed
from fsshard.parity.sketch import Sketch, sketch
from fsshard.parity.trace import INITIAL, RankTrace, Rounding, Step, write_tensors
from fsshard.parity.training import Job, Training

__all__ = ["REFERENCE", "Observed", "observe", "observe_perturbed"]

REFERENCE = "reference"
"""A detail beside :data:`~fsshard.parity.trace.DETAILS`: tensors without sketches, and the bounds of each step."""


@dataclass(kw_only=True)
class Observed:
    """One rank's training, the names of the parameters, and where it ran."""

    trace: RankTrace
    parameters: list[str]
    environment: dict[str, str]


def observe(job: Job, detail: str, draw: int = 0) -> Observed:
    """Train, and note what every step gives. On every rank.

    Args:
        job: its ``folder`` is where tensors go.
        detail: how much is kept: :data:`REFERENCE`, or one of :data:`~fsshard.parity.trace.DETAILS`.
        draw: if not 0, every operation is rounded otherwise, by generators that this number seeds.
    """
    run, trace = Training(job), RankTrace()
    recorder = _Recorder(run, detail)
    generator = torch.Generator().manual_seed(1000 * draw + dist.get_rank())
    for number in range(job.steps):
        if detail == REFERENCE:
            trace.rounding.append(_rounding(run, number))
        trace.steps.append(recorder.step(number, perturbed(generator) if draw else None))
        if not draw:
            tell((number + 1) / job.steps)
    trace.initial = recorder.initial
    if detail == "tensors":
        trace.owned = {name: run.engine.owned(name) for name in recorder.parameters}
    return Observed(trace=trace, parameters=recorder.parameters, environment=environment(job.device))


def observe_perturbed(job: Job, draws: int) -> list[RankTrace]:
    """Train as it is, and ``draws`` times with every operation rounded otherwise. On every rank."""
    traces = []
    for number in range(draws + 1):
        traces.append(observe(job, "digests", number).trace)
        tell((number + 1) / (draws + 1))
    return traces


class _Recorder:
    """Keeps numbers of a training's steps, and sketches of its tensors or these themselves.

    Attributes:
        parameters: their names, once the first step is recorded.
        initial: sketches of the weights before it.
    """

    def __init__(self, run: Training, detail: str) -> None:
        self._run = run
        self._detail, self._sketched = detail, detail in ("digests", "tensors")
        self.parameters: list[str] = []
        self.initial: dict[str, Sketch] = {}

    def step(self, number: int, rounding: AbstractContextManager[None] | None) -> Step:
        """Train one step and return what it gave. Collective."""
        step = Step(batches=[], loss=0.0, norm=0.0)
        for quantity, value in self._run.stages(number, rounding):
            if quantity == "batch":
                step.batches, samples = batch_facts(value, sketched=self._sketched)
                step.sketches |= {"batch": samples} if self._sketched else {}
            elif quantity == "loss":
                step.loss, outputs = value
                step.outputs = [] if self._detail == "losses" else outputs
            elif quantity == "norm":
                step.norm, step.clipped_norm = value
            elif quantity == "param_groups":
                step.groups = value
            elif quantity == "random state":
                step.random = value
            elif quantity == "initial weight":
                self.parameters, self.initial = self._tensors(INITIAL, "weight", value)
            else:
                if quantity == "state":
                    value, step.plain = value
                elif quantity == "gradient":
                    value = [(name, gradient) for name, gradient in value.items() if gradient is not None]
                _, sketches = self._tensors(number, quantity, value)
                step.sketches |= {quantity: sketches} if self._sketched else {}
        return step

    def _tensors(
        self, step: int, quantity: str, items: Iterable[tuple[str, Tensor]]
    ) -> tuple[list[str], dict[str, Sketch]]:
        """Keep tensors as the detail says; return their names, and their sketches."""
        # All of them are taken also where nothing is kept: taking them may be collective.
        if self._detail in (REFERENCE, "tensors"):
            items = list(items)
            write_tensors(self._run.job.folder, step, quantity, items)
        sketches = {name: sketch(value) if self._sketched else None for name, value in items}
        return list(sketches), {name: one for name, one in sketches.items() if one is not None}


def _rounding(run: Training, step: int) -> Rounding:
    """Return the bounds of this step as far as this run can give them. Collective."""
    rounding, magnitudes, world_size = Rounding(), {}, run.job.world_size
    if run.joins or run.job.reference_joined:
        rounding = measure(run.shadow(), run.recipe, lambda: run.batches(step), step)
    elif reduction_roundings(world_size, run.recipe.accumulate):  # else no engine can add in another order
        found, counts = run.magnitudes(step)
        rounding = Rounding(reductions=counts)
        magnitudes = {n: value for n, value in found.items() if reduction_roundings(world_size, counts[n])}
    write_tensors(run.job.folder, step, "magnitude", magnitudes.items())
    return rounding
