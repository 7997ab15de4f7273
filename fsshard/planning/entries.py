"""A model's distinct parameters, each once, as an engine and its user know them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fsshard.complex_params.pairs import Kind
from fsshard.complex_params.slots import ParameterSlot, parameter_slots

__all__ = ["Entry", "collect_entries"]


@dataclass(eq=False)
class Entry:
    """One distinct parameter under an engine.

    Attributes:
        name: the user's name, the first one where tied.
        kind: how storage and user's view relate.
        stored_shape: shape of the whole stored (real) tensor.
        slots: every place that holds it.
        parameter: the engine's parameter between steps: whole, a DTensor, or a flat shard.
    """

    name: str
    kind: Kind
    stored_shape: torch.Size
    slots: list[ParameterSlot]
    parameter: nn.Parameter

    @property
    def shape(self) -> torch.Size:
        """The shape that the user sees."""
        return self.kind.user_shape(self.stored_shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the user sees."""
        return self.kind.user_dtype(self.parameter.dtype)


def collect_entries(module: nn.Module) -> dict[str, Entry]:
    """The distinct parameters of ``module`` by first name, in the model's order."""
    found: dict[int, Entry] = {}
    for slot in parameter_slots(module):
        stored = slot.parameter
        if id(stored) in found:
            found[id(stored)].slots.append(slot)
        else:
            found[id(stored)] = Entry(slot.name, slot.kind, stored.shape, [slot], stored)
    return {entry.name: entry for entry in found.values()}
