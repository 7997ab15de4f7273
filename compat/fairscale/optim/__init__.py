"""``fairscale.optim``: optimizers whose state is sharded, on native torch."""

from __future__ import annotations

from ...not_served import missing_from
from .grad_scaler import GradScaler
from .oss import OSS

__all__ = ["OSS", "GradScaler"]

__getattr__ = missing_from(__name__)
