"""Collectives of OSS and ShardedDataParallel, means that all ranks get, and the meeting of ranks before a rare one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.comm import tree, watchdog
from fsshard.comm.agreement import broadcast_tensors
from fsshard.errors import NotTogether, RankMismatch
from fsshard.torch_private.c10d import device_types

MOST_BYTES = 25 * 2**20  # that are sent together, as by DDP


def come_together(group: Any, call: str) -> None:
    """Return when all ranks of a group have come for the same call, as users write it; no collective of the group.

    Raises:
        NotTogether: a rank has ended, waits in another collective, came for something else, or has failed.
    """
    if not isinstance(group, dist.ProcessGroup) or group.size() == 1:
        return
    try:
        notes = watchdog.meet(group, call, call)
    except RankMismatch as error:
        raise NotTogether(str(error)) from error
    if len(set(notes)) > 1:
        called = "; ".join(f"rank {rank} called {text}" for rank, text in enumerate(notes))
        raise NotTogether(f"{call.partition('(')[0]} must be called alike on all ranks of the group: {called}")


def all_reduced(value: Tensor, op: dist.ReduceOp.RedOpType, group: Any = None) -> Tensor:
    """Reduce a value, which may be written to, over the ranks of a group, None being all; on the value's device."""
    if not dist.is_initialized():
        return value
    group = dist.group.WORLD if group is None else group
    kinds = [device.type for device in device_types(group)]
    travels = value if value.device.type in kinds else value.to(kinds[0])  # NCCL takes nothing from the CPU
    dist.all_reduce(travels, op=op, group=group)
    return travels.to(value.device)


def used_anywhere(flags: Sequence[bool], group: dist.ProcessGroup, device: torch.device) -> list[bool]:
    """Tell of each flag whether any rank has set it. Collective."""
    used = torch.tensor(flags, dtype=torch.uint8, device=device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in used.tolist()]


def runs(tensors: Iterable[Tensor], elements: int = 0) -> Iterator[list[Tensor]]:
    """Cut a list of tensors into runs of one device and at most 25 MiB each, and if positive of so many numbers."""
    run: list[Tensor] = []
    count = size = 0
    for tensor in tensors:
        full = size + tensor.nbytes > MOST_BYTES or (elements > 0 and count + tensor.numel() > elements)
        if run and (full or tensor.device != run[0].device):
            yield run
            run, count, size = [], 0, 0
        run.append(tensor)
        count, size = count + tensor.numel(), size + tensor.nbytes
    if run:
        yield run


# ------------------------------------------------------------------------------------------------ means


def as_dense(gradient: Tensor) -> Tensor:
    """Return the gradient, or a dense tensor of a sparse one's numbers."""
    # DDP coalesces it, which adds up the numbers of an index in another order than to_dense does (torch 2.13).
    gradient = gradient.coalesce() if gradient.is_sparse else gradient
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def average(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Put the mean over a group's gradients into each rank's, with zeros where there is none. Collective."""
    # They are added up in their own dtype: a mean that they were added to would be rounded once more in another.
    by_dtype = [[p for p in parameters if p.dtype == dtype] for dtype in dict.fromkeys(p.dtype for p in parameters)]
    for run in (run for same in by_dtype for run in runs(same)):
        parts = []
        for parameter in run:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else as_dense(parameter.grad.detach())
            parts.append(gradient.resolve_conj().reshape(-1))
        flat = torch.cat(parts)
        real = torch.view_as_real(flat) if flat.is_complex() else flat
        tree.all_reduce(real.view(-1), group, 1.0 / group.size())
        for parameter, mean in zip(run, flat.split([p.numel() for p in run]), strict=True):
            if parameter.grad is None or parameter.grad.layout is not torch.strided or parameter.grad.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.copy_(mean.view(parameter.size()))


@torch.no_grad()
def share_means(
    parameters: Sequence[nn.Parameter], owners: Sequence[int], has_mean: Sequence[bool], group: dist.ProcessGroup
) -> None:
    """Give every rank the means that owners have, before ``no_sync`` adds to them: as under DDP. Collective."""
    # Each rank's later gradients are added to the mean one by one under DDP; added up by themselves first, their sum
    # would be rounded differently.
    if not parameters:
        return
    shared = used_anywhere(has_mean, group, parameters[0].device)
    chosen = [(p, owner) for p, owner, flag in zip(parameters, owners, shared, strict=True) if flag]
    for owner in dict.fromkeys(owner for _, owner in chosen):
        theirs = [parameter for parameter, o in chosen if o == owner]
        means = [p.grad if owner == group.rank() and p.grad is not None else torch.zeros_like(p) for p in theirs]
        broadcast_tensors(means, group, owner)
        if owner != group.rank():
            for parameter, mean in zip(theirs, means, strict=True):
                parameter.grad = mean if parameter.grad is None else mean.add_(parameter.grad)
