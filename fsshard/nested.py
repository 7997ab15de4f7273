"""Tensors in batches and outputs: mappings, sequences, named tuples and dataclasses."""

from __future__ import annotations

import collections
import copy
import dataclasses
import types
from collections import UserList, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Literal

import numpy as np
from torch import Tensor


def map_leaves(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """The same structure with ``function(leaf, *leaves of the others at its place)`` for each leaf.

    Args:
        function: called with everything that is no container.
        first: gives the structure and the types of the containers.
        others: of the same structure.
    """

    structures = (first, *others)
    kind = type(first)

    def down(*values: Any) -> Any:
        return map_leaves(function, *values)

    if isinstance(first, Mapping):
        mapped = {}
        for key, value in first.items():
            mapped[key] = down(value, *(other[key] for other in others))
        if not isinstance(first, MutableMapping):
            return mapped
        # A defaultdict, a UserDict, a transformers output: not all of them are built of a dict.
        result = copy.copy(first)
        for key, value in mapped.items():
            result[key] = value
        return result
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return kind(*map(down, *structures))
    if isinstance(first, (list, tuple)):
        return kind(map(down, *structures))
    if _is_dataclass_instance(first):
        changes = {}
        for field in dataclasses.fields(first):
            if field.init:
                values = [getattr(structure, field.name) for structure in structures]
                changes[field.name] = down(*values)
        return dataclasses.replace(first, **changes)
    return function(*structures)


def _is_dataclass_instance(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


Within = Literal["plain", "fsdp2", "all"]
"""Which containers are looked into: torch's and Python's plain ones, those that FSDP2 looks into (torch 2.13: all
classes of dicts, lists, tuples and dataclasses), or other mappings and sequences too."""

_PLAIN = frozenset({dict, list, tuple, collections.OrderedDict, collections.defaultdict})
_LEAVES = frozenset({Tensor, type(None), bool, int, float, str})  # of most containers; told at once, in each forward


def map_containers(function: Callable[[Any], Any], value: Any, within: Within) -> Any:
    """Return ``value`` with ``function(leaf)`` for each leaf of nested containers.

    Containers are copied without their constructors, which may want other arguments, or compute anew what they hold:
    everything else in them stays as it is.

    Args:
        function: called with everything that is no container.
        value: of any type.
        within: what is a container. Plain ones are always new; of the others those stay in which nothing changes.

    Raises:
        TypeError: names the class of a container that cannot be copied.
    """
    if type(value) in _LEAVES:
        return function(value)
    items = _items(value, within)
    if items is None:
        return function(value)
    mapped = {}
    for key, item in items.items():
        new = map_containers(function, item, within)
        if within == "plain" or new is not item:
            mapped[key] = new
    if within != "plain" and not mapped:
        return value
    try:
        return _with_items(value, mapped)
    except Exception as error:
        raise TypeError(f"no copy of a {type(value).__name__} can be made: {error}") from error


def _items(value: Any, within: Within) -> dict[Any, Any] | None:
    """Return what a container holds, by key, index or field; None for a leaf."""
    if type(value) is tuple or type(value) is list:
        return dict(enumerate(value))
    is_named = isinstance(value, tuple) and hasattr(value, "_fields")
    if within == "plain" and not (is_named or type(value) in _PLAIN):
        # Another class may be more than its items.
        return None
    if not is_named and _is_dataclass_instance(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name, None) for name in names}
    mappings: Any = dict
    sequences: Any = (list, tuple)
    if within == "all":
        mappings = Mapping
        sequences = (list, tuple, deque, UserList)
    if isinstance(value, mappings):
        return dict(value)
    if isinstance(value, sequences):
        return dict(enumerate(value))
    return None


def _with_items(value: Any, items: Mapping[Any, Any]) -> Any:
    """A copy of a container with some items replaced."""
    if isinstance(value, tuple):
        elements = [items.get(index, item) for index, item in enumerate(value)]
        # tuple.__new__ refuses the classes of torch.return_types.
        if hasattr(value, "n_sequence_fields"):
            return type(value)(elements)
        twin = tuple.__new__(type(value), elements)
        if hasattr(twin, "__dict__"):
            twin.__dict__.update(value.__dict__)
        return twin
    # It cannot be copied, and its type is its constructor.
    if isinstance(value, types.MappingProxyType):
        return types.MappingProxyType({**value, **items})
    copied = copy.copy(value)
    has_fields = dataclasses.is_dataclass(value)
    for key, item in items.items():
        if has_fields:
            # This works for frozen ones, too.
            object.__setattr__(copied, key, item)
        # transformers' ModelOutput holds its fields twice
        if not has_fields or (isinstance(copied, MutableMapping) and key in copied):
            copied[key] = item
    return copied


def leaves(value: Any) -> Iterator[Any]:
    """Everything in ``value`` that is not a container, in order."""
    # Tensors come first, since most leaves are.
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    elif _is_dataclass_instance(value):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name))
    else:
        yield value


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among the leaves of ``value``, in order."""
    for leaf in leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return the same structure with ``function(tensor)`` for each tensor."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        return leaf

    return map_leaves(changed, value)


def is_array(value: Any) -> bool:
    """Return whether ``value`` holds samples along dim 0: a tensor or numpy array that has one."""
    return isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0


def grad_tensors(output: Any) -> list[Tensor]:
    """Return the tensors in a model's output that take a gradient: in dicts, lists, tuples and dataclasses, nested."""
    if isinstance(output, Tensor):  # as most are
        return [output] if output.requires_grad else []
    return [tensor for tensor in tensors(output) if tensor.requires_grad]
