"""Gradients that do not go through buckets: sparse ones, and those of parameters without an optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsshard.complex_params.pairs import real_dtype
from fsshard.oss.collectives import broadcast_coalesced
from fsshard.oss.gradient_marks import carried, forget, is_common, is_sent, mark_common, mark_sent
from fsshard.torch_private.tensors import sparse_indices, sparse_values, stored_elements

__all__ = ["reduce_everywhere", "reduce_sparse", "share_means", "sparse_parameters"]


def sparse_parameters(module: nn.Module) -> set[Tensor]:
    """The weights whose gradients torch makes sparse. Every rank finds the same, whatever its backward reaches."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {m.weight for m in module.modules() if isinstance(m, kinds) and m.sparse}


# ------------------------------------------------------------------------------------------------ sparse


def reduce_sparse(
    parameter: nn.Parameter,
    owner: int,
    arrived: bool,
    group: dist.ProcessGroup,
    keep: bool,
) -> None:
    """Reduce a sparse gradient to its owner, which gets a sparse one, as under DDP. Collective.

    Args:
        parameter: its gradient may be None, sparse, or dense where the weight is used elsewhere too.
        owner: rank in the group.
        arrived: this rank's backward reached it.
        group: the ranks.
        keep: other ranks than the owner keep what they have sent.
    """
    rank, scale = group.rank(), 1.0 / group.size()
    mine, common = _sparse_part(parameter)
    count = torch.tensor([stored_elements(mine), int(arrived)], device=parameter.device)
    counts = [torch.empty_like(count) for _ in range(group.size())]
    dist.all_gather(counts, count, group=group)
    sizes = torch.stack(counts).tolist()
    indices = _to_owner(sparse_indices(mine).squeeze(0), [n for n, _ in sizes], owner, group)
    values = _to_owner(sparse_values(mine), [n for n, _ in sizes], owner, group)
    if rank != owner:
        if keep and parameter.grad is not None:
            mark_sent(parameter.grad)
        else:
            parameter.grad = None
        return
    if not any(used for _, used in sizes):
        return
    total: Tensor | None = None
    for r in range(group.size()):
        part = mine if r == rank else _sparse(indices[r], values[r], parameter)
        if common is not None:
            part = (common + part).coalesce()
        part = part * scale
        total = part if total is None else total + part
    assert total is not None
    parameter.grad = total.coalesce()
    mark_common(parameter.grad)


def _sparse_part(parameter: nn.Parameter) -> tuple[Tensor, Tensor | None]:
    gradient = parameter.grad
    if gradient is None or is_common(gradient) or is_sent(gradient):
        nothing = torch.empty(0, dtype=torch.int64, device=parameter.device)
        empty = _sparse(nothing, parameter.detach().new_empty(0, *parameter.shape[1:]), parameter)
        return empty, None if is_sent(gradient) else gradient
    common = carried(gradient)
    gradient = gradient.detach()
    return (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce(), common


def _sparse(indices: Tensor, values: Tensor, parameter: nn.Parameter) -> Tensor:
    return torch.sparse_coo_tensor(indices[None], values, parameter.size(), is_coalesced=True, check_invariants=False)


def _to_owner(rows: Tensor, counts: list[int], owner: int, group: dist.ProcessGroup) -> list[Tensor]:
    """What each rank has, at the owner; nothing elsewhere."""
    rank = group.rank()
    rows = rows.contiguous()
    raw = rows.reshape(-1).view(torch.uint8) if rows.numel() else rows.new_empty(0, dtype=torch.uint8)
    width = rows.element_size() * rows[:1].numel() if rows.numel() else rows.element_size() * rows.shape[1:].numel()
    own = rank == owner
    outgoing = [counts[rank] * width if r == owner and not own else 0 for r in range(group.size())]
    incoming = [counts[r] * width if own and r != rank else 0 for r in range(group.size())]
    received = torch.empty(sum(incoming), dtype=torch.uint8, device=rows.device)
    sent = raw if sum(outgoing) else raw[:0]
    dist.all_to_all_single(received, sent, incoming, outgoing, group=group)
    parts = received.split(incoming)
    return [part.clone().view(rows.dtype).view(-1, *rows.shape[1:]) for part in parts] if own else []


# ------------------------------------------------------------------------------------------------ in no optimizer


def reduce_everywhere(parameters: Sequence[nn.Parameter], arrived: Sequence[bool], group: dist.ProcessGroup) -> None:
    """Give every rank the mean, as DDP does. Collective.

    Args:
        parameters: of one device; they have no owner who alone would need it.
        arrived: this rank's backward reached it.
        group: the ranks.
    """
    used = torch.tensor(arrived, dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(used, group=group)
    chosen = [p for p, count in zip(parameters, used.tolist(), strict=True) if count]
    for dtype in dict.fromkeys(p.dtype for p in chosen):
        _all_reduce([p for p in chosen if p.dtype == dtype], real_dtype(dtype), group)


def _all_reduce(parameters: list[nn.Parameter], dtype: torch.dtype, group: dist.ProcessGroup) -> None:
    parts = []
    for parameter in parameters:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().to_dense()
        parts.append(gradient.resolve_conj().reshape(-1))
    flat = torch.cat(parts)
    real = torch.view_as_real(flat) if flat.is_complex() else flat
    assert real.dtype == dtype
    real.mul_(1.0 / group.size())
    dist.all_reduce(real, group=group)
    for parameter, mean in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        if parameter.grad is None or parameter.grad.layout is not torch.strided or parameter.grad.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.copy_(mean.view(parameter.size()))


# ------------------------------------------------------------------------------------------------ means, once more


@torch.no_grad()
def share_means(parameters: Sequence[nn.Parameter], owners: Sequence[int], group: dist.ProcessGroup) -> None:
    """Give every rank the means that owners have, before ``no_sync`` adds to them: as under DDP. Collective.

    Each rank's later gradients are added to the mean one by one under DDP; added up by themselves first, their sum
    would be rounded differently.

    Args:
        parameters: the same on all ranks.
        owners: the rank in the group that has its mean, for each parameter.
        group: the ranks.
    """
    if not parameters:
        return
    mine = [p.grad is not None and is_common(p.grad) for p in parameters]
    shared = torch.tensor(mine, dtype=torch.uint8, device=parameters[0].device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    chosen = [(p, owner) for p, owner, flag in zip(parameters, owners, shared.tolist(), strict=True) if flag]
    for owner in dict.fromkeys(owner for _, owner in chosen):
        theirs = [parameter for parameter, o in chosen if o == owner]
        means = [p.grad if owner == group.rank() and p.grad is not None else torch.zeros_like(p) for p in theirs]
        broadcast_coalesced(means, owner, group)
        for parameter, mean in zip(theirs, means, strict=True):
            if owner == group.rank():
                forget(mean)
            else:
                part = parameter.grad
                parameter.grad = mean if part is None or is_sent(part) else mean.add_(part)
