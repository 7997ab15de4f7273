"""The result of an estimate."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from fsshard.simulation import pictures, render
from fsshard.simulation.estimated_step import EstimatedStep

__all__ = ["Estimate"]


@dataclass(frozen=True, kw_only=True)
class Estimate(EstimatedStep):
    """The result of :func:`fsshard.estimate`, and ways to show it.

    Its attributes are those of :class:`~fsshard.simulation.estimated_step.EstimatedStep`.
    """

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
