"""Modules and parameters that are added, replaced or removed after wrap: no engine would train them, without a word."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fsshard.backends.base import Backend
from fsshard.complex_params import parameter_slots
from fsshard.errors import ModelError

__all__ = ["ModelWatch"]


class ModelWatch:
    """Compares the modules and parameters of a wrapped model with those that were wrapped.

    The look before each forward compares lists of objects by identity: below half a microsecond a module. Only where
    they differ is the tree walked.

    Args:
        owner: what :func:`fsshard.wrap` returns.
        backend: of its model.
    """

    def __init__(self, owner: nn.Module, backend: Backend) -> None:
        self._owner, self._backend = owner._modules, backend
        self._wrapped = {(id(slot.owner), slot.stored): (e, slot) for e in backend.all for slot in e.slots}
        self._look()

    def _look(self) -> None:
        """Remember what is there."""
        modules = list(self._backend.module.modules())
        self._foreign = [parameter for _, parameter in self._others()]  # without gradient
        self._tree = [(m._modules, tuple(m._modules.values()), m._parameters, len(m._parameters)) for m in modules]
        self._held = [(slot.owner._parameters, slot.stored, e) for e in self._backend.all for slot in e.slots]
        self._children = tuple(self._owner.values())

    def check(self) -> None:
        """Raise if the model is not the one that was wrapped. Local.

        Modules without parameters, parameters without gradient and buffers may come and go.

        Raises:
            ModelError: names what was added, replaced or removed.
        """
        if self._is_same():
            return
        added = [name for name, parameter in self._others() if parameter.requires_grad]
        replaced, removed = self._replaced(), self._removed()
        told = [
            f"{what}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
            for what, names in (("added", added), ("replaced", replaced), ("removed", removed))
            if names
        ]
        if told:
            raise ModelError(
                f"parameters were changed after fsshard.wrap, which the engine does not see ({'; '.join(told)}): "
                "it would go on with those of before, and train nothing new. Change the model first and wrap it then; "
                "values are written by model.load_state_dict, or in place"
            )
        self._backend.look_again()
        self._look()

    def _is_same(self) -> bool:
        for modules, children, parameters, count in self._tree:
            if tuple(modules.values()) != children or len(parameters) > count:
                return False
        shows = self._backend.shows
        for held, key, entry in self._held:
            found = held.get(key)
            if found is not entry.parameter and not shows(entry, found):
                return False
        if tuple(self._owner.values()) != self._children:
            return False
        return not any(parameter.requires_grad for parameter in self._foreign)

    def _others(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters in places that were not wrapped, by name."""
        for slot in parameter_slots(self._backend.module):
            if (id(slot.owner), slot.stored) not in self._wrapped and isinstance(slot.parameter, nn.Parameter):
                yield slot.name, slot.parameter
        for name, module in self._owner.items():
            if module is not None and module is not self._backend.module:
                yield from ((f"{name}.{inner}", parameter) for inner, parameter in module.named_parameters())

    def _replaced(self) -> list[str]:
        shows = self._backend.shows
        found = ((e, slot, slot.owner._parameters.get(slot.stored)) for e, slot in self._wrapped.values())
        return [slot.name for e, slot, held in found if held is not e.parameter and not shows(e, held)]

    def _removed(self) -> list[str]:
        there = {id(module) for module in self._backend.module.modules()}
        return [slot.name for _, slot in self._wrapped.values() if id(slot.owner) not in there]
