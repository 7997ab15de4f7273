"""Errors of fsshard.compat.fairscale: fsshard's own, which are also of the kinds that FairScale's users catch."""

from __future__ import annotations

from fsshard.errors import FsshardError, GradientError, MisuseError

__all__ = ["GradientError", "MisuseError", "NestedContext", "NotServed", "RedirectError"]


class NestedContext(FsshardError, NotImplementedError):
    """``enable_wrap`` inside of ``enable_wrap``."""


class NotServed(FsshardError, ModuleNotFoundError):
    """A name of FairScale that fsshard does not have; the text says what it has, and what to use.

    Attributes:
        name: as in FairScale, such as ``"fairscale.optim.oss.OSS"``; of a module that was imported by the front's own
            name, that one.
    """

    def __init__(self, message: str, name: str) -> None:
        ImportError.__init__(self, message, name=name)


class RedirectError(FsshardError, RuntimeError):
    """The redirect comes too late, or another one is there."""
