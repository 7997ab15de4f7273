"""Collectives of OSS and ShardedDataParallel, and the meeting of ranks before a rare one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fsshard.launching.hang_diagnosis  # noqa: F401  # reads where a rank waits from its stack
from fsshard.comm import presence, whereabouts
from fsshard.comm.waiting import meet
from fsshard.errors import NotTogether, RankMismatch
from fsshard.oss.parameter_buffers import as_bytes
from fsshard.torch_private.c10d import device_types
from fsshard.torch_private.tensors import foreach_copy_

__all__ = ["all_reduced", "be_found", "broadcast_coalesced", "come_together", "seen_waiting"]

_BYTES = 25 * 2**20  # that are sent together
_IN_FLIGHT = 2


def be_found(group: Any) -> None:
    """Let ranks that wait for this one find out where it is; on every rank alike. No collective."""
    if isinstance(group, dist.ProcessGroup):  # tests of FairScale's have some that only look like one
        presence.join(group)
        whereabouts.answer()


def seen_waiting(group: dist.ProcessGroup, what: str) -> AbstractContextManager[None]:
    """Context in which this rank waits for collectives that it has begun: a stack shows nothing of ``Work.wait``."""
    watch = whereabouts.watch_of_job()
    return nullcontext() if watch is None else watch.waiting(what, tuple(dist.get_process_group_ranks(group)))


def come_together(group: Any, call: str, failure: Exception | None = None) -> None:
    """Return when all ranks have come for the same call; no collective of the group.

    Args:
        group: whose ranks; nothing to do for what only looks like a group, or has one rank.
        call: what was called, with its arguments, as users write it.
        failure: why this rank cannot take part; the others raise.

    Raises:
        NotTogether: a rank has ended, waits in another collective, came for something else, or has failed.
    """
    if not isinstance(group, dist.ProcessGroup) or group.size() == 1:
        return
    note = call if failure is None else f"{call}, and failed there: {type(failure).__name__}: {failure}"
    try:
        notes = meet(group, call, note)
    except RankMismatch as error:
        raise NotTogether(str(error)) from error
    if len(set(notes)) > 1:
        called = "; ".join(f"rank {rank} called {text}" for rank, text in enumerate(notes))
        raise NotTogether(f"{call.partition('(')[0]} must be called alike on all ranks of the group: {called}")


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
    kinds = [device.type for device in device_types(group)]
    travels = value if value.device.type in kinds else value.to(kinds[0])  # NCCL takes nothing from the CPU
    dist.all_reduce(travels, op=op, group=group)
    return travels.to(value.device)


@torch.no_grad()
def broadcast_coalesced(tensors: Iterable[Tensor], source: int, group: dist.ProcessGroup) -> None:
    """One rank's values to every rank, of whatever dtypes. Collective.

    Args:
        tensors: of the same shapes and dtypes on all ranks; are written to, but on ``source``.
        source: its rank in the group.
        group: the ranks.
    """
    sends = group.rank() == source
    flying: deque[tuple[Any, Tensor, list[Tensor]]] = deque()

    def land() -> None:
        work, flat, into = flying.popleft()
        work.wait()
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
