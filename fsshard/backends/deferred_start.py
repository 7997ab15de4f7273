"""Models on the meta device: units become real one at a time, each before it is sharded."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from fsshard.backends.engine_state import EngineState
from fsshard.planning.plan import Unit

__all__ = ["DeferredStart"]


class DeferredStart(EngineState):
    """How units of a model without memory get theirs."""

    _regions: dict[str, list[nn.Module]]  # of each unit; empty for a real model

    def _unit_modules(self) -> dict[str, list[nn.Module]]:
        """The modules of each unit, children before their parents, without those of the units below it."""
        modules = dict(self.module.named_modules())
        units = {modules[name] for name in self.settings.plan.unit_names}
        return {unit.name: _region(modules[unit.name], units) for unit in self.settings.plan.units}

    def make_real(self, unit: Unit) -> None:
        """Give memory and values to a unit of a model on the meta device. Before it is sharded; collective.

        Every backend calls it for the same units in the same order, so that they draw the same random numbers.
        """
        source = self.settings.source
        if source is None:
            return
        entries = [self.entries[name] for name in unit.parameters]
        region = self._regions[unit.name]
        for entry, parameter in zip(entries, source.make_real(region, [e.slots for e in entries]), strict=True):
            entry.parameter = parameter


def _region(unit: nn.Module, others: Collection[nn.Module]) -> list[nn.Module]:
    """The modules below ``unit`` that are in no other unit, and ``unit``: in the order of ``nn.Module.apply``."""
    found: list[nn.Module] = []
    for child in unit.children():
        if child not in others:
            found += _region(child, others)
    return list(dict.fromkeys([*found, unit]))
