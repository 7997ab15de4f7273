"""``fairscale.nn.data_parallel``: training on several ranks."""

from __future__ import annotations

from ....not_served import missing_from
from .fully_sharded_data_parallel import (
    FullyShardedDataParallel,
    TrainingState,
    auto_wrap_bn,
    get_fsdp_instances,
    no_pre_load_state_dict_hook,
)
from .sharded_ddp import ShardedDataParallel

__all__ = [
    "FullyShardedDataParallel",
    "ShardedDataParallel",
    "TrainingState",
    "auto_wrap_bn",
    "get_fsdp_instances",
    "no_pre_load_state_dict_hook",
]

__getattr__ = missing_from(__name__)
