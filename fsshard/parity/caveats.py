"""Reasons why agreement proves little, found in the reference's run: equal batches, NaN losses, constant weights.

Engines that all do nothing agree. A recipe whose loss is NaN or infinite, whose ranks all see the same samples, or
whose weights stay where they are, lets faults pass that it was meant to find; that is said beside the verdict.
"""

from __future__ import annotations

import math

import torch

from fsshard.parity.trace import TraceReader
from fsshard.parity.training import INITIAL, Job

__all__ = ["caveats"]


def caveats(job: Job) -> list[str]:
    """Why agreement with this reference proves little, one sentence each; empty if there is no such reason.

    Args:
        job: the reference's, whose trace is written.
    """
    reader = TraceReader(job.folder, 0)
    found = (_no_number(reader, job), _same_batches(reader, job), _untrained(reader, job))
    return [text for text in found if text]


def _no_number(reader: TraceReader, job: Job) -> str:
    ranks = 1 if job.reference_joined else job.world_size
    for step in range(job.steps):
        for rank in range(ranks):
            loss = float(reader.facts(step, rank)["loss"])
            if not math.isfinite(loss):
                return (
                    f"the loss is {loss} at step {step} on rank {rank} under the reference: from there on everything "
                    "is NaN or infinite under every engine, so agreement proves nothing"
                )
    return ""


def _same_batches(reader: TraceReader, job: Job) -> str:
    if job.world_size == 1 or any(
        len(set(ranks)) > 1 for step in range(job.steps) for ranks in _digests(reader, job, step)
    ):
        return ""
    return (
        "all ranks get the same batches, so an engine that reduces no gradient would agree, too; make recipe.batches "
        "depend on the rank"
    )


def _digests(reader: TraceReader, job: Job, step: int) -> list[list[str]]:
    """Per accumulated batch, the digests of the ranks' batches."""
    if job.reference_joined:
        joined: list[list[str]] = reader.facts(step)["batches"]
        return joined
    ranks = [[own for (own,) in reader.facts(step, rank)["batches"]] for rank in range(job.world_size)]
    return [list(column) for column in zip(*ranks, strict=True)]


def _untrained(reader: TraceReader, job: Job) -> str:
    before, after = reader.open(INITIAL, "weight"), reader.open(job.steps - 1, "weight")
    if any(not torch.equal(value, after[name]) for name, value in before.items() if name in after):
        return ""
    steps = f"{job.steps} step{'s' * (job.steps > 1)}"
    return f"no weight changed in {steps} (a learning rate of zero?), so the optimizers were not tested"
