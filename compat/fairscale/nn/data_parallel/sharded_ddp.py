"""``fairscale.nn.data_parallel.sharded_ddp``: over :class:`fsshard.oss.sharded_ddp.ShardedDataParallel`."""

from __future__ import annotations

import functools
from typing import Any

from fsshard.oss import sharded_ddp

from ....not_served import missing_from
from ....report import called

__all__ = ["ShardedDataParallel"]

__getattr__ = missing_from(__name__)


class ShardedDataParallel(sharded_ddp.ShardedDataParallel):
    __doc__ = sharded_ddp.ShardedDataParallel.__doc__

    @functools.wraps(sharded_ddp.ShardedDataParallel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        called("fairscale.nn.data_parallel.ShardedDataParallel", "fsshard, by torch.distributed.all_to_all_single")
        super().__init__(*args, **kwargs)
