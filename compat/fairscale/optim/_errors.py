"""Errors of OSS: fsshard's own, and of the kinds that FairScale 0.4.13 and torch raise in the same place."""

from __future__ import annotations

from fsshard.errors import FsshardError, RankMismatch, StateDictError

__all__ = ["NotConsolidated", "NotCopyable", "NotTogether", "OptimizerStateMismatch"]


class NotConsolidated(FsshardError, RuntimeError):
    """The whole state was asked for on a rank that has only its own part of it."""


class NotCopyable(FsshardError, TypeError):
    """A sharded optimizer was to be copied or pickled, and it belongs to its process group."""


class NotTogether(RankMismatch):
    """Some ranks are in a collective of OSS and others are elsewhere; raised on all of them."""


class OptimizerStateMismatch(StateDictError, ValueError):
    """A state dict has other groups, parameters or shapes. Nothing has been loaded."""
