"""The name by which scripts know ``Recipe`` and ``from_lightning``; recipes are in :mod:`fsshard.recipes.recipe`."""

from __future__ import annotations

import importlib
from typing import Any

from fsshard.recipes.recipe import Recipe, RecipeLike, Split, resolve

__all__ = ["Recipe", "RecipeLike", "Split", "resolve"]


def __getattr__(name: str) -> Any:
    """Import ``from_lightning``, which is documented as of this module, when it is asked for."""
    if name == "from_lightning":
        return importlib.import_module("fsshard.parity.trainers").from_lightning
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
