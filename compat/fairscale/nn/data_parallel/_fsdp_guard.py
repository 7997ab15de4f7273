"""Detects that some ranks are in a collective of FullyShardedDataParallel while others are elsewhere.

Both would hang until the group's own time is up, or take each other's data for theirs. Before calls that are rare,
ranks meet in the group's store.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fsshard.oss.collective_watch import CollectiveWatch

__all__ = ["meet", "reduce"]

_CLASS = "FullyShardedDataParallel"


def meet(group: Any, call: str) -> None:
    """Return when all ranks have come for the same call.

    Raises:
        NotTogether: a rank is elsewhere.
    """
    if _several(group):
        CollectiveWatch.of(group).meet(f"{_CLASS}.{call}()")


def reduce(value: torch.Tensor, op: Any, group: Any, call: str) -> None:
    """All-reduce in place, looking whether another rank is elsewhere.

    Raises:
        NotTogether: it is.
    """
    work = dist.all_reduce(value, op=op, group=group, async_op=True)
    if work is not None:
        CollectiveWatch.of(group).wait(work, f"{_CLASS}.{call}()")


def _several(group: Any) -> bool:
    return isinstance(group, dist.ProcessGroup) and group.size() > 1  # some only look like one
