"""Notices modules and parameters that are added, replaced or removed after wrap, which no engine would train."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from torch import nn

from fsshard.backends.base import Backend
from fsshard.complex_params.flattened import stored_in
from fsshard.complex_params.slots import ParameterSlot, parameter_slots
from fsshard.errors import ModelError
from fsshard.sharded.buffers import ModelBuffers

__all__ = ["ModelWatch"]


class ModelWatch:
    """Compares the modules and parameters of a wrapped model with those that were wrapped.

    The look before each forward compares keys and values of the modules' dicts with those of before, by identity and
    in C: a tenth of a microsecond a module. Only where they differ is the tree walked. ``buffers`` is told of modules
    that have come or gone.
    """

    def __init__(self, owner: nn.Module, backend: Backend, buffers: ModelBuffers) -> None:
        self._owner, self._backend, self._buffers = owner._modules, backend, buffers
        self._wrapped = {(id(slot.owner), slot.stored): (e, slot) for e in backend.all for slot in e.slots}
        self._remember()

    def _remember(self) -> None:
        modules = list(self._backend.module.modules())
        self._others = [slot.parameter for _, slot in self._find_others()]
        self._tree = _Contents([self._owner, *(module._modules for module in modules)])
        self._stored = [stored_in(module) for module in modules]
        self._lengths = [*map(len, self._stored)]
        self._at_rest: _Contents | None = None  # with the engine's own parameters, not what it shows for a while

    def check(self) -> None:
        """Raise if the model is not the one that was wrapped. Local.

        Modules without parameters, parameters without gradient and buffers may come and go.

        Raises:
            ModelError: names what was added, replaced or removed.
        """
        trained = any(parameter.requires_grad for parameter in self._others)
        if not trained and self._tree.are_same() and self._holds_the_same():
            return
        there = {id(module) for module in self._backend.module.modules()}
        changes = {
            "added": [name for name, slot in self._find_others() if slot.parameter.requires_grad],
            "replaced": self._replaced(),
            "removed": [slot.name for _, slot in self._wrapped.values() if id(slot.owner) not in there],
        }
        told = [f"{what}: {', '.join(n[:5])}{', ...' if len(n) > 5 else ''}" for what, n in changes.items() if n]
        if told:
            raise ModelError(
                "parameters were added, replaced or removed after fsshard.wrap, which the engine does not see "
                f"({'; '.join(told)}): it would keep training the old ones only. Change the model first and wrap it "
                "then; to change values, use model.load_state_dict, or write in place"
            )
        self._buffers.look_again()
        self._remember()

    def _holds_the_same(self) -> bool:
        """Return whether the modules hold the engine's parameters, or what it shows in their place, and no others."""
        if self._at_rest is not None and self._at_rest.are_same():
            return True
        if any(map(operator.gt, map(len, self._stored), self._lengths)) or self._replaced():
            return False
        held = (stored_in(slot.owner).get(slot.stored) is e.parameter for e, slot in self._wrapped.values())
        self._at_rest = _Contents(self._stored) if all(held) else None
        return True

    def _find_others(self) -> Iterator[tuple[str, ParameterSlot]]:
        """Yield the parameters in places that were not wrapped, by name."""
        for name, module in self._owner.items():
            prefix = "" if module is self._backend.module else f"{name}."
            for slot in parameter_slots(module) if module is not None else ():
                if (id(slot.owner), slot.stored) not in self._wrapped and isinstance(slot.parameter, nn.Parameter):
                    yield prefix + slot.name, slot

    def _replaced(self) -> list[str]:
        found = ((e, slot, stored_in(slot.owner).get(slot.stored)) for e, slot in self._wrapped.values())
        return [s.name for e, s, held in found if held is not e.parameter and not self._backend.shows(e, held)]


class _Contents:
    """A snapshot of what dicts hold, to be compared with what they hold later."""

    def __init__(self, dicts: Sequence[Any]) -> None:
        self._dicts, self._lengths = dicts, [*map(len, dicts)]
        filled = [held for held in dicts if isinstance(held, dict) and held]  # torch.jit's are none, and do not change
        self._live_keys: list[Any] = [held.keys() for held in filled]
        self._live_values: list[Any] = [held.values() for held in filled]
        self._keys = [*chain.from_iterable(self._live_keys)]
        self._values = [*chain.from_iterable(self._live_values)]

    def are_same(self) -> bool:
        # Lengths: what moved from the end of one to the beginning of the next is in the same order.
        return (
            [*map(len, self._dicts)] == self._lengths
            and [*chain.from_iterable(self._live_keys)] == self._keys
            and all(map(operator.is_, chain.from_iterable(self._live_values), self._values))
        )
