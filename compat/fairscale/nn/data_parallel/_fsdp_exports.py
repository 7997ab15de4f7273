"""Whether a state dict of a FullyShardedDataParallel is being made, and what of it has been copied."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["copied", "is_exporting", "one_export"]

copied: ContextVar[set[int] | None] = ContextVar("copied", default=None)
"""Ids of the copies in the state dict that is being made; None while none is."""


@contextmanager
def one_export() -> Iterator[bool]:
    """While a state dict is made: what a wrapper has copied, those around it need not copy again.

    Yields whether this is the outermost wrapper of it.
    """
    if copied.get() is not None:
        yield False
        return
    token = copied.set(set())
    try:
        yield True
    finally:
        copied.reset(token)


def is_exporting() -> bool:
    """Return whether a wrapper's state dict is being made."""
    return copied.get() is not None
