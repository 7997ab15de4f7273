"""The modules of a model, and every place where one of them holds a parameter, by the user's names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from fsshard.complex_params.flattened import factorised_classes, stored_in, views_of
from fsshard.complex_params.pairs import SUFFIX, Kind
from fsshard.errors import ModelError
from fsshard.torch_private.modules import CHECKPOINTED


class ParameterSlot(NamedTuple):
    """One place where a module holds a parameter."""

    # As the user knows it, fully qualified.
    name: str
    owner: nn.Module
    # The user's name within the module.
    attribute: str
    # The key in ``stored_in(owner)``.
    stored: str
    kind: Kind

    @property
    def parameter(self) -> nn.Parameter:
        """The stored parameter as it is now."""
        # As stored_in() does, for speed.
        parameters: dict[str, Any] | None = self.owner.__dict__.get("_parameters")
        if parameters is None:
            parameters = self.owner._parameters
        parameter: Any = parameters[self.stored]
        return parameter  # type: ignore[no-any-return]  # not cast(), which is a call

    @property
    def is_complex(self) -> bool:
        """Return whether the module computes with it as a complex number; :func:`tensorfy` does not change that."""
        if self.kind.is_complex or self.parameter.is_complex():
            return True
        classes = factorised_classes()
        return classes is not None and isinstance(self.owner, classes)


def public_name(name: str) -> str:
    """Return ``name`` without what torch's activation-checkpoint wrapper adds, and strips from state dicts itself."""
    if CHECKPOINTED not in name:
        return name
    parts = [part for part in name.split(".") if part != CHECKPOINTED]
    return ".".join(parts)


def all_places(module: nn.Module, name: str = "") -> list[tuple[str, nn.Module]]:
    """Return what ``named_modules(remove_duplicate=False)`` yields, in a quarter of the calls."""
    if type(module).named_modules is not nn.Module.named_modules:
        return list(module.named_modules(prefix=name, remove_duplicate=False))
    places = [(name, module)]
    prefix = f"{name}." if name else ""
    for key, child in module._modules.items():
        if child is not None:
            places += all_places(child, prefix + key)
    return places


def refuse_lazy(slots: Iterable[ParameterSlot]) -> None:
    """Raise ModelError for parameters that have no shape yet: a lazy module learns it in its first forward."""
    # As nn.parameter.is_lazy() does, which is a call.
    lazy_class: type = nn.parameter.UninitializedTensorMixin  # type: ignore[attr-defined]
    lazy = [slot.name for slot in slots if isinstance(slot.parameter, lazy_class)]
    if lazy:
        names = ", ".join(lazy[:5])
        raise ModelError(f"model: expected parameters with shapes, got lazy ones: {names}; run one forward first")


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
        self.modules: Mapping[str, nn.Module] = {}
        self.places: list[tuple[str, nn.Module]] = []
        if not isinstance(root, nn.Module):
            return
        first_names: dict[nn.Module, str] = {}
        for name, module in all_places(root):
            first_names.setdefault(module, name)
            self.places.append((public_name(name), module))
        self.modules = {name: module for module, name in first_names.items()}

    def by_public_name(self) -> dict[str, nn.Module]:
        """Return the modules of all places by public name: torch's checkpoint wrapper goes before what it wraps."""
        return dict(reversed(self.places))

    def slots(self) -> Iterator[ParameterSlot]:
        """Yield all slots in the order of ``named_parameters(remove_duplicate=False)``, ties repeated."""
        for name, module in self.places:
            parameters = stored_in(module)
            if not parameters:
                continue
            prefix = f"{name}." if name else ""
            views = views_of(module)
            for stored, parameter in parameters.items():
                if parameter is None:
                    continue
                attribute = stored.removesuffix(SUFFIX)
                kind = views.get(attribute) if attribute != stored else None
                # Of a parameter of the user's whose own name ends so there is no view.
                if kind is None:
                    attribute = stored
                    kind = Kind.PLAIN
                yield ParameterSlot(prefix + attribute, module, attribute, stored, kind)

    def buffers(self) -> dict[str, Tensor]:
        """Return the distinct buffers by their first names, as ``named_buffers()`` has them."""
        buffers = {}
        seen = set()
        for name, module in self.modules.items():
            prefix = f"{name}." if name else ""
            for key, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    buffers[prefix + key] = buffer
        return buffers


def parameter_slots(model: nn.Module) -> Iterator[ParameterSlot]:
    """Yield the slots of :class:`ModuleTable`, of a model that is walked for them alone."""
    return ModuleTable(model).slots()
