"""``fairscale.nn``. As there, its attribute ``wrap`` is the function, which hides the sub-package."""

from __future__ import annotations

from ...not_served import missing_from
from .checkpoint import checkpoint_wrapper
from .data_parallel import FullyShardedDataParallel, ShardedDataParallel
from .wrap import auto_wrap, config_auto_wrap_policy, default_auto_wrap_policy, enable_wrap, wrap

__all__ = [
    "FullyShardedDataParallel",
    "ShardedDataParallel",
    "auto_wrap",
    "checkpoint_wrapper",
    "config_auto_wrap_policy",
    "default_auto_wrap_policy",
    "enable_wrap",
    "wrap",
]

__getattr__ = missing_from(__name__)
