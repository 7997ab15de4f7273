"""``torch.nn.utils.clip_grad_norm_`` where each rank has the gradients of its own parameters.

It would take the norm of what this rank has, another one on each rank, and scale each rank's part by another factor, in
silence; DDP's users call it, and so do FairScale's, though its documents say not to. Here the gradients that a
ShardedDataParallel has reduced are known by their marks, and count with the norms that their owners find.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad

from fsshard.errors import FsshardError

from ....errors import GradientError
from ...optim._norm import ABSENT, combined, norms
from ._marks import reducer_of

__all__ = ["know_of_owners"]

# What both clip_grad_norm_ and get_total_norm call (torch 2.13); it is looked up in its module at each call, so that a
# script that has imported clip_grad_norm_ before is reached as well.
_NAME = "_get_total_norm"


@functools.cache
def know_of_owners() -> None:
    """From now on torch's norms of gradients are right for those that a ShardedDataParallel has reduced."""
    original: Any = getattr(clip_grad, _NAME, None)
    if original is None:
        raise FsshardError(
            f"torch {torch.__version__} has no torch.nn.utils.clip_grad.{_NAME}, through which clip_grad_norm_ is made "
            "right for ShardedDataParallel; use torch 2.6 to 2.13"
        )

    @functools.wraps(original)
    def total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        reducers = list(dict.fromkeys(r for g in gradients if (r := reducer_of(g)) is not None))
        if not reducers:
            found: Tensor = original(gradients, norm_type, error_if_nonfinite, foreach)
            return found
        total = _total(gradients, reducers, float(norm_type))
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(f"the norm of order {norm_type} of the gradients is {total.item()}; nothing was clipped")
        return total

    setattr(clip_grad, _NAME, total_norm)


@torch.no_grad()
def _total(gradients: list[Tensor], reducers: list[Any], norm_type: float) -> Tensor:
    if any(not reducer.keep for reducer in reducers):
        raise GradientError(
            "torch.nn.utils.clip_grad_norm_ sees the gradients of this rank's own parameters only, since "
            "reduce_buffer_size=0 lets go of the others; call optimizer.clip_grad_norm(max_norm), or leave "
            "reduce_buffer_size at its default"
        )
    given = {id(gradient) for gradient in gradients}
    values: list[Tensor] = []
    parameters: list[Tensor] = []
    known: set[int] = set()
    for reducer in reducers:
        known |= {id(p.grad) for p in reducer.parameters if p.grad is not None}
        values.append(_norms_of(reducer, given, norm_type))
        parameters += reducer.parameters
    rest = [gradient for gradient in gradients if id(gradient) not in known]  # of other modules
    values.append(torch.tensor(norms(rest, norm_type), dtype=torch.float64))
    return combined(torch.cat(values), [*parameters, *rest], norm_type).to(gradients[0].device)


def _norms_of(reducer: Any, given: set[int], norm_type: float) -> Tensor:
    """The norm of each parameter's mean gradient from its owner; ``ABSENT`` where no rank was given one. Collective."""
    parameters, rank = reducer.parameters, reducer.group.rank()
    chosen = [i for i, p in enumerate(parameters) if p.grad is not None and id(p.grad) in given]
    # What is owned everywhere is the same everywhere: the first rank speaks for it.
    mine = [i for i in chosen if reducer.owners[i] == rank or (reducer.owners[i] < 0 and rank == 0)]
    wire = torch.zeros(2, len(parameters), dtype=torch.float64)
    wire[0, mine] = torch.tensor(norms([parameters[i].grad for i in mine], norm_type), dtype=torch.float64)
    wire[1, chosen] = 1
    wire = wire.to(parameters[0].device)
    dist.all_reduce(wire, group=reducer.group)
    values, seen = wire.cpu()
    return torch.where(seen > 0, values, torch.full_like(values, ABSENT))
