"""The user's model under an engine: what its modules hold and show, and how it looks without the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from fsshard.backends.engine_state import EngineState
from fsshard.complex_params.flattened import forget_shown, raw_state, stored_in
from fsshard.complex_params.replaced import attributes_of
from fsshard.complex_params.slots import public_name
from fsshard.planning.entries import Entry

__all__ = ["UserModule"]


class UserModule(EngineState):
    """What the user's modules hold while an engine has them."""

    requested: Any  # the config for state dicts that torch's FSDP.state_dict_type was given
    _parts: dict[str, nn.Module]  # all modules, by name
    has_new_modules = False  # since it was wrapped

    def shows(self, entry: Entry, found: object) -> bool:
        """Whether the engine itself shows ``found`` to a module, in place of the parameter of ``entry``."""
        return False

    def look_again(self) -> None:
        """Modules without trainable parameters have come or gone."""
        self.has_new_modules = True
        self._parts = {public_name(name): module for name, module in self.module.named_modules()}

    def buffers(self) -> dict[tuple[str, str], Tensor]:
        """The distinct buffers of the model's modules as they are now, by module and name, without a walk."""
        found = {id(b): ((part, key), b) for part, module in self._parts.items() for key, b in module._buffers.items()}
        return {place: buffer for place, buffer in found.values() if buffer is not None and not buffer.is_meta}

    def trains_buffers(self) -> bool:
        """Whether a module that has buffers is in training mode, whatever mode the model is in."""
        return any(part.training and part._buffers for part in self._parts.values())

    def relocating_storage(self) -> contextlib.AbstractContextManager[None]:
        """Context in which an engine moves parameters to other memory, so that no view keeps the old memory alive."""
        follow = None if self.follower is None else self.follower()
        return contextlib.nullcontext() if follow is None else follow()

    @property
    def has_no_shapes(self) -> bool:
        """Whether what a rank holds of a parameter has no shape of its own, on this rank or on another."""
        return False

    @property
    def holds_parts(self) -> bool:
        """Whether the user's modules hold parts of their parameters, so that their state dicts are not the model's."""
        return False

    def before_showing(self) -> None:
        """Parameters are about to be handed to the user, who may write to them."""

    @property
    def hears_state_dict_type(self) -> bool:
        """Whether torch's ``FSDP.state_dict_type`` finds its own wrappers in the model and sets their type."""
        return False

    def requested_state_dict(self) -> Any:
        """The config that torch's own context for state dicts has set around the model, or None."""
        return self.requested

    @contextlib.contextmanager
    def bare(self) -> Iterator[nn.Module]:
        """The user's model without the engine's wrappers, so that its own state-dict methods run as written."""
        with contextlib.nullcontext() if self.guard is None else self.guard.lifted():
            yield self.module

    def raw_state_dict(self) -> dict[str, Any]:
        """The user's keys; stored parameters as they are now, everything else as the model gives it."""
        with self.bare() as module, raw_state():
            return dict(module.state_dict(keep_vars=True))

    @contextlib.contextmanager
    def whole_parameters(self, whole: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the user's modules hold ``whole`` in place of their shards."""
        replacements = {n: nn.Parameter(value, self.entries[n].parameter.requires_grad) for n, value in whole.items()}
        for name, replacement in replacements.items():
            replacement.__dict__.update(attributes_of(self.entries[name].parameter))
        before = [(slot, stored_in(slot.owner)[slot.stored]) for e in self.entries.values() for slot in e.slots]
        for entry in self.entries.values():
            for slot in entry.slots:
                stored_in(slot.owner)[slot.stored] = replacements[entry.name]
        try:
            with contextlib.nullcontext() if self.guard is None else self.guard.whole():
                yield
        finally:
            for slot, parameter in before:
                stored_in(slot.owner)[slot.stored] = parameter
                forget_shown(slot.owner)

    def retire(self) -> None:
        """The engine lets go of the user's parameters for good, and is not to hear of their gradients."""
