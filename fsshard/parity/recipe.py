"""Names of recipes under a path that scripts know; ``from_lightning`` is :mod:`fsshard.compat.lightning`'s."""

from __future__ import annotations

import importlib
from typing import Any

from fsshard.recipes.recipe import Recipe, RecipeLike, Split, resolve

__all__ = ["Recipe", "RecipeLike", "Split", "resolve"]


def __getattr__(name: str) -> Any:
    if name != "from_lightning":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("fsshard.compat.lightning").from_lightning
