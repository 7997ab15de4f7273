"""Replaces one of torch's functions for a while, and restores it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_NOTHING: Any = object()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set ``owner.name`` to ``value``, within; afterwards to what it was, or to nothing where ``owner`` had none.

    Args:
        owner: a module, a class or an object.
        name: of an attribute; it need not exist.
        value: in its place.
    """
    before = vars(owner).get(name, _NOTHING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _NOTHING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
