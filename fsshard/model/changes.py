"""Notices modules and parameters that are added, replaced or removed after wrap, which no engine would train."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

from torch import nn

from fsshard.complex_params.flattened import stored_in
from fsshard.complex_params.slots import parameter_slots
from fsshard.errors import ModelError
from fsshard.planning.entries import Entry

__all__ = ["ModelWatch", "WatchedBackend"]


class WatchedBackend(Protocol):
    """What is asked of the backend of a model that is watched."""

    @property
    def module(self) -> nn.Module:
        """The user's model."""

    @property
    def all(self) -> Sequence[Entry]:
        """Its distinct parameters."""

    def shows(self, entry: Entry, found: object) -> bool:
        """Whether the engine itself shows ``found`` to a module, in place of the parameter of ``entry``."""

    def look_again(self) -> None:
        """Modules without trainable parameters have come or gone."""


class ModelWatch:
    """Compares the modules and parameters of a wrapped model with those that were wrapped.

    The look before each forward compares keys and values of the modules' dicts with those of before, by identity and
    in C: a tenth of a microsecond a module. Only where they differ are they looked at one by one, and only where
    it matters how they differ is the tree walked.

    Args:
        owner: what :func:`fsshard.wrap` returns.
        backend: of its model.
    """

    def __init__(self, owner: nn.Module, backend: WatchedBackend) -> None:
        self._owner, self._backend = owner._modules, backend
        self._wrapped = {(id(slot.owner), slot.stored): (e, slot) for e in backend.all for slot in e.slots}
        self._look()

    def _look(self) -> None:
        """Remember what is there."""
        modules = list(self._backend.module.modules())
        self._foreign = [parameter for _, parameter in self._others()]  # without gradient
        self._tree = [(m._modules, tuple(m._modules.values()), stored_in(m), len(stored_in(m))) for m in modules]
        self._held = [(stored_in(slot.owner), slot.stored, e) for e in self._backend.all for slot in e.slots]
        self._children = tuple(self._owner.values())
        self._dicts = [held for module in modules for held in (module._modules, stored_in(module))]
        filled = [held for held in self._dicts if len(held)]
        self._keys, self._values = [_live(held, "keys") for held in filled], [_live(held, "values") for held in filled]
        self._seen: tuple[list[int], list[str], list[object]] | None = None  # of the latest look that found nothing

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
                "parameters were added, replaced or removed after fsshard.wrap, which the engine does not see "
                f"({'; '.join(told)}): it would keep training the old ones only. Change the model first and wrap it "
                "then; to change values, use model.load_state_dict, or write in place"
            )
        self._backend.look_again()
        self._look()

    def _is_same(self) -> bool:
        if not self._is_as_seen():
            self._seen = None
            if not self._is_as_wrapped():
                return False
        if tuple(self._owner.values()) != self._children:
            return False
        return not any(parameter.requires_grad for parameter in self._foreign)

    def _is_as_seen(self) -> bool:
        """Whether every module holds what it held when each held the engine's own parameters, under the same names."""
        if self._seen is None:
            return False
        lengths, keys, values = self._seen
        # Lengths: what moved from the end of one to the beginning of the next is in the same order.
        return (
            [*map(len, self._dicts)] == lengths
            and [*chain.from_iterable(self._keys)] == keys
            and all(map(operator.is_, chain.from_iterable(self._values), values))
        )

    def _is_as_wrapped(self) -> bool:
        for modules, children, parameters, count in self._tree:
            if tuple(modules.values()) != children or len(parameters) > count:
                return False
        shows, shown = self._backend.shows, False
        for held, key, entry in self._held:
            found = held.get(key)
            if found is not entry.parameter:
                if not shows(entry, found):
                    return False
                shown = True
        if not shown:  # what an engine shows for a while is not to be taken for its parameter later
            keys, values = chain.from_iterable(self._keys), chain.from_iterable(self._values)
            self._seen = [*map(len, self._dicts)], [*keys], [*values]
        return True

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
        found = ((e, slot, stored_in(slot.owner).get(slot.stored)) for e, slot in self._wrapped.values())
        return [slot.name for e, slot, held in found if held is not e.parameter and not shows(e, held)]

    def _removed(self) -> list[str]:
        there = {id(module) for module in self._backend.module.modules()}
        return [slot.name for _, slot in self._wrapped.values() if id(slot.owner) not in there]


def _live(held: Any, what: str) -> Iterable[Any]:
    """The keys or the values of a module's dict, as they are whenever they are gone through."""
    read = getattr(held, what)
    return read() if isinstance(held, dict) else _Anew(read)  # torch.jit's dicts give lists


class _Anew:
    def __init__(self, read: Callable[[], Iterable[Any]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read())
