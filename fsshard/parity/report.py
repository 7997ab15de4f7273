"""The result of a comparison: numbers and verdicts, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

__all__ = ["QUANTITIES", "SEVERITY", "Cell", "Difference", "Divergence", "Findings", "RankStep", "StepReport"]

QUANTITIES = (
    "initial weight",
    "batch",
    "loss",
    "gradient",
    "norm",
    "param_groups",
    "weight",
    "state",
    "buffer",
    "random state",
)
"""In the order in which a step computes them, so the first one that differs is nearest to the cause."""
SEVERITY = {"exact": 0, "bound": 1, "different": 2}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The distance of one tensor (or number) from the reference's.

    Attributes:
        verdict: ``"exact"``, ``"bound"`` (within the derived rounding bound) or ``"different"``.
        max_abs: the largest absolute difference; infinite where exactly one of the two is NaN.
        ulps: the largest difference in units of the last place.
        apart: the absolute difference of the worst element, the one that uses most of its bound.
        bound: what rounding alone may make of the worst element; 0.0 where nothing but equality is right.
        rank: the rank that has the worst element, as owner of the part that it lies in.
        index: where the worst element is.
        expected: its value under the reference.
        got: its value here.
        note: what else there is to say, such as a missing tensor.
        estimated: there are digests but no tensors: ``max_abs`` is the root mean square of the difference, estimated;
            ``apart`` and ``bound`` are what its projections differ by, and may differ by, per element.
    """

    verdict: str = "exact"
    max_abs: float = 0.0
    ulps: float = 0.0
    apart: float = 0.0
    bound: float = 0.0
    rank: int = 0
    index: tuple[int, ...] = ()
    expected: str = ""
    got: str = ""
    note: str = ""
    estimated: bool = False


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The place where a run first differed from the reference: step, quantity, parameter, rank."""

    step: int
    quantity: str
    name: str
    rank: int
    difference: Difference

    def __str__(self) -> str:
        d = self.difference
        what = f"{self.quantity} of {self.name}" if self.name else self.quantity
        where = f" at {list(d.index)}" if d.index else ""
        values = f": expected {d.expected}, got {d.got}" if d.expected or d.got else ""
        ulps = "<1" if d.max_abs and d.ulps < 1 else f"{d.ulps:.3g}"
        size = f" (off by {d.apart:.3g}, bound {d.bound:.3g}; at most {d.max_abs:.3g}, {ulps} ulp)"
        if d.estimated:
            size = f" (off by about {d.max_abs:.3g} per element, bound {d.bound:.3g})"
        size = size if d.apart or not d.note else ""
        return f"step {self.step}, {what}, rank {self.rank}{where}{values}{size}{f'; {d.note}' if d.note else ''}"


@dataclass(kw_only=True)
class StepReport:
    """One step of one run.

    Attributes:
        loss: mean over the ranks.
        reference_loss: the reference's.
        norm: of the gradients, before clipping.
        reference_norm: the reference's.
        differences: quantity -> name -> difference, for every parameter, every state tensor and every buffer.
    """

    loss: float
    reference_loss: float
    norm: float
    reference_norm: float
    differences: dict[str, dict[str, Difference]] = field(default_factory=dict)

    def worst(self, quantity: str) -> Difference:
        """Return the most telling difference: one beyond its bound first, then the largest."""
        return _most_telling(self.differences.get(quantity, {}).values())


@dataclass(kw_only=True)
class RankStep(StepReport):
    """The findings of one rank in one step; ``owner`` holds the (quantity, name) whose worst element it owns."""

    owner: set[tuple[str, str]] = field(default_factory=set)


@dataclass(kw_only=True)
class Cell:
    """One backend at one world size, against the reference.

    Attributes:
        backend: its name.
        world_size: number of ranks.
        verdict: ``"exact"``, ``"bound"``, ``"different"``, ``"refused"`` (the backend or the comparison has no meaning
            here, see ``reason``) or ``"failed"`` (a rank raised, died or did not answer, see ``reason``).
        steps: what each step gave.
        first_divergence: the first difference beyond its bound, or, where all are within, the first at all.
        reason: why it was refused or failed, or a hint at the cause of a difference.
        traceback: of the rank that failed first.
        reproducible: False if a second run of the same backend differed; None if it was not checked.
        seconds: wall time.
        mesh: the mesh that the model was divided over, such as ``"data=2,tp=2"``; "" without one.
    """

    backend: str
    world_size: int
    verdict: str = "exact"
    steps: list[StepReport] = field(default_factory=list)
    first_divergence: Divergence | None = None
    reason: str = ""
    traceback: str = ""
    reproducible: bool | None = None
    seconds: float = 0.0
    mesh: str = ""

    @property
    def ok(self) -> bool:
        """Return whether it differs from the reference by rounding at most."""
        return self.verdict in ("exact", "bound")

    def worst(self, quantity: str) -> Difference:
        """Return the most telling difference of a quantity over all steps."""
        return _most_telling(step.worst(quantity) for step in self.steps)


@dataclass(kw_only=True)
class Findings:
    """The result of a comparison, without the ways to show it.

    Attributes:
        recipe: its name.
        reference: the backend that all were compared with.
        steps: optimizer steps per run.
        cells: one per world size and backend, in the order asked for.
        warnings: why agreement proves little for this recipe: its loss is NaN or infinite, all ranks get the same
            batches, or no weight changes.
        changes: how the environment differs from that of the recorded training, where one is compared with.
    """

    recipe: str
    reference: str
    steps: int
    cells: list[Cell] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Return whether every backend agrees with the reference at every world size."""
        return bool(self.cells) and all(cell.ok for cell in self.cells)

    def __getitem__(self, key: tuple[str, int | str]) -> Cell:
        """Return ``report["fsdp2", 2]``, or ``report["fsdp2", "data=2,tp=2"]``: by backend and world size or mesh."""
        backend, where = key
        for cell in self.cells:
            if cell.backend == backend and where in (cell.world_size, cell.mesh or None):
                return cell
        raise KeyError(key)

    def __iter__(self) -> Iterator[Cell]:
        return iter(self.cells)


def _most_telling(differences: Iterable[Difference]) -> Difference:
    return max(differences, key=lambda d: (SEVERITY[d.verdict], d.ulps, d.max_abs), default=Difference())


def worst_verdict(steps: Sequence[StepReport]) -> str:
    """Return ``"different"``, ``"bound"`` or ``"exact"``."""
    verdicts = {d.verdict for step in steps for named in step.differences.values() for d in named.values()}
    return next((verdict for verdict in ("different", "bound") if verdict in verdicts), "exact")


def first_divergence(
    steps: Sequence[StepReport], parameters: list[str], verdict: str = "", quantities: Sequence[str] = QUANTITIES
) -> Divergence | None:
    """Return the earliest difference: by step, by stage of the step, by order in the model.

    Args:
        steps: what each step gave.
        parameters: their names, in the model's order.
        verdict: of the difference; "" for any that is not exact.
        quantities: those that are looked at.
    """
    order = {name: index for index, name in enumerate(parameters)}
    for number, step in enumerate(steps):
        for quantity in quantities:
            named = step.differences.get(quantity, {})
            hits = [name for name, d in named.items() if d.verdict != "exact" and verdict in ("", d.verdict)]
            if hits:
                name = min(hits, key=lambda n: order.get(n.partition(": ")[0], len(order)))
                return Divergence(
                    step=number, quantity=quantity, name=name, rank=named[name].rank, difference=named[name]
                )
    return None
