"""What an engine costs: bytes of units, memory that trackers cannot see, and what a simulation must set up."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fsshard.backends.cost import UnitCost, replicated
from fsshard.backends.engine_state import EngineState
from fsshard.planning.entries import Entry
from fsshard.planning.plan import Unit

__all__ = ["EngineCosts"]


class EngineCosts(EngineState):
    """Costs of an engine, known without running it."""

    @classmethod
    def simulating(cls) -> contextlib.AbstractContextManager[Any]:
        """The context of ``wrap`` in a simulation: one process, over a fake group, as one rank of any number."""
        return contextlib.nullcontext()

    def simulate(self) -> None:
        """After ``wrap`` in a simulation: use collectives that return at once and send nothing."""

    @property
    def comm_groups(self) -> Mapping[str, tuple[str, ...]]:
        """Unit -> names of the parameters that are sent with it; units that are sent with another are left out."""
        return {unit.name: unit.parameters for unit in self.settings.plan.units}

    @property
    def divided_among(self) -> int:
        """How many ranks share one copy of what the engine divides."""
        return self.settings.world_size

    def unit_cost(self, unit: Unit) -> UnitCost:
        """What ``unit`` costs on this rank, by arithmetic. Local."""
        return replicated(unit.nbytes, self._reduced(unit), self.settings.world_size)

    def _reduced(self, unit: Unit) -> int:
        """Bytes of the gradients of ``unit`` as they are sent."""
        return sum(
            e.stored_shape.numel() * (unit.reduce_dtype or e.parameter.dtype).itemsize for e in self._trained(unit)
        )

    def _trained(self, unit: Unit) -> list[Entry]:
        entries = (self.entries[name] for name in unit.parameters)
        return [entry for entry in entries if entry.parameter.requires_grad]

    def held_by_engine(self) -> dict[str, list[Tensor]]:
        """What the engine keeps besides the entries, for memory reports: kind -> tensors.

        The kinds are ``"parameters"``, ``"gradients"`` and ``"gathered units"``. A tensor whose storage was freed
        may be among them.
        """
        return {}
