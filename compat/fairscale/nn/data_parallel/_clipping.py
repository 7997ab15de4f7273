"""``torch.nn.utils.clip_grad_norm_`` where each rank has the gradients of its own parameters.

It would take the norm of what this rank has, another one on each rank, and scale each rank's part by another factor, in
silence; DDP's users call it, and so do FairScale's, though its documents say not to. Here parameters of a
ShardedDataParallel count with the norms that their owners find, and those of other wrappers are refused.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad

from fsshard.backends.clipping import clipped_parameters
from fsshard.errors import FsshardError

from ....errors import GradientError
from ...optim._norm import ABSENT, combined, norms
from ._reduction import reduction_of

__all__ = ["know_of_owners"]

# What clip_grad_norm_ calls (torch 2.13). It is looked up in its module at each call, so that a script that has
# imported clip_grad_norm_ before is reached as well.
_NAME = "_get_total_norm"


@functools.cache
def know_of_owners() -> None:
    """From now on ``clip_grad_norm_`` is right for parameters of a ShardedDataParallel, and collective.

    Raises:
        FsshardError: this release of torch computes the norm elsewhere.
    """
    original: Any = getattr(clip_grad, _NAME, None)
    if original is None:
        raise FsshardError(
            f"torch {torch.__version__} has no torch.nn.utils.clip_grad.{_NAME}, through which clip_grad_norm_ is made "
            "right for ShardedDataParallel; use torch 2.6 to 2.13"
        )

    @functools.wraps(original)
    def total_norm(tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: Any = None) -> Any:
        parameters = clipped_parameters(sys._getframe(1))
        _check(parameters)
        reductions = list(dict.fromkeys(r for p in parameters if (r := reduction_of(p)) is not None))
        if not reductions:
            return original(tensors, norm_type, error_if_nonfinite, foreach)
        total = _total(parameters, reductions, float(norm_type))
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(f"the norm of order {norm_type} of the gradients is {total.item()}; nothing was clipped")
        return total

    setattr(clip_grad, _NAME, total_norm)


def _check(parameters: Sequence[Tensor]) -> None:
    told = next((text for p in parameters if (text := getattr(p, "_fsshard_clip_with", None))), None)
    if told is not None:
        raise GradientError(f"torch.nn.utils.clip_grad_norm_ would take the norm of this rank's part alone; {told}")


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
    wire = torch.zeros(2, len(parameters), dtype=torch.float64)
    wire[0, mine] = torch.tensor(norms([parameters[i].grad for i in mine], norm_type), dtype=torch.float64)
    wire[1, mine] = 1
    wire = wire.to(parameters[0].device)
    dist.all_reduce(wire, group=reduction.group)
    values, seen = wire.cpu()
    return torch.where(seen > 0, values, torch.full_like(values, ABSENT))
