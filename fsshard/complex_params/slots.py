"""Every place where a module holds a parameter, by the user's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from fsshard.complex_params.flattened import factorised_classes, stored_in, views_of
from fsshard.complex_params.pairs import SUFFIX, Kind
from fsshard.torch_private.modules import CHECKPOINTED


class ParameterSlot(NamedTuple):
    """One place where a module holds a parameter."""

    name: str  # as the user knows it, fully qualified
    owner: nn.Module
    attribute: str  # the user's name within the module
    stored: str  # the key in ``stored_in(owner)``
    kind: Kind

    @property
    def parameter(self) -> nn.Parameter:
        """The stored parameter as it is now."""
        parameter: nn.Parameter = stored_in(self.owner)[self.stored]
        return parameter

    @property
    def is_complex(self) -> bool:
        """Return whether the module computes with it as a complex number; :func:`tensorfy` does not change that."""
        if self.kind.is_complex or self.parameter.is_complex():
            return True
        known = factorised_classes()
        return known is not None and isinstance(self.owner, known)


def public_name(name: str) -> str:
    """Return ``name`` without what torch's activation-checkpoint wrapper adds, and strips from state dicts itself."""
    if CHECKPOINTED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != CHECKPOINTED)


def parameter_slots(model: nn.Module) -> Iterator[ParameterSlot]:
    """Yield all slots in the order of ``named_parameters(remove_duplicate=False)``, ties repeated."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        if not (held := stored_in(module)):
            continue
        names = {name + SUFFIX: (name, kind) for name, kind in views_of(module).items()}
        prefix = public_name(prefix)
        for stored, parameter in held.items():
            if parameter is None:
                continue
            attribute, kind = names.get(stored, (stored, Kind.PLAIN))
            yield ParameterSlot(f"{prefix}.{attribute}" if prefix else attribute, module, attribute, stored, kind)
