"""The release of FairScale whose names are served."""

from __future__ import annotations

from ..not_served import missing_from

__all__ = ["__version_tuple__"]

__getattr__ = missing_from(__name__)

__version_tuple__ = (0, 4, 13)
