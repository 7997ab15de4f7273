"""Models on the meta device: units become real one at a time, each before it is sharded."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from torch import nn

from fsshard.planning.plan import Plan, Unit

if TYPE_CHECKING:
    from fsshard.backends.base import Backend

__all__ = ["make_real", "unit_modules"]


def unit_modules(module: nn.Module, plan: Plan) -> dict[str, list[nn.Module]]:
    """The modules of each unit, children before their parents, without those of the units below it."""
    modules = dict(module.named_modules())
    units = {modules[name] for name in plan.unit_names}
    return {unit.name: _region(modules[unit.name], units) for unit in plan.units}


def make_real(backend: Backend, unit: Unit) -> None:
    """Give memory and values to a unit of a model on the meta device. Before it is sharded; collective.

    Every backend calls it for the same units in the same order, so that they draw the same random numbers.
    """
    source = backend.settings.source
    if source is None:
        return
    entries = [backend.entries[name] for name in unit.parameters]
    made = source.make_real(backend._regions[unit.name], [entry.slots for entry in entries])
    for entry, parameter in zip(entries, made, strict=True):
        entry.parameter = parameter


def _region(unit: nn.Module, others: Collection[nn.Module]) -> list[nn.Module]:
    """The modules below ``unit`` that are in no other unit, and ``unit``: in the order of ``nn.Module.apply``."""
    found: list[nn.Module] = []
    for child in unit.children():
        if child not in others:
            found += _region(child, others)
    return list(dict.fromkeys([*found, unit]))
