"""Puts together what the ranks of a run have found."""

from __future__ import annotations

from fsshard.errors import RecipeError
from fsshard.parity.engine import engine_name
from fsshard.parity.findings import (
    QUANTITIES,
    Cell,
    Difference,
    RankReport,
    RankStep,
    StepReport,
    first_divergence,
    worst_verdict,
)
from fsshard.parity.training import Job

__all__ = ["check_deterministic", "merged"]

OF_PARAMETERS = ("initial weight", "gradient", "weight", "state")
"""Those of the quantities that have a parameter's name."""


def check_deterministic(cell: Cell, parameters: list[str]) -> None:
    """Raise unless the reference's second run gave what the first one did.

    Raises:
        RecipeError: it did not; where they part.
    """
    if cell.verdict != "exact":
        first = first_divergence(cell, parameters)
        parameter = first_divergence(cell, parameters, OF_PARAMETERS)
        also = f"; of all parameters first at {parameter}" if parameter not in (None, first) else ""
        raise RecipeError(
            f"the recipe is not deterministic: two runs under {cell.backend!r} at world size {cell.world_size} "
            f"differ, first at {first}{also}. Nothing was compared. Seed whatever is drawn outside of "
            "torch's, numpy's and random's global generators, and avoid operations without a deterministic form"
        )


def merged(job: Job, reports: list[RankReport], parameters: list[str]) -> Cell:
    """One run's cell, of its ranks' reports."""
    cell = Cell(backend=engine_name(job.engine), world_size=job.world_size)
    cell.steps = [_merged_step(reports, number) for number in range(job.steps)]
    cell.verdict = worst_verdict(cell.steps)
    if cell.verdict != "exact":
        cell.first_divergence = first_divergence(cell, parameters)
    return cell


def _merged_step(reports: list[RankReport], number: int) -> StepReport:
    steps = [report.steps[number] for report in reports]
    merged = StepReport(
        loss=sum(step.loss for step in steps) / len(steps),
        reference_loss=sum(step.reference_loss for step in steps) / len(steps),
        norm=steps[0].norm,
        reference_norm=steps[0].reference_norm,
    )
    for quantity in QUANTITIES:
        names = dict.fromkeys(name for step in steps for name in step.differences.get(quantity, {}))
        if names:
            merged.differences[quantity] = {name: _worst_rank(steps, quantity, name) for name in names}
    return merged


def _worst_rank(steps: list[RankStep], quantity: str, name: str) -> Difference:
    """The ranks' difference that says most; of equal ones that of the rank which owns the place."""
    severity = {"different": 2, "bound": 1, "exact": 0}
    found = [
        (severity[d.verdict], (quantity, name) in step.owner, -rank, d)
        for rank, step in enumerate(steps)
        if (d := step.differences.get(quantity, {}).get(name)) is not None
    ]
    return max(found, key=lambda item: item[:3])[3]
