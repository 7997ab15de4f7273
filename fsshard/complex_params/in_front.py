"""A class in front of a user's, which instances of the user's can be turned into."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

__all__ = ["class_in_front", "has_own_layout"]

_ORDER = "_fsshard_order"


def class_in_front(front: type, origin: type[nn.Module], name: str, members: dict[str, Any], kind: Any = None) -> Any:
    """``class name(front, origin)``, to whose ``__class__`` a module of ``origin`` can be set.

    Python refuses that ("object layout differs") where the first base of ``origin``, or of a base of it, has no
    attributes of its own: with ``class Net(Generic[T], nn.Module)`` it is ``Net`` that brings them, and a class that
    inherits from ``front`` first has them from there. Such a class inherits from ``origin`` first, and looks methods
    up in ``front`` first all the same.

    Args:
        front: whose methods win.
        origin: the user's class.
        name: of the new class.
        members: of the new class.
        kind: its metaclass; None: that of ``origin``.
    """
    kind = type(origin) if kind is None else kind
    if not has_own_layout(origin):
        return kind(name, (front, origin), members)
    order = (*(base for base in front.__mro__ if base not in origin.__mro__), *origin.__mro__)
    return _ordering(kind)(name, (origin, front), {**members, _ORDER: order})


def has_own_layout(origin: type) -> bool:
    """Return whether modules of a class get their attributes from another class than ``nn.Module``."""
    while origin.__base__ is not None and origin.__base__.__dictoffset__:
        origin = origin.__base__
    return origin is not nn.Module


@cache
def _ordering(metaclass: type) -> Any:
    def mro(cls: Any) -> Any:
        order = vars(cls).get(_ORDER)
        return type.mro(cls) if order is None else [cls, *order]

    return type(metaclass.__name__, (metaclass,), {"mro": mro})
