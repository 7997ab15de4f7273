"""``torch.nn.utils.clip_grad_norm_`` where each rank has the gradients of its own parameters only.

It would take the norm of what this rank has, another one on each rank, and scale each rank's part by another factor,
silently; DDP's users call it, and so do FairScale's, though its documents say not to. Here parameters of a
ShardedDataParallel count with the norms that their owners find, and those of other wrappers are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.errors import GradientError
from fsshard.oss.gradient_norm import ABSENT, combined, norms
from fsshard.oss.reduction import reduction_of
from fsshard.torch_private.clip_grad import compute_norm_by

__all__ = ["count_owners"]


def count_owners() -> None:
    """From now on ``clip_grad_norm_`` is right for parameters of a ShardedDataParallel, and collective.

    Raises:
        FsshardError: this release of torch computes the norm elsewhere.
    """
    compute_norm_by(_norm)


def _norm(parameters: Sequence[Tensor], norm_type: float, torchs: Callable[..., Tensor]) -> Tensor | None:
    told = next((text for p in parameters if (text := getattr(p, "_fsshard_clip_with", None))), None)
    if told is not None:
        raise GradientError(f"torch.nn.utils.clip_grad_norm_ would compute the norm of this rank's part only; {told}")
    reductions = list(dict.fromkeys(r for p in parameters if (r := reduction_of(p)) is not None))
    return _total(parameters, reductions, norm_type) if reductions else None


@torch.no_grad()
def _total(parameters: Sequence[Tensor], reductions: Sequence[Any], norm_type: float) -> Tensor:
    given = {id(parameter) for parameter in parameters}
    known = {id(parameter) for reduction in reductions for parameter in reduction.parameters}
    rest = [p for p in parameters if id(p) not in known and p.grad is not None]  # of other modules
    values = [_norms_of(reduction, given, norm_type) for reduction in reductions]
    values.append(torch.tensor(norms([p.grad for p in rest if p.grad is not None], norm_type), dtype=torch.float64))
    counted = [parameter for reduction in reductions for parameter in reduction.parameters] + rest
    return combined(torch.cat(values), counted, norm_type).to(parameters[0].device)


def _norms_of(reduction: Any, given: set[int], norm_type: float) -> Tensor:
    """The norm of each parameter's mean gradient from its owner; ``ABSENT`` where no rank was given one. Collective."""
    parameters, rank, owners = reduction.parameters, reduction.group.rank(), reduction.owners
    # What is owned everywhere is the same everywhere: the first rank speaks for it.
    mine = [
        i
        for i, p in enumerate(parameters)
        if id(p) in given and p.grad is not None and (owners[i] == rank or (owners[i] < 0 and rank == 0))
    ]
    buffer = torch.zeros(2, len(parameters), dtype=torch.float64)
    buffer[0, mine] = torch.tensor(norms([parameters[i].grad for i in mine], norm_type), dtype=torch.float64)
    buffer[1, mine] = 1
    buffer = buffer.to(parameters[0].device)
    dist.all_reduce(buffer, group=reduction.group)
    values, seen = buffer.cpu()
    return torch.where(seen > 0, values, torch.full_like(values, ABSENT))
