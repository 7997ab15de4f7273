"""The release of FairScale whose names are served."""

from __future__ import annotations

__all__ = ["__version_tuple__"]

__version_tuple__ = (0, 4, 13)
