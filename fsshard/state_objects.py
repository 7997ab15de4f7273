"""Objects within the state of an optimizer, and tensors made of others, as the names of their classes and fields.

A checkpoint has them as :class:`SavedObject`: nothing is pickled, and no class is looked up by a name that a file
gives. They are loaded into the objects that are there (:func:`with_objects`), or into classes that the caller names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from fsshard.errors import CheckpointError
from fsshard.nested import is_array, leaves, map_containers
from fsshard.torch_private.tensors import LOCAL_TENSOR

Fields = dict[str, Any]

CONTEXT = "$context"
"""Field of a tensor that is made of others: what its class needs besides these."""
SIZES = "$sizes"
"""Field of such a tensor: its shape and strides."""
_VALUES = (str, bytes, int, float, complex, dict, list, tuple, set, frozenset)
_OTHERWISE = (type, nn.Module, torch.optim.Optimizer, *_VALUES)
"""Classes whose instances are more than their fields, or something else."""
_METHODS = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")
"""By these a class says that its fields are not its state."""

Classes = Mapping[str, type]
"""Module and name of a class -> the class, of those that a caller names."""


@dataclass(frozen=True)
class SavedObject:
    """An object as a checkpoint has it.

    Attributes:
        kind: module and name of its class.
        fields: by name, what it holds.
    """

    kind: str
    fields: Fields


def class_name(kind: type) -> str:
    """Return module and name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def by_class_name(classes: Iterable[type]) -> dict[str, type]:
    """Return classes by module and name."""
    return {class_name(kind): kind for kind in classes}


def is_composite(value: object) -> bool:
    """Return whether a tensor is made of others, as quantised ones are, and is no DTensor."""
    return isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__") and not hasattr(value, LOCAL_TENSOR)


def is_plain_tensor(value: object) -> bool:
    """Return whether it is a tensor with numbers of its own."""
    return isinstance(value, Tensor) and not is_composite(value)


def fields_of(value: Any) -> Fields | None:
    """Return what an object holds, by name, if it is nothing more than that; None for any other value."""
    kind = type(value)
    if isinstance(value, Tensor):
        return _inner_of(value) if is_composite(value) else None
    if isinstance(value, SavedObject):
        return value.fields
    if isinstance(value, Enum):
        return {"name": value.name}
    if isinstance(value, _OTHERWISE) or kind.__module__ == "builtins":
        return None
    fields = dict(getattr(value, "__dict__", {}))
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            fields[field.name] = getattr(value, field.name)
        return fields
    if not hasattr(value, "__dict__"):
        return None
    for method in _METHODS:
        if getattr(kind, method, None) is not getattr(object, method, None):
            return None
    return fields


def _inner_of(tensor: Any) -> Fields:
    names, context = tensor.__tensor_flatten__()
    fields = {}
    for name in names:
        fields[name] = getattr(tensor, name)
    fields[CONTEXT] = context
    fields[SIZES] = [
        list(tensor.shape),
        list(tensor.stride()),
    ]
    return fields


def holds_objects(value: Any) -> bool:
    """Return whether there is an object within a value, or a tensor that is made of others."""
    found: list[Any] = []
    map_containers(found.append, value, "plain")
    return any(fields_of(leaf) is not None for leaf in found)


