"""Facts that a process passes on to those that it starts, since their imports may not repeat them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Handed", "hand_on", "handed_on", "take_over"]

Handed = tuple[tuple[Callable[[Any], None], Any], ...]

_handed: dict[str, tuple[Callable[[Any], None], Any]] = {}


def hand_on(key: str, take: Callable[[Any], None], value: object) -> None:
    """Have each process that this one starts, or gives work to, call ``take(value)`` before its work from now on.

    Args:
        key: what it is; what was handed on under the same key before is forgotten.
        take: a function at the top level of a module, cheap to import and to call.
        value: picklable, and comparable.
    """
    _handed[key] = (take, value)


def handed_on() -> Handed:
    """All of it, to be sent to another process."""
    return tuple(_handed.values())


def take_over(handed: Handed) -> None:
    """Do what is to be done, in the other process."""
    for take, value in handed:
        take(value)
