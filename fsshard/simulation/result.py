"""The result of an estimate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from fsshard.planning.bounds import Bounds
from fsshard.simulation import pictures, render
from fsshard.simulation.collectives import Traffic
from fsshard.simulation.tracking import Moment

__all__ = ["Estimate"]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The result of :func:`fsshard.estimate`: memory and traffic of one training step. All sizes in bytes.

    They are those of the rank that needs the most memory.

    Attributes:
        name: of what is trained.
        backend: the backend.
        world_size: ranks of the job.
        mesh: shape of the mesh of ranks that share the work: (ranks,), or (replicas, shards); of all dimensions where
            the model is divided over others.
        device: the device type that it is for.
        rank: the rank that was simulated.
        optimizer: its class, and which implementation of it was assumed.
        parameters: bytes of one whole copy of the parameters.
        units: sharding units.
        peak: the most bytes alive at once.
        interval: (least, most) that the peak can be, where timing decides; else twice the peak.
        by_kind: how the peak divides: parameters, buffers, optimizer state, gradients, gathered units, inputs,
            activations, temporaries.
        highest: per kind the most bytes alive at once, whenever that was.
        phases: the peaks of forward, backward and step.
        moment: when the peak is: phase, module, operator.
        collectives: number and payload per step by kind.
        bounds: what no implementation of the engine can go below; see :mod:`fsshard.planning.bounds`.
        notes: what was assumed.
    """

    name: str
    backend: str
    world_size: int
    mesh: tuple[int, ...]
    device: str
    rank: int
    optimizer: str
    parameters: int
    units: int
    peak: int
    interval: tuple[int, int]
    by_kind: Mapping[str, int]
    highest: Mapping[str, int]
    phases: Mapping[str, int]
    moment: Moment
    collectives: tuple[Traffic, ...]
    bounds: Bounds
    notes: tuple[str, ...] = ()

    @property
    def sent(self) -> int:
        """Bytes that a rank has to send per step, on average over the ranks."""
        return sum(traffic.sent for traffic in self.collectives)

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Everything as text: memory by kind, collectives, bounds and the ratios to them."""
        return render.text(self)

    def to_json(self) -> str:
        """Everything as JSON, sizes in bytes."""
        return json.dumps({**asdict(self), "sent": self.sent}, indent=1)

    def plot(self, path: str | Path) -> None:
        """Draw the peak by kind to a .png, .svg or .pdf.

        Raises:
            ConfigurationError: the suffix names no kind of picture, or no file can be written there.
            MissingExtra: matplotlib is not installed.
        """
        pictures.plot([self], path)
