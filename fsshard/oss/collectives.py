"""Collectives that notice when another rank is at a different call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.oss.collective_watch import CollectiveWatch
from fsshard.oss.parameter_buffers import as_bytes
from fsshard.torch_private.c10d import device_types
from fsshard.torch_private.tensors import foreach_copy_

__all__ = ["Wait", "all_reduced", "broadcast_coalesced"]

Wait = Callable[[Any, str], None]
"""``OSS._wait``: takes the work of an asynchronous collective, in the same order on all ranks, and says what it is."""

_BYTES = 25 * 2**20  # that are sent together
_IN_FLIGHT = 2


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
    kinds = [device.type for device in device_types(group)]
    travels = value if value.device.type in kinds else value.to(kinds[0])  # NCCL takes nothing from the CPU
    watch = CollectiveWatch.of(group)
    watch.check()
    watch.wait(dist.all_reduce(travels, op=op, group=group, async_op=True), where)
    return travels.to(value.device)


@torch.no_grad()
def broadcast_coalesced(
    tensors: Iterable[Tensor], source: int, group: dist.ProcessGroup, wait: Wait, where: str
) -> None:
    """One rank's values to every rank, of whatever dtypes. Collective.

    torch's own ``_broadcast_coalesced`` waits until the group's time is up.

    Args:
        tensors: of the same shapes and dtypes on all ranks; are written to, but on ``source``.
        source: its rank in the group.
        group: the ranks.
        wait: see :data:`Wait`.
        where: what this is part of.
    """
    sends = group.rank() == source
    flying: deque[tuple[Any, Tensor, list[Tensor]]] = deque()

    def land() -> None:
        work, flat, into = flying.popleft()
        wait(work, where)
        if not sends:
            parts = flat.split([tensor.numel() for tensor in into])
            foreach_copy_(into, [part.view(t.shape) for part, t in zip(parts, into, strict=True)])

    for run in _runs(tensors):
        if sends:
            flat = torch.cat([tensor.reshape(-1) for tensor in run])
        else:
            flat = run[0].new_empty(sum(tensor.numel() for tensor in run))
        flying.append((dist.broadcast(as_bytes(flat), group=group, group_src=source, async_op=True), flat, run))
        if len(flying) == _IN_FLIGHT:
            land()
    while flying:
        land()


def _runs(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one device and dtype each, cut where they are many bytes."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor.detach())
    for same in by_kind.values():
        run: list[Tensor] = []
        size = 0
        for tensor in same:
            bytes_ = tensor.numel() * tensor.element_size()
            if run and size + bytes_ > _BYTES:
                yield run
                run, size = [], 0
            run.append(tensor)
            size += bytes_
        yield run
