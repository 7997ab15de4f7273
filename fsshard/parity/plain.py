"""Dataclasses as JSON and back: numbers as the shortest text that reads back to the same bits, and no pickle."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from fsshard.errors import ConfigurationError

# Numbers that JSON does not know.
SPECIAL = ("nan", "inf", "-inf")
SCALARS = {str: "a text", bool: "true or false", int: "a whole number that is not negative", float: "a number"}


class WrongField(ConfigurationError):
    """A value is not what belongs at its place.

    Attributes:
        field: the place, such as ``"ranks[1].steps[3].loss"``.
        problem: what was expected there, and what is there.
    """

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        self.problem = problem
        super().__init__(f"field {field}: {problem}")


def plain(
    value: Any,
    special: Callable[[str], Any],
    other: Mapping[type, Callable[[Any], Any]] | None = None,
) -> Any:
    """Return ``value`` with objects for dataclasses, and lists for tuples, as JSON has them.

    ``special`` makes what stands for a number of :data:`SPECIAL`; ``other`` writes the instances of some classes.
    """
    if other and type(value) in other:
        value = other[type(value)](value)
    if dataclasses.is_dataclass(value):
        # The fields only: dataclasses.asdict() would copy what is within them, too.
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(item, special, other) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, special, other) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return special(str(value))
    return value


Readers = Mapping[Any, Callable[[Any, str], Any]]


def read_as(
    kind: Any,
    value: Any,
    path: str = "",
    other: Readers | None = None,
) -> Any:
    """Return what :func:`plain` made JSON of, as an instance of ``kind``, or raise WrongField with the ``path`` to it.

    ``kind`` is a dataclass, or what stands in a type hint of one; ``other`` reads instances of some classes.
    """
    if other and kind in other:
        return other[kind](value, path)
    if kind is Any:
        return _any(value)
    origin = get_origin(kind)
    arguments = get_args(kind)
    if isinstance(kind, UnionType):
        # The only unions are those with None.
        if value is None:
            return None
        return read_as(arguments[0], value, path, other)
    if origin is dict:
        _check(dict, value, path, "an object")
        kind_of_items = arguments[1]
        items = {}
        for key, item in value.items():
            items[key] = read_as(kind_of_items, item, f"{path}.{key}", other)
        return items
    if origin in (list, tuple):
        return origin(_items(kind, value, path, other))
    if dataclasses.is_dataclass(kind):
        return _instance(kind, value, path, other)
    return _scalar(kind, value, path)


_hints = lru_cache(maxsize=64)(get_type_hints)


def _instance(
    kind: Any,
    value: Any,
    path: str,
    other: Readers | None,
) -> Any:
    _check(dict, value, path, "an object")
    hints = _hints(kind)
    fields = {}
    for field in dataclasses.fields(kind):
        name = field.name
        place = f"{path}.{name}" if path else name
        # A missing field must not read as its default, which would say that all is well.
        if name not in value:
            raise WrongField(place, "is missing")
        fields[name] = read_as(hints[name], value[name], place, other)
    return kind(**fields)


def _items(
    kind: Any,
    value: Any,
    path: str,
    other: Readers | None,
) -> Iterator[Any]:
    arguments = get_args(kind)
    _check(list, value, path, "a list")
    if get_origin(kind) is list or arguments[-1] is ...:
        arguments = arguments[:1] * len(value)
    if len(value) != len(arguments):
        raise WrongField(path, f"expected {len(arguments)} elements, got {len(value)}")
    for index, item in enumerate(value):
        yield read_as(arguments[index], item, f"{path}[{index}]", other)


def _check(kind: Any, value: Any, path: str, expected: str) -> None:
    if isinstance(value, kind):
        return
    text = repr(value)[:60]
    raise WrongField(path, f"expected {expected}, got {text}")


def _scalar(kind: Any, value: Any, path: str) -> Any:
    expected = SCALARS[kind]
    allowed = kind
    if kind is float:
        allowed = (int, float)
        special = value.get("number") if isinstance(value, dict) else value
        if special in SPECIAL:
            return float(special)
    _check(allowed, value, path, expected)
    # To Python a bool is a number, and to JSON it is none.
    wrong = isinstance(value, bool) and kind is not bool
    if wrong or (kind is int and value < 0):
        raise WrongField(path, f"expected {expected}, got {value!r}")
    return kind(value)


def _any(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_any, value))
    if isinstance(value, dict) and set(value) == {"number"}:
        return float(value["number"])
    return value
