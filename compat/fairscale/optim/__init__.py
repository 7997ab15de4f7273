"""``fairscale.optim``: optimizers whose state is sharded, on native torch."""

from __future__ import annotations

from ...not_served import missing_from
from .oss import OSS

__all__ = ["OSS"]

__getattr__ = missing_from(__name__)
