"""Other libraries' names over fsshard. Each package imports its library; this one imports nothing until asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .redirect import install, uninstall

__all__ = ["install", "uninstall"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import redirect

    return getattr(redirect, name)
