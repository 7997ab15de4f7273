"""One number of all ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from ._meeting import Meeting


def all_reduced(
    value: Tensor, op: dist.ReduceOp.RedOpType, group: Any = None, where: str = "GradScaler.unscale_()"
) -> Tensor:
    """Reduce over the ranks of a group; nothing to do in one process.

    Args:
        value: may be written to.
        op: such as ``dist.ReduceOp.SUM``.
        group: None is all ranks.
        where: what is going on, for the message of the rank that waits in vain.

    Returns:
        The result, on the device where ``value`` is.

    Raises:
        NotTogether: another rank waits for this one in a call that all must make.
    """
    if not dist.is_initialized():
        return value
    group = dist.group.WORLD if group is None else group
    kinds = [device.type for device in group._device_types]
    travels = value if value.device.type in kinds else value.to(kinds[0])  # NCCL takes nothing from the CPU
    meeting = Meeting.of(group)
    meeting.check()
    meeting.wait(dist.all_reduce(travels, op=op, group=group, async_op=True), where)
    return travels.to(value.device)
