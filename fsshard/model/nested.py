"""Tensors in batches and outputs: mappings, sequences, named tuples and dataclasses."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["has_arrays", "is_array", "leaves", "map_containers", "map_leaves"]


def map_leaves(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """The same structure with ``function(leaf, *leaves of the others at its place)`` for each leaf.

    Args:
        function: called with everything that is no container.
        first: gives the structure and the types of the containers.
        others: of the same structure.
    """

    def down(*values: Any) -> Any:
        return map_leaves(function, *values)

    if isinstance(first, Mapping):
        mapped = {key: down(value, *(other[key] for other in others)) for key, value in first.items()}
        if not isinstance(first, MutableMapping):
            return mapped
        result = copy.copy(first)  # a defaultdict, a UserDict, a transformers output: not all take a dict to build
        for key, value in mapped.items():
            result[key] = value
        return result
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*map(down, first, *others))
    if isinstance(first, (list, tuple)):
        return type(first)(map(down, first, *others))
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [item.name for item in dataclasses.fields(first) if item.init]
        changes = {name: down(*(getattr(value, name) for value in (first, *others))) for name in names}
        return dataclasses.replace(first, **changes)
    return function(first, *others)


_PLAIN = frozenset({dict, list, tuple, collections.OrderedDict, collections.defaultdict})


def map_containers(function: Callable[[Any], Any], value: Any, *, as_fsdp2: bool = False) -> Any:
    """Return new dicts, lists and tuples, nested as in ``value``, with ``function(leaf)`` for each leaf.

    Args:
        function: called with everything that is none of these.
        value: of any type.
        as_fsdp2: look into what FSDP2 does (torch 2.13), in its order, dataclasses too, and keep containers in which
            nothing changes. Every engine then puts nodes of autograd at the same places.
    """

    def down(item: Any) -> Any:
        return map_containers(function, item, as_fsdp2=as_fsdp2)

    is_named = isinstance(value, tuple) and hasattr(value, "_fields")
    if not (as_fsdp2 or is_named or type(value) in _PLAIN):  # another class may be more than its items
        return function(value)
    if as_fsdp2 and not is_named and dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changes = {name: new for name, item in items.items() if (new := down(item)) is not item}
        return dataclasses.replace(value, **changes) if changes else value
    if isinstance(value, dict):
        mapped = {key: down(item) for key, item in value.items()}
        if as_fsdp2 and all(mapped[key] is item for key, item in value.items()):
            return value
        copied = copy.copy(value)  # without its constructor, which may want other arguments
        for key, item in mapped.items():
            copied[key] = item
        return copied
    if not isinstance(value, (list, tuple)):
        return function(value)
    found = [down(item) for item in value]
    if as_fsdp2 and all(new is item for new, item in zip(found, value, strict=True)):
        return value
    if isinstance(value, list):
        twin = copy.copy(value)
        twin[:] = found
        return twin
    # torch.return_types refuse tuple.__new__
    return type(value)(found) if hasattr(value, "n_sequence_fields") else tuple.__new__(type(value), found)


def leaves(value: Any) -> Iterator[Any]:
    """Everything in ``value`` that is not a container, in order."""
    if isinstance(value, Tensor):  # first, since most are
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name))
    else:
        yield value


def has_arrays(value: Any) -> bool:
    """Whether ``value`` is, or contains, a tensor or numpy array with a dim."""
    return any(map(is_array, leaves(value)))


def is_array(value: Any) -> bool:
    """Whether ``value`` holds samples along dim 0: a tensor or numpy array that has one."""
    return isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0
