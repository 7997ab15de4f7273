"""Dataclasses as JSON and back: numbers as the shortest text that reads back to the same bits, and no pickle."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from fsshard.errors import ConfigurationError

__all__ = ["WrongField", "plain", "read_as"]

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
    """``value`` with objects for dataclasses, and lists for tuples.

    Args:
        value: dataclasses, containers, texts and numbers.
        special: what stands for the numbers of :data:`SPECIAL`.
        other: class -> how its instances are written.
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
    """Return what :func:`plain` made JSON of, as an instance of ``kind``.

    Args:
        kind: a dataclass, or what stands in a type hint of one. A field may be absent where its metadata says
            ``optional``: files were written before there was one.
        value: parsed JSON.
        path: where it is.
        other: class -> how its instances are read, from the value and its place.

    Raises:
        WrongField: something else is there.
    """
    if other and kind in other:
        return other[kind](value, path)
    if isinstance(kind, UnionType):
        return None if value is None else read_as(get_args(kind)[0], value, path, other)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        given = _checked(dict, value, path, "an object")
        found = {}
        for name, (hint, required) in _hints(kind).items():
            if name in given:
                found[name] = read_as(hint, given[name], _at(path, name), other)
            elif required:
                raise WrongField(_at(path, name), "is missing")
        return kind(**found)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is dict:
        given = _checked(dict, value, path, "an object")
        return {key: read_as(inner[1], item, _at(path, key), other) for key, item in given.items()}
    if origin in (list, tuple):
        given = _checked(list, value, path, "a list")
        fixed = origin is tuple and inner[-1] is not ...
        if fixed and len(given) != len(inner):
            raise WrongField(path, f"expected {len(inner)} elements, got {len(given)}")
        kinds = inner if fixed else inner[:1] * len(given)
        return origin(
            read_as(one, item, f"{path}[{number}]", other)
            for number, (one, item) in enumerate(zip(kinds, given, strict=True))
        )
    return _scalar(kind, value, path)


@lru_cache(maxsize=64)
def _hints(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Return each field's type hint, and whether it must be there: a lost one must not read as its default."""
    hints = get_type_hints(kind)
    return {f.name: (hints[f.name], not f.metadata.get("optional")) for f in dataclasses.fields(kind)}


def _at(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _checked(kind: Any, value: Any, path: str, expected: str) -> Any:
    if not isinstance(value, kind):
        raise WrongField(path, f"expected {expected}, got {repr(value)[:60]}")
    return value


def _scalar(kind: Any, value: Any, path: str) -> Any:
    if kind is Any:
        return _any(value)
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
