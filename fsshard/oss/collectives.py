"""Collectives of OSS and ShardedDataParallel, means that all ranks get, and the meeting of ranks before a rare one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.comm import tree, watchdog
from fsshard.comm.agreement import broadcast_tensors
from fsshard.errors import NotTogether, RankMismatch
from fsshard.torch_private.c10d import device_types

# Most bytes that are sent together, as by DDP.
MOST_BYTES = 25 * 2**20


def come_together(group: Any, call: str) -> None:
    """Return when all ranks of a group have come for the same call, as users write it; no collective of the group.

    Raises:
        NotTogether: a rank has ended, waits in another collective, came for something else, or has failed.
    """
    if not isinstance(group, dist.ProcessGroup) or group.size() == 1:
        return
    try:
        calls = watchdog.meet(group, call, call)
    except RankMismatch as error:
        raise NotTogether(str(error)) from error
    if len(set(calls)) > 1:
        name = call.partition("(")[0]
        texts = [f"rank {rank} called {text}" for rank, text in enumerate(calls)]
        raise NotTogether(f"{name} must be called alike on all ranks of the group: {'; '.join(texts)}")


def all_reduced(value: Tensor, op: dist.ReduceOp.RedOpType, group: Any = None) -> Tensor:
    """Reduce a value, which may be written to, over the ranks of a group, None being all; on the value's device."""
    if not dist.is_initialized():
        return value
    if group is None:
        group = dist.group.WORLD
    device = value.device
    kinds = [each.type for each in device_types(group)]
    # NCCL takes nothing from the CPU.
    if device.type not in kinds:
        value = value.to(kinds[0])
    dist.all_reduce(value, op=op, group=group)
    return value.to(device)


def used_anywhere(
    flags: Sequence[bool],
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[bool]:
    """Tell of each flag whether any rank has set it. Collective."""
    used = torch.tensor(flags, dtype=torch.uint8, device=device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    return list(map(bool, used.tolist()))


def runs(tensors: Iterable[Tensor], elements: int = 0) -> Iterator[list[Tensor]]:
    """Cut a list of tensors into runs of one device and at most 25 MiB each, and if positive of so many numbers."""
    run: list[Tensor] = []
    count = 0
    size = 0
    for tensor in tensors:
        count += tensor.numel()
        size += tensor.nbytes
        is_full = size > MOST_BYTES or 0 < elements < count
        if run and (is_full or tensor.device != run[0].device):
            yield run
            run = []
            count = tensor.numel()
            size = tensor.nbytes
        run.append(tensor)
    if run:
        yield run


# ------------------------------------------------------------------------------------------------ means


def as_dense(gradient: Tensor) -> Tensor:
    """Return the gradient, or a dense tensor of a sparse one's numbers."""
    # DDP coalesces it, which adds up the numbers of an index in another order than to_dense does (torch 2.13).
    if gradient.is_sparse:
        gradient = gradient.coalesce()
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    return gradient


def average(
    parameters: Sequence[nn.Parameter],
    group: dist.ProcessGroup,
    reduce_dtypes: Mapping[nn.Parameter, torch.dtype | None],
) -> None:
    """Put the mean over a group's gradients into each rank's, with zeros where there is none. Collective.

    Args:
        parameters: the same on all ranks.
        group: the ranks.
        reduce_dtypes: by parameter the dtype in which its gradient is sent and added up; else its own.
    """
    by_dtype = defaultdict(list)
    for parameter in parameters:
        dtype = reduce_dtypes.get(parameter) or parameter.dtype
        by_dtype[dtype].append(parameter)
    for dtype, same_dtype in by_dtype.items():
        for run in runs(same_dtype):
            _average_run(run, group, dtype)


def _average_run(run: Sequence[Tensor], group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    flat = torch.cat([_flat_gradient(parameter).to(dtype) for parameter in run])
    real = torch.view_as_real(flat) if flat.is_complex() else flat
    tree.all_reduce(real.view(-1), group, 1.0 / group.size())
    means = flat.split([parameter.numel() for parameter in run])
    for parameter, mean in zip(run, means, strict=True):
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided or gradient.requires_grad:
            gradient = torch.zeros_like(parameter)
            parameter.grad = gradient
        gradient.copy_(mean.view(parameter.size()))


def _flat_gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter).reshape(-1)
    gradient = as_dense(parameter.grad.detach())
    return gradient.resolve_conj().reshape(-1)


@torch.no_grad()
def share_means(
    parameters: Sequence[nn.Parameter],
    owners: Sequence[int],
    has_mean: Sequence[bool],
    group: dist.ProcessGroup,
) -> None:
    """Give every rank the means that owners have, before ``no_sync`` adds to them: as under DDP. Collective."""
    # Each rank's later gradients are added to the mean one by one under DDP; added up by themselves first, their sum
    # would be rounded differently.
    if not parameters:
        return
    shared = used_anywhere(has_mean, group, parameters[0].device)
    by_owner = defaultdict(list)
    for parameter, owner, is_shared in zip(parameters, owners, shared, strict=True):
        if is_shared:
            by_owner[owner].append(parameter)
    for owner, owned in by_owner.items():
        is_own = owner == group.rank()
        means = []
        for parameter in owned:
            mean = parameter.grad if is_own else None
            if mean is None:
                mean = torch.zeros_like(parameter)
            means.append(mean)
        broadcast_tensors(means, group, owner)
        if is_own:
            continue
        for parameter, mean in zip(owned, means, strict=True):
            if parameter.grad is not None:
                mean = mean.add_(parameter.grad)
            parameter.grad = mean
