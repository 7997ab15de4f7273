"""The modules of a model, and every place where one of them holds a parameter, by the user's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

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
        held: dict[str, Any] | None = self.owner.__dict__.get("_parameters")  # as stored_in(), for speed
        return cast(nn.Parameter, (self.owner._parameters if held is None else held)[self.stored])

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


class ModuleTable:
    """The modules of a model by name, from one walk; their parameters and buffers are looked up each time.

    It stays true while parameters, buffers, classes and forwards of the modules are replaced, as ``wrap`` does before
    an engine takes the model.

    Attributes:
        root: the model; what is no module has none.
        modules: each module by its first name, as ``named_modules()`` has it.
        places: public name and module of every place, those of shared modules repeated.
    """

    def __init__(self, root: Any) -> None:
        self.root = root
        raw = list(root.named_modules(remove_duplicate=False)) if isinstance(root, nn.Module) else []
        first: dict[nn.Module, str] = {}
        for name, module in raw:
            first.setdefault(module, name)
        self.modules: Mapping[str, nn.Module] = {name: module for module, name in first.items()}
        self.places = [(public_name(name), module) for name, module in raw]

    def by_public_name(self) -> dict[str, nn.Module]:
        """Return the modules of all places by public name: torch's checkpoint wrapper goes before what it wraps."""
        return dict(reversed(self.places))

    def slots(self) -> Iterator[ParameterSlot]:
        """Yield all slots in the order of ``named_parameters(remove_duplicate=False)``, ties repeated."""
        for prefix, module in self.places:
            if not (held := stored_in(module)):
                continue
            names = {name + SUFFIX: (name, kind) for name, kind in views_of(module).items()}
            before = f"{prefix}." if prefix else ""
            for stored, parameter in held.items():
                if parameter is not None:
                    attribute, kind = names.get(stored) or (stored, Kind.PLAIN)
                    yield ParameterSlot(before + attribute, module, attribute, stored, kind)

    def buffers(self) -> dict[str, Tensor]:
        """Return the distinct buffers by their first names, as ``named_buffers()`` has them."""
        found: dict[int, tuple[str, Tensor]] = {}
        for prefix, module in self.modules.items():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    found.setdefault(id(buffer), (f"{prefix}.{key}" if prefix else key, buffer))
        return dict(found.values())


def parameter_slots(model: nn.Module) -> Iterator[ParameterSlot]:
    """Yield the slots of :class:`ModuleTable`, of a model that is walked for them alone."""
    return ModuleTable(model).slots()