def _parts(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield what is within a value and has nothing within itself."""
    for leaf in leaves(value):
        fields = None if type(leaf) is Tensor else fields_of(leaf)
        if fields is None:
            yield leaf
        elif id(leaf) not in seen:
            seen.add(id(leaf))
            yield from _parts(fields, seen)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors with numbers that are within a value: in containers, objects, and tensors made of others."""
    for part in _parts(value, set()):
        if isinstance(part, Tensor):
            yield part


def has_arrays(value: Any) -> bool:
    """Return whether there is a tensor or numpy array with a dim within a value."""
    return any(map(is_array, _parts(value, set())))


def described(value: Any, path: str, above: tuple[int, ...] = ()) -> Any:
    """Return a value with a :class:`SavedObject` in the place of each object.

    Raises:
        CheckpointError: an object holds itself.
    """

    def describe(leaf: Any) -> Any:
        fields = fields_of(leaf)
        if fields is None:
            return leaf
        if id(leaf) in above:
            raise CheckpointError(f"{path}: a {class_name(type(leaf))} that holds itself; a checkpoint has no such")
        kind = leaf.kind if isinstance(leaf, SavedObject) else class_name(type(leaf))
        return SavedObject(kind, described(fields, path, (*above, id(leaf))))

    return map_containers(describe, value, "plain")


def with_fields(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return another object of the same class with ``change(field)`` for each field; what is no object as it is."""
    fields = fields_of(value)
    if fields is None or isinstance(value, Enum):
        return value
    changed = {}
    for name, field in fields.items():
        changed[name] = change(field)
    return _object(type(value), changed, None, lambda item, _: item)


# ------------------------------------------------------------------------------------------------ loading


def check_objects(
    value: Any,
    live: Any,
    classes: Classes,
    what: str,
) -> None:
    """Raise CheckpointError for an object that :func:`with_objects` could not make of ``value``. Local."""
    if isinstance(value, SavedObject):
        kind = _class_of(value.kind, live, classes)
        if kind is None:
            short = value.kind.rpartition(".")[2]
            got = "nothing" if live is None else f"a {class_name(type(live))}"
            raise CheckpointError(
                f"{what}: expected a {value.kind}, whose fields were saved, where there is {got} now; name the class, "
                f"fsshard.load(..., objects=[{short}])"
            )
        for name, item in value.fields.items():
            held = _field(live, name)
            check_objects(item, held, classes, f"{what}.{name}")
            if is_composite(live) and isinstance(held, Tensor) and held.shape != item.shape:
                raise CheckpointError(f"{what}.{name}: expected shape {tuple(held.shape)}, got {tuple(item.shape)}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            check_objects(item, _item(live, key), classes, f"{what}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            check_objects(item, _item(live, index), classes, f"{what}[{index}]")


def with_objects(
    state: Mapping[str, Any],
    before: Mapping[str, Any],
    classes: Classes,
    device: torch.device,
) -> Fields:
    """Return a state in which objects are those of ``before``, filled, or new ones.

    Args:
        state: what is loaded: by key, values with objects or :class:`SavedObject`.
        before: what there is now. Where it has an object, all of its tensors keep their memory: an optimizer whose
            constructor makes the state (DistributedShampoo) holds them elsewhere, too.
        classes: of new objects, where a :class:`SavedObject` has none in ``before``.
        device: of new tensors with a dim.
    """
    keeps_memory = any(map(holds_objects, before.values()))
    result = {}
    for key, value in state.items():
        if keeps_memory or holds_objects(value):
            value = _filled(value, before.get(key), classes, device)
        result[key] = value
    return result


@torch.no_grad()
def fill_tensor(tensor: Tensor, saved: SavedObject) -> None:
    """Give a tensor that is made of others the numbers that were saved. :func:`check_objects` has been passed."""
    _filled(saved, tensor, {}, tensor.device)


@torch.no_grad()
def _filled(
    value: Any,
    live: Any,
    classes: Classes,
    device: torch.device,
) -> Any:
    def filled(item: Any, held: Any) -> Any:
        return _filled(item, held, classes, device)

    if is_plain_tensor(value):
        if is_plain_tensor(live) and live.shape == value.shape and live.dtype == value.dtype:
            return live.copy_(value)
        return value.to(device) if value.dim() else value
    fields = fields_of(value)
    if fields is not None:
        kind = type(value)
        if isinstance(value, SavedObject):
            kind = _class_of(value.kind, live, classes) or kind
        own = live if type(live) is kind else None
        return _object(kind, fields, own, filled)
    if type(value) is dict:
        items = {}
        for key, item in value.items():
            items[key] = filled(item, _item(live, key))
        if type(live) is not dict:
            return items
        live.clear()
        live.update(items)
        return live
    if type(value) not in (list, tuple):
        return value
    in_order = [filled(item, _item(live, index)) for index, item in enumerate(value)]
    if type(value) is tuple:
        return tuple(in_order)
    if type(live) is not list:
        return in_order
    live[:] = in_order
    return live


def _object(
    kind: Any,
    fields: Mapping[str, Any],
    live: Any,
    filled: Callable[[Any, Any], Any],
) -> Any:
    """Return an object of a class with these fields: ``live`` where there is one."""
    if issubclass(kind, Enum):
        return kind[fields["name"]]
    own = fields_of(live) or {}
    values = {}
    for name, item in fields.items():
        if name != SIZES:
            values[name] = filled(item, own.get(name))
    if issubclass(kind, Tensor):
        context = values.pop(CONTEXT)
        if live is not None and all(values[name] is own[name] for name in values):
            return live  # its memory has been written
        shape, strides = fields[SIZES]
        return kind.__tensor_unflatten__(values, context, torch.Size(shape), tuple(strides))
    target = kind.__new__(kind) if live is None else live
    if hasattr(target, "__dict__"):
        members = vars(target)
        members.clear()
        members.update(values)
        return target
    for name, item in values.items():  # a dataclass with slots
        object.__setattr__(target, name, item)
    return target


def _class_of(name: str, live: Any, classes: Classes) -> type | None:
    """Return the class of that name, if it is that of what there is now or one of the caller's."""
    if class_name(type(live)) == name:
        return type(live)
    return classes.get(name)


def _field(live: Any, name: str) -> Any:
    """Return what an object holds now under a name; None where there is none."""
    fields = fields_of(live)
    return None if fields is None else fields.get(name)


def _item(live: Any, key: Any) -> Any:
    """Return what a container holds now at a place; None where there is none."""
    if isinstance(live, Mapping):
        return live.get(key)
    if isinstance(live, (list, tuple)) and isinstance(key, int) and key < len(live):
        return live[key]
    return None
