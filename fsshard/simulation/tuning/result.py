"""The result of a search."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsshard.simulation.tuning import pictures, render
from fsshard.simulation.tuning.tried import Tried, TriedPlans

__all__ = ["TuneResult"]


@dataclass(frozen=True, kw_only=True)
class TuneResult(TriedPlans):
    """The result of :func:`fsshard.tune`, and ways to show it.

    Its attributes are those of :class:`~fsshard.simulation.tuning.tried.TriedPlans`.
    """

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """The frontier, the plans that are always tried, and the winner as code."""
        return render.text(self)

    def to_json(self) -> str:
        """Everything as JSON, sizes in bytes."""
        return json.dumps(
            {
                "name": self.name,
                "world_size": self.world_size,
                "memory": self.memory,
                "winner": {**_as_dict(self.winner), "estimate": json.loads(self.winner.estimate.to_json())},
                "code": self.code(),
                "frontier": [_as_dict(one) for one in self.frontier],
                "always tried": {name: _as_dict(one) for name, one in self.aliases.items()},
                "tried": [_as_dict(one) for one in self.tried],
                "failed": dict(self.failed),
            },
            indent=1,
        )

    def plot(self, path: str | Path) -> None:
        """Draw peak against traffic of all plans to a .png, .svg or .pdf.

        Raises:
            ConfigurationError: the suffix names no kind of picture, or no file can be written there.
            MissingExtra: matplotlib is not installed.
        """
        pictures.plot(self, path)


def _as_dict(one: Tried) -> dict[str, Any]:
    return {
        "settings": one.candidate.code(),
        "name": one.name,
        "peak": one.peak,
        "sent": one.estimate.sent,
        "collectives": one.collectives,
        "recomputed": one.recomputed,
        "moment": asdict(one.estimate.moment),
    }
