"""Keeps what the stages of a training give, for another training to be compared with. Runs on the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.launching.pool_worker import tell
from fsshard.parity.bounds import reduction_roundings
from fsshard.parity.environment import environment
from fsshard.parity.perturbed import perturbed
from fsshard.parity.recorded import RankTrace, StepTrace
from fsshard.parity.rounding import Rounding, batch_facts, measure
from fsshard.parity.sketch import Sketch, sketch
from fsshard.parity.trace import TraceWriter
from fsshard.parity.training import INITIAL, Job, Stage, Training

__all__ = ["Observed", "Recorder", "observe", "observe_perturbed", "record_reference"]


class Recorder:
    """Keeps the numbers of a training's steps, sketches of its tensors, and with a writer the tensors themselves.

    Args:
        writer: where tensors go; None keeps none.
        sketched: keep sketches.

    Attributes:
        parameters: their names, once the first step is recorded.
        initial: sketches of the weights before it.
    """

    def __init__(self, writer: TraceWriter | None, sketched: bool) -> None:
        self._writer, self._sketched = writer, sketched
        self.parameters: list[str] = []
        self.initial: dict[str, Sketch] = {}

    def step(self, number: int, stages: Iterable[Stage]) -> StepTrace:
        """Return what one step gave. Collective."""
        step = StepTrace(batches=[], loss=0.0, norm=0.0)
        for quantity, value in stages:
            if quantity == "batch":
                step.batches, samples = batch_facts(value, sketched=self._sketched)
                step.sketches |= {"batch": samples} if self._sketched else {}
            elif quantity == "loss":
                step.loss, step.outputs = value
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
        """Keep tensors; all of them are taken also where nothing is kept, since taking them may be collective."""
        if self._writer is not None:
            items = list(items)
            self._writer.tensors(step, quantity, items)
        sketches = {name: sketch(value) if self._sketched else None for name, value in items}
        return list(sketches), {name: one for name, one in sketches.items() if one is not None}


def record_reference(job: Job) -> list[str]:
    """Train and write the trace that other runs are compared with; returns the parameters' names. On every rank."""
    run, writer = Training(job), TraceWriter(job.folder)
    recorder = Recorder(writer, sketched=False)
    for number in range(job.steps):
        rounding = _rounding(run, number)
        writer.tensors(number, "magnitude", rounding.magnitudes.items())
        step = recorder.step(number, run.stages(number))
        bounds = {"loss": rounding.loss, "gradients": rounding.gradients, "reductions": rounding.reductions}
        writer.facts(number, {**vars(step), "bounds": bounds})
        tell((number + 1) / job.steps)
    return recorder.parameters


def _rounding(run: Training, step: int) -> Rounding:
    """Bounds of this step as far as this run can give them."""
    if run.joins or run.job.reference_joined:
        return measure(run.shadow(), run.recipe, lambda: run.batches(step), step)
    if not reduction_roundings(run.job.world_size, run.recipe.accumulate):
        return Rounding()  # no engine can add in another order
    magnitudes, counts = run.magnitudes(step)
    needed = [name for name in magnitudes if reduction_roundings(run.job.world_size, counts[name])]
    return Rounding(magnitudes={name: magnitudes[name] for name in needed}, reductions=counts)


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
        detail: one of :data:`fsshard.parity.recorded.DETAILS`.
        draw: if not 0, every operation is rounded otherwise, by generators that this number seeds.
    """
    run, trace = Training(job), RankTrace()
    recorder = Recorder(TraceWriter(job.folder) if detail == "tensors" else None, sketched=detail != "losses")
    generator = torch.Generator().manual_seed(1000 * draw + dist.get_rank())
    for number in range(job.steps):
        stages = run.stages(number, perturbed(generator) if draw else None)
        trace.steps.append(recorder.step(number, stages))
        if detail == "losses":
            trace.steps[-1].outputs = []
        if not draw:
            tell((number + 1) / job.steps)
    trace.initial = recorder.initial
    if detail == "tensors":
        trace.owned = {name: run.engine.owned(name) for name in recorder.parameters}
    return Observed(trace=trace, parameters=recorder.parameters, environment=environment(job.device))


def observe_perturbed(job: Job, draws: int) -> list[RankTrace]:
    """The training as it is, and ``draws`` times with every operation rounded otherwise. On every rank."""
    traces = []
    for number in range(draws + 1):
        traces.append(observe(job, "digests", number).trace)
        tell((number + 1) / (draws + 1))
    return traces
