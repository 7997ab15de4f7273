"""``fairscale.nn.data_parallel.sharded_ddp``: over :class:`fsshard.oss.sharded_ddp.ShardedDataParallel`."""

from __future__ import annotations

from typing import Any

from torch import nn

from fsshard.oss import sharded_ddp

from ....not_served import missing_from
from ....report import called

__all__ = ["ShardedDataParallel"]

__getattr__ = missing_from(__name__)


class ShardedDataParallel(sharded_ddp.ShardedDataParallel):
    """Data parallelism over an OSS: :class:`fsshard.oss.sharded_ddp.ShardedDataParallel`, as FairScale calls it.

    Args:
        module: on one kind of device. Trainable parameters of it that no optimizer has are reduced to all ranks.
        sharded_optimizer: the OSS that updates its parameters, or several.
        process_group: the ranks; None is the optimizers'.
        broadcast_buffers: give all ranks the first one's buffers before every forward outside of :meth:`no_sync`.
        sync_models_at_startup: give all ranks the first one's parameters and buffers now.
        reduce_buffer_size: at most so many numbers are sent together; 0 leaves it to this class, and lets go of what
            was sent.
        auto_refresh_trainable: see at each forward with gradients whether parameters were frozen or unfrozen; else call
            :meth:`refresh_trainable`.
        reduce_fp16: gradients are sent, and are added up, in float16.
        warn_on_trainable_params_changed: log a warning when that happens.

    Raises:
        MisuseError: the module has no parameters or several kinds of devices; the optimizer is no OSS, or of another
            group.
        RankMismatch: the module is not the same on all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        sharded_optimizer: Any,
        process_group: Any = None,
        broadcast_buffers: bool = True,
        sync_models_at_startup: bool = True,
        reduce_buffer_size: int = 2**23,
        auto_refresh_trainable: bool = True,
        reduce_fp16: bool = False,
        warn_on_trainable_params_changed: bool = True,
    ) -> None:
        called("fairscale.nn.data_parallel.ShardedDataParallel", "fsshard, by torch.distributed.all_to_all_single")
        super().__init__(
            module,
            sharded_optimizer,
            process_group,
            broadcast_buffers,
            sync_models_at_startup,
            reduce_buffer_size,
            auto_refresh_trainable,
            reduce_fp16,
            warn_on_trainable_params_changed,
        )
