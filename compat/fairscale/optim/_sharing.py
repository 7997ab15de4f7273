"""One number of all ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor


def all_reduced(value: Tensor, op: dist.ReduceOp.RedOpType, group: Any = None) -> Tensor:
    """Reduce over the ranks of a group; nothing to do in one process.

    Args:
        value: may be written to.
        op: such as ``dist.ReduceOp.SUM``.
        group: None is all ranks.

    Returns:
        The result, on the device where ``value`` is.
    """
    if not dist.is_initialized():
        return value
    group = dist.group.WORLD if group is None else group
    kinds = [device.type for device in group._device_types]
    travels = value if value.device.type in kinds else value.to(kinds[0])  # NCCL takes nothing from the CPU
    dist.all_reduce(travels, op=op, group=group)
    return travels.to(value.device)
