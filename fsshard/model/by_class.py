"""What is found out about a class once, and forgotten with it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

__all__ = ["once_per_class"]

T = TypeVar("T")


def once_per_class(find: Callable[[type], T]) -> Callable[[type], T]:
    """As ``functools.cache``, which would keep each class for ever.

    A class in front of a user's knows how parameters are divided, so a mesh, whose process groups would stay alive
    after ``destroy_process_group()``, each with a thread of gloo's.
    """
    known: WeakKeyDictionary[type, T] = WeakKeyDictionary()

    @functools.wraps(find)
    def found(kind: type) -> T:
        try:
            return known[kind]
        except KeyError:
            return known.setdefault(kind, find(kind))

    return found
