"""Other people's front doors. Each package below imports its vendor; this one imports nothing until it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import use
    from .real import load_real
    from .redirect import install, uninstall

__all__ = ["install", "load_real", "uninstall", "use"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import engine, real, redirect

    return getattr({"load_real": real, "use": engine}.get(name, redirect), name)
