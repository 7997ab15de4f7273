"""``fairscale.optim.oss``: FairScale's OSS over :class:`fsshard.oss.optimizer.OSS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.optim import SGD, Optimizer

from fsshard.errors import UnsupportedByBackend
from fsshard.oss import optimizer

from ...not_served import missing_from
from ...report import called

__all__ = ["OSS"]

__getattr__ = missing_from(__name__)


class OSS(optimizer.OSS):
    """A torch optimizer whose state is divided among ranks: :class:`fsshard.oss.optimizer.OSS`, as FairScale calls it.

    Args:
        params, optim, group, **default: as there.
        broadcast_buffer_size: accepted and ignored, as in FairScale 0.4.13.
        broadcast_fp16: False. See :attr:`broadcast_fp16`.
        force_broadcast_object: accepted; the state is sent one way only.
    """

    def __init__(
        self,
        params: Any,
        optim: Callable[..., Optimizer] = SGD,
        group: dist.ProcessGroup | None = None,
        broadcast_buffer_size: int = -1,
        broadcast_fp16: bool = False,
        force_broadcast_object: bool = False,
        **default: Any,
    ) -> None:
        called("fairscale.optim.oss.OSS", "torch.optim, its state sharded by owner")
        self.broadcast_fp16 = broadcast_fp16
        self.force_broadcast_object = force_broadcast_object
        super().__init__(params, optim, group, **default)

    @property
    def broadcast_fp16(self) -> bool:
        """False. FairScale 0.4.13 rounds all parameters, the owner's own included, to float16 after every step: more
        than a small learning rate moves them. To set it to true raises UnsupportedByBackend.
        """
        return False

    @broadcast_fp16.setter
    def broadcast_fp16(self, value: bool) -> None:
        if value:
            raise UnsupportedByBackend(
                f"broadcast_fp16={value!r} (it rounds the weights themselves to float16 at every step)",
                "OSS",
                "leave it False, which sends them as they are; for half the bytes keep the model itself in bfloat16: "
                "model.to(torch.bfloat16) before OSS is built",
            )
