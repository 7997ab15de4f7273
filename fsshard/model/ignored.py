"""Parameters that stay out of the engine: torch's ``ignored_states`` and ``ignored_params``, under every backend.

They are in their modules, whole on every rank, but while an engine takes the model. Nothing is sent of them, neither
values nor gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.complex_params.flattened import stored_in
from fsshard.complex_params.shown import raw_state
from fsshard.complex_params.slots import parameter_slots
from fsshard.errors import ConfigurationError, OptimizerError
from fsshard.state_objects import is_composite


class Ignored:
    """The parameters of a model that its engine does not have.

    Attributes:
        parameters: by their first names.
        keys: the keys of the bare model's state dict, in order; empty where nothing is ignored.
    """

    def __init__(self, model: Any = None, given: Iterable[Any] | None = None) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self.keys: list[str] = []
        self._ids: set[int] = set()
        self._strange: list[object] = []
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        chosen = {}
        for item in given or ():
            members = [item]
            if isinstance(item, nn.Module):
                members = list(item.parameters())
            for member in members:
                chosen[id(member)] = member
        if not chosen or not isinstance(model, nn.Module):
            return
        for slot in parameter_slots(model):
            if id(slot.parameter) in chosen:
                self._places.append((slot.owner, slot.stored, slot.parameter))
                if slot.parameter not in self:
                    self.parameters[slot.name] = slot.parameter
                    self._ids.add(id(slot.parameter))
        self._strange = [item for item in chosen.values() if item not in self]
        with raw_state():
            self.keys = list(model.state_dict(keep_vars=True))

    def __contains__(self, item: object) -> bool:
        return id(item) in self._ids

    def check(self) -> None:
        """Raise ConfigurationError for what is no parameter of the model. Local."""
        if self._strange:
            first = self._strange[0]
            shape = f" of shape {tuple(first.shape)}" if isinstance(first, Tensor) else ""
            raise ConfigurationError(
                f"ignored_states: expected parameters and modules of the model, got a {type(first).__name__}{shape} "
                "that is not the model's; take them from it: [model.head], [model.embed.weight]"
            )

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Context in which the modules do not hold them."""
        taken = []
        orders: dict[nn.Module, list[str]] = {}
        for owner, name, parameter in self._places:
            orders.setdefault(owner, list(stored_in(owner)))
            if stored_in(owner).get(name) is parameter:
                del stored_in(owner)[name]
                taken.append((owner, name, parameter))
        try:
            yield
        finally:
            for owner, name, parameter in taken:
                stored_in(owner)[name] = parameter
            for owner, order in orders.items():
                parameters = stored_in(owner)
                for name in order:
                    if name in parameters:
                        parameters[name] = parameters.pop(name)  # to the end, in the order of before

    def move(self, device: torch.device) -> None:
        """Move plain ones to a device, as the rest of the model is; quantised ones stay where they are."""
        for parameter in self.parameters.values():
            if parameter.device != device and not is_composite(parameter):
                parameter.data = parameter.data.to(device)

    def trainable(self, members: Iterable[Any]) -> list[Any]:
        """Return those of an optimizer's parameters that are not ignored; frozen ones are left out.

        Raises:
            OptimizerError: an ignored one trains.
        """
        kept = []
        for member in members:
            item = member
            if isinstance(member, tuple) and len(member) == 2:
                item = member[1]
            if isinstance(item, str):
                item = self.parameters.get(item)
            if item not in self:
                kept.append(member)
            elif item.requires_grad:
                names = [name for name, each in self.parameters.items() if each is item]
                name = names[0]
                raise OptimizerError(
                    f"{name!r} is among ignored_states, so that each rank has a gradient of its own for it; reduce "
                    "that as you like, and step it by torch's optimizer: torch.optim.AdamW([parameter])"
                )
        return kept
