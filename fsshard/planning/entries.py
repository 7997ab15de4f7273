"""A model's distinct parameters, each once, as an engine and its user know them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.complex_params.layouts import Layout
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
        layouts: what it is along other mesh dimensions than data. "Whole" without more means whole over data.
    """

    name: str
    kind: Kind
    stored_shape: torch.Size
    slots: list[ParameterSlot]
    parameter: nn.Parameter
    layouts: tuple[Layout, ...] = ()

    @property
    def shape(self) -> torch.Size:
        """The shape that the user sees of what is whole over data."""
        return self.kind.user_shape(self.stored_shape)

    @property
    def full_shape(self) -> torch.Size:
        """The shape of what is whole over all mesh dimensions."""
        shape = self.shape
        for layout in self.layouts:
            shape = layout.whole_shape(shape)
        return shape

    @property
    def divided_over(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups of other mesh dimensions whose ranks have different elements of it."""
        return tuple(group for layout in self.layouts for group in layout.divides)

    def put_together(self, part: Tensor) -> Tensor:
        """What is whole over all mesh dimensions, of what is over data; both the user's. Collective."""
        for layout in self.layouts:
            part = layout.whole(part)
        return part

    def take_part(self, whole: Tensor) -> Tensor:
        """The inverse of :meth:`put_together`. No communication."""
        for layout in reversed(self.layouts):
            whole = layout.part(whole)
        return whole

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the user sees."""
        return self.kind.user_dtype(self.parameter.dtype)


def collect_entries(module: nn.Module, layouts: Mapping[str, tuple[Layout, ...]] | None = None) -> dict[str, Entry]:
    """The distinct parameters of ``module`` by first name, in the model's order.

    Args:
        module: the model.
        layouts: first name -> what was said of the parameter along other mesh dimensions than data.
    """
    found: dict[int, Entry] = {}
    for slot in parameter_slots(module):
        stored = slot.parameter
        if id(stored) in found:
            found[id(stored)].slots.append(slot)
        else:
            own = () if slot.kind.layout is None else (slot.kind.layout,)
            named = (layouts or {}).get(slot.name, ())
            found[id(stored)] = Entry(slot.name, slot.kind, stored.shape, [slot], stored, (*own, *named))
    return {entry.name: entry for entry in found.values()}
