"""What runs on the ranks where a divided model is compared with one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsshard.launching.pool_worker import tell
from fsshard.parity.bounds import measured_bound
from fsshard.parity.checking import Comparison, RankReport, RankStep
from fsshard.parity.joined import NotComparable, Rounding, check_full_precision, check_samples_stay_apart, largest_apart
from fsshard.parity.perturbed import perturbed
from fsshard.parity.seeding import random_state
from fsshard.parity.shadow import Draw, Shadow
from fsshard.parity.split_causes import causes
from fsshard.parity.split_training import SplitTraining
from fsshard.parity.trace import TraceWriter, digest
from fsshard.parity.training import INITIAL, Job, Training, gradients_of, groups_of, norm_of, states_of

__all__ = ["record_one_process", "rerun_one_process", "rerun_split"]

DRAWS = 32
"""Other roundings of a step that are tried. One process is cheap beside a mesh, and with more draws the bound is nearer
to them: 9 times the largest of 32, of 8 it is 75 times (:func:`fsshard.parity.bounds.spread_factor`)."""


@dataclass
class Rounded:
    """How far rounding may carry a step's loss and gradients, the latter by name and for all of a tensor's elements."""

    loss: float = 0.0
    gradients: dict[str, float] = field(default_factory=dict)


def record_one_process(job: Job) -> list[str]:
    """Train on the joined samples and write the trace; returns the names of the parameters. On one rank."""
    run, writer = Training(job), TraceWriter(job.folder)
    names = writer.tensors(INITIAL, "weight", run.engine.weights())
    for step in range(job.steps):
        _record_step(run, writer, step)
        tell((step + 1) / job.steps)
    return names


def _record_step(run: Training, writer: TraceWriter, step: int) -> None:
    rounded, batches = _rounded(run, step), run.batches(step)
    facts: dict[str, Any] = {"batches": [[digest(b) for b in parts] for parts in batches]}
    facts["bounds"] = {"loss": rounded.loss, "gradients": rounded.gradients}
    facts["loss"], facts["outputs"] = run.losses(batches), []
    gradients = gradients_of(run.engine)
    writer.tensors(step, "gradient", ((n, g) for n, g in gradients.items() if g is not None))
    facts["norm"], facts["clipped norm"], facts["groups"] = norm_of(gradients), run.clip(), groups_of(run.engine)
    run.finish()
    writer.tensors(step, "weight", run.engine.weights())
    tensors, facts["state"] = states_of(run.engine)
    writer.tensors(step, "state", tensors)
    writer.tensors(step, "buffer", run.engine.buffers())
    facts["random"] = random_state()
    writer.facts(step, facts)


def _rounded(run: Training, step: int) -> Rounded:
    """Measured on a copy of the model: the same step with every operation rounded otherwise.

    Raises:
        NotComparable: low precision, random numbers, or samples that do not stay apart: then other ranks train
            something else.
    """
    check_full_precision(run.recipe)
    shadow = run.shadow()
    base = shadow.evaluate(lambda: _joined(run, step))
    if base.drew:
        raise NotComparable(
            "the model draws random numbers (dropout?): ranks that hold parts of it draw others than one process does, "
            "so they cannot be compared"
        )
    spread, loss = dict.fromkeys(base.gradients, 0.0), 0.0
    for number in range(DRAWS):
        with perturbed(torch.Generator().manual_seed(1000 * step + number + 1)):
            draw = shadow.evaluate(lambda: _joined(run, step))
        loss = max(loss, abs(draw.loss - base.loss))
        for name, gradient in base.gradients.items():
            spread[name] = max(spread[name], largest_apart(gradient, draw.gradients[name]))
    if run.joins:
        check_samples_stay_apart(base, _mean_of_parts(run, shadow, step), loss, spread)
    return Rounded(
        measured_bound(loss, abs(base.loss), 1, DRAWS, torch.float32),
        {
            name: measured_bound(spread[name], float(value.abs().max()), _reals(value), DRAWS, value.dtype)
            for name, value in base.gradients.items()
            if value.numel()
        },
    )


def _joined(run: Training, step: int) -> list[Any]:
    return [run.recipe.joined(parts) for parts in run.batches(step)]


def _mean_of_parts(run: Training, shadow: Shadow, step: int) -> Draw:
    """Of loss and gradients (real views in float64) over the samples of each rank of data by itself."""
    world, mean = run.job.world_size, Draw(0.0, {}, False)
    for rank in range(world):
        draw = shadow.evaluate(lambda rank=rank: [parts[rank] for parts in run.batches(step)])  # type: ignore[misc]
        mean.loss += draw.loss / world
        for name, gradient in draw.gradients.items():
            real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
            mean.gradients[name] = mean.gradients.get(name, 0) + real.double() / world
    return mean


def _reals(value: Tensor) -> int:
    return value.numel() * (2 if value.is_complex() else 1)


def rerun_one_process(job: Job) -> RankReport:
    """Train on one process once more and compare with the trace. On one rank."""
    run = Training(job)
    return _steps(run, _SameAgain(run))


def rerun_split(job: Job) -> RankReport:
    """Train on the mesh and compare with the trace, step by step. On every rank."""
    run = SplitTraining(job)
    return _steps(run, _SplitComparison(run))


def _steps(run: Training, comparison: Comparison) -> RankReport:
    report = RankReport(name=run.recipe.name)
    for step in range(run.job.steps):
        report.steps.append(comparison.step(step))
        tell((step + 1) / run.job.steps)
    return report


class _SameAgain(Comparison):
    """The one process held against its own trace."""

    def _gradient_bound(
        self, facts: dict[str, Any], number: int, gradients: dict[str, Tensor | None], rounding: Rounding | None
    ) -> Callable[[str], Tensor | float]:
        return lambda name: 0.0


class _SplitComparison(Comparison):
    """One run on a mesh held against the trace of one process."""

    run: SplitTraining

    def _loss_of_all(self, value: float) -> float:
        return self.run.whole_loss(value)

    def _gradient_bound(
        self, facts: dict[str, Any], number: int, gradients: dict[str, Tensor | None], rounding: Rounding | None
    ) -> Callable[[str], Tensor | float]:
        bounds: dict[str, float] = facts["bounds"]["gradients"]
        return lambda name: bounds.get(name, 0.0)

    def _gradients(
        self,
        result: RankStep,
        facts: dict[str, Any],
        number: int,
        gradients: dict[str, Tensor | None],
        rounding: Rounding | None,
    ) -> None:
        super()._gradients(result, facts, number, gradients, rounding)
        causes(self.run.mesh, result, self.reader.open(number, "gradient"), gradients, facts["bounds"]["gradients"])
