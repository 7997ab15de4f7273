"""Records the reference's run for others to be compared with."""

from __future__ import annotations

from typing import Any

from fsshard.launching.pool_worker import tell
from fsshard.parity.bounds import reduction_roundings
from fsshard.parity.rounding import Rounding, measure
from fsshard.parity.seeding import random_state
from fsshard.parity.trace import TraceWriter, digest
from fsshard.parity.training import INITIAL, Job, Training, gradients_of, groups_of, norm_of, states_of

__all__ = ["record"]


def record(job: Job) -> list[str]:
    """Train and write the trace; returns the names of the parameters. On every rank."""
    run, writer = Training(job), TraceWriter(job.folder)
    names = writer.tensors(INITIAL, "weight", run.engine.weights())
    for step in range(job.steps):
        _record_step(run, writer, step)
        tell((step + 1) / job.steps)
    return names


def _record_step(run: Training, writer: TraceWriter, step: int) -> None:
    rounding = _rounding(run, step)
    batches = run.batches(step)
    facts: dict[str, Any] = {"batches": [[digest(b) for b in parts] for parts in batches]}
    facts["bounds"] = {"loss": rounding.loss, "gradients": rounding.gradients, "reductions": rounding.reductions}
    run.watch.take()
    facts["loss"] = run.losses(batches)
    facts["outputs"] = run.watch.take()
    gradients = gradients_of(run.engine)
    writer.tensors(step, "gradient", ((n, g) for n, g in gradients.items() if g is not None))
    writer.tensors(step, "magnitude", rounding.magnitudes.items())
    facts["norm"], facts["clipped norm"] = norm_of(gradients), run.clip()
    facts["groups"] = groups_of(run.engine)
    run.finish()
    writer.tensors(step, "weight", run.engine.weights())
    tensors, facts["state"] = states_of(run.engine)
    writer.tensors(step, "state", tensors)
    writer.tensors(step, "buffer", run.engine.buffers())
    facts["random"] = random_state()
    writer.facts(step, facts)


def _rounding(run: Training, step: int) -> Rounding:
    """Bounds of this step as far as this run can give them."""
    if run.joins or run.job.reference_joined:
        return measure(run.shadow(), run.recipe, lambda: run.batches(step), step)
    if not reduction_roundings(run.job.world_size, run.recipe.accumulate):
        return Rounding()  # no engine can add in another order
    magnitudes, counts = run.magnitudes(step)
    needed = [name for name in magnitudes if reduction_roundings(run.job.world_size, counts[name])]
    return Rounding(magnitudes={name: magnitudes[name] for name in needed}, reductions=counts)
