"""``fairscale.nn.data_parallel``."""

from __future__ import annotations

from ....not_served import missing_from
from .sharded_ddp import ShardedDataParallel

__all__ = ["ShardedDataParallel"]

__getattr__ = missing_from(__name__)
