"""``fairscale.nn.misc``."""

from __future__ import annotations

from ....not_served import missing_from
from ..checkpoint import checkpoint_wrapper

__all__ = ["checkpoint_wrapper"]

__getattr__ = missing_from(__name__)
