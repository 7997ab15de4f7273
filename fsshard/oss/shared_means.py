"""Means that every rank gets: of parameters without an owner, and before ``no_sync`` adds to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from fsshard.oss.collectives import broadcast_coalesced, runs_by_dtype, used_anywhere

__all__ = ["average", "share_means"]


def average(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Put the mean over a group's gradients into each rank's, with zeros where there is none. Collective.

    They are added up in their own dtype: a mean that they were added to would be rounded once more in another.

    Args:
        parameters: the same ones on all ranks.
        group: the ranks.
    """
    for run in runs_by_dtype(parameters):
        parts = []
        for parameter in run:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().to_dense()
            parts.append(gradient.resolve_conj().reshape(-1))
        flat = torch.cat(parts)
        real = torch.view_as_real(flat) if flat.is_complex() else flat
        real.mul_(1.0 / group.size())
        dist.all_reduce(real, group=group)
        for parameter, mean in zip(run, flat.split([p.numel() for p in run]), strict=True):
            if parameter.grad is None or parameter.grad.layout is not torch.strided or parameter.grad.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.copy_(mean.view(parameter.size()))


@torch.no_grad()
def share_means(
    parameters: Sequence[nn.Parameter], owners: Sequence[int], has_mean: Sequence[bool], group: dist.ProcessGroup
) -> None:
    """Give every rank the means that owners have, before ``no_sync`` adds to them: as under DDP. Collective.

    Each rank's later gradients are added to the mean one by one under DDP; added up by themselves first, their sum
    would be rounded differently.

    Args:
        parameters: the same on all ranks.
        owners: the rank in the group that has its mean, for each parameter.
        has_mean: this rank has it.
        group: the ranks.
    """
    if not parameters:
        return
    shared = used_anywhere(has_mean, group, parameters[0].device)
    chosen = [(p, owner) for p, owner, flag in zip(parameters, owners, shared, strict=True) if flag]
    for owner in dict.fromkeys(owner for _, owner in chosen):
        theirs = [parameter for parameter, o in chosen if o == owner]
        means = [p.grad if owner == group.rank() and p.grad is not None else torch.zeros_like(p) for p in theirs]
        broadcast_coalesced(means, owner, group)
        if owner != group.rank():
            for parameter, mean in zip(theirs, means, strict=True):
                parameter.grad = mean if parameter.grad is None else mean.add_(parameter.grad)
