"""Dataclasses as JSON and back: numbers as the shortest text that reads back to the same bits, and no pickle."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from fsshard.errors import ConfigurationError

SPECIAL = ("nan", "inf", "-inf")
"""Numbers that JSON does not know."""
SCALARS = {str: "a text", bool: "true or false", int: "a whole number that is not negative", float: "a number"}


class WrongField(ConfigurationError):
    """A value is not what belongs at its place.

    Attributes:
        field: the place, such as ``"ranks[1].steps[3].loss"``.
        problem: what was expected there, and what is there.
    """

    def __init__(self, field: str, problem: str) -> None:
        self.field, self.problem = field, problem
        super().__init__(f"field {field}: {problem}")


def plain(value: Any, special: Callable[[str], Any], other: Mapping[type, Callable[[Any], Any]] | None = None) -> Any:
    """Return ``value`` with objects for dataclasses, and lists for tuples, as JSON has them.

    ``special`` makes what stands for a number of :data:`SPECIAL`; ``other`` writes the instances of some classes.
    """
    if other and type(value) in other:
        value = other[type(value)](value)
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(item, special, other) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, special, other) for item in value]
    return special(str(value)) if isinstance(value, float) and not math.isfinite(value) else value


def read_as(kind: Any, value: Any, path: str = "", other: Mapping[Any, Callable[[Any, str], Any]] | None = None) -> Any:
    """Return what :func:`plain` made JSON of, as an instance of ``kind``, or raise WrongField with the ``path`` to it.

    ``kind`` is a dataclass, or what stands in a type hint of one; ``other`` reads instances of some classes. A field
    may be absent where its metadata says ``optional``, as old files are; any other must not read as its default.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if other and kind in other:
        return other[kind](value, path)
    if isinstance(kind, UnionType):
        return None if value is None else read_as(inner[0], value, path, other)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        given, hints, found = _checked(dict, value, path, "an object"), _hints(kind), {}
        for field in dataclasses.fields(kind):
            place = f"{path}.{field.name}" if path else field.name
            if field.name in given:
                found[field.name] = read_as(hints[field.name], given[field.name], place, other)
            elif not field.metadata.get("optional"):
                raise WrongField(place, "is missing")
        return kind(**found)
    if origin is dict:
        given = _checked(dict, value, path, "an object")
        return {key: read_as(inner[1], item, f"{path}.{key}", other) for key, item in given.items()}
    if origin in (list, tuple):
        items = _checked(list, value, path, "a list")
        fixed = origin is tuple and inner[-1] is not ...
        if fixed and len(items) != len(inner):
            raise WrongField(path, f"expected {len(inner)} elements, got {len(items)}")
        kinds = inner if fixed else inner[:1] * len(items)
        pairs = enumerate(zip(kinds, items, strict=True))
        return origin(read_as(one, item, f"{path}[{number}]", other) for number, (one, item) in pairs)
    return _any(value) if kind is Any else _scalar(kind, value, path)


_hints = lru_cache(maxsize=64)(get_type_hints)


def _checked(kind: Any, value: Any, path: str, expected: str) -> Any:
    if not isinstance(value, kind):
        raise WrongField(path, f"expected {expected}, got {repr(value)[:60]}")
    return value


def _scalar(kind: Any, value: Any, path: str) -> Any:
    special = value.get("number") if isinstance(value, dict) else value
    if kind is float and special in SPECIAL:
        return float(special)
    found = _checked((int, float) if kind is float else kind, value, path, SCALARS[kind])
    if (isinstance(found, bool) and kind is not bool) or (kind is int and found < 0):
        raise WrongField(path, f"expected {SCALARS[kind]}, got {found!r}")
    return float(found) if kind is float else found


def _any(value: Any) -> Any:
    if isinstance(value, dict):
        return float(value["number"]) if set(value) == {"number"} else value
    return [_any(item) for item in value] if isinstance(value, list) else value
