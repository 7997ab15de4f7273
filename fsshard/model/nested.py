"""Tensors in batches and outputs: mappings, sequences, named tuples and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["has_arrays", "is_array", "leaves", "map_leaves"]


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
