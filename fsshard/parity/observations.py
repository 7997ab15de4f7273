"""What a training gave in every step, rank by rank, and in which environment: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsshard.parity.sketch import Sketch

__all__ = ["DETAILS", "Observations", "RankTrace", "StepTrace"]

DETAILS = ("losses", "digests", "tensors")
"""How much a trace holds, each with what is before it."""


@dataclass(kw_only=True)
class StepTrace:
    """One step as one rank saw it.

    Attributes:
        batches: digests, per accumulated batch of every rank that this process trained on.
        loss: of this rank, summed over accumulated batches.
        norm: of the gradients before clipping, in float64.
        clipped_norm: what the engine's clipping returned; None where the recipe does not clip.
        groups: the optimizer's groups: names, learning rates and so on.
        random: digest of the random generators' state after the step.
        outputs: (module, digest of its output) in the order of execution.
        sketches: quantity -> name -> sketch.
        plain: state of the optimizer that is no tensor, by "parameter: key".
    """

    batches: list[list[str]]
    loss: float
    norm: float
    clipped_norm: float | None = None
    groups: list[dict[str, Any]] = field(default_factory=list)
    random: str = ""
    outputs: list[tuple[str, str]] = field(default_factory=list)
    sketches: dict[str, dict[str, Sketch]] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class RankTrace:
    """All steps of one rank.

    Attributes:
        initial: sketches of the weights before the first step.
        steps: in order.
        owned: parameter -> [start, stop) of the real numbers that this rank updates; with tensors only.
    """

    initial: dict[str, Sketch] = field(default_factory=dict)
    steps: list[StepTrace] = field(default_factory=list)
    owned: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(kw_only=True)
class Observations:
    """A training on record, without the ways to keep it.

    Attributes:
        recipe: what the recipe says of itself, as texts.
        environment: versions, processor, threads and so on, as texts.
        commit: of the recipe's code, where that is known; with ``+`` where files were changed.
        backend: what trained it.
        world_size: ranks whose batches were trained on.
        device: ``"cpu"`` or ``"cuda"``.
        detail: one of :data:`DETAILS`.
        parameters: names, in the model's order.
        ranks: what each process saw; the backend ``none`` has one for all ranks.
        tensors: the safetensors file of the steps' tensors, where they were asked for.
        file: where it was read from, or saved.
    """

    recipe: dict[str, str]
    environment: dict[str, str]
    commit: str
    backend: str
    world_size: int
    device: str
    detail: str
    parameters: list[str]
    ranks: list[RankTrace]
    tensors: Path | None = None
    file: Path | None = None

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return len(self.ranks[0].steps)

    @property
    def losses(self) -> list[float]:
        """The mean over the ranks of each step's loss."""
        columns = zip(*(rank.steps for rank in self.ranks), strict=True)
        return [sum(step.loss for step in column) / len(self.ranks) for column in columns]
