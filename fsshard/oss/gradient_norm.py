"""The norm of gradients that are spread over their owners, bit-identical to torch's over all of them.

``torch.nn.utils.clip_grad_norm_`` would take the norm of what this rank has, another one on each rank, and scale each
rank's part by another factor, silently; DDP's users call it, and so do FairScale's, though its documents say not to.
After :func:`count_owners` parameters of a ShardedDataParallel count there with the norms that their owners find.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.errors import GradientError
from fsshard.oss.reduction import reduction_of
from fsshard.patches import CLIP_GRAD_NORM
from fsshard.torch_private.clip_grad import grouped_by_device_and_dtype
from fsshard.torch_private.tensors import foreach_norm

__all__ = ["combined", "count_owners", "exchanged", "owned_norms", "scale"]


def owned_norms(
    parameters: Sequence[Tensor], mine: Sequence[int], norm_type: float, group: dist.ProcessGroup, device: torch.device
) -> dict[int, float]:
    """Return the norm of each gradient, in its own dtype, by place, from the rank that speaks for it. Collective.

    This one does for the places in ``mine``; a parameter that no rank speaks for is left out.
    """
    own = _norms([parameters[i].grad for i in mine], norm_type)
    return exchanged(dict(zip(mine, own, strict=True)), len(parameters), group, device)


def exchanged(own: Mapping[int, float], count: int, group: dist.ProcessGroup, device: torch.device) -> dict[int, float]:
    """Return the numbers of all ranks by place, each of which one rank has. Collective, over a tensor on ``device``."""
    buffer = torch.zeros(2, count, dtype=torch.float64)
    buffer[0, list(own)] = torch.tensor(list(own.values()), dtype=torch.float64)
    buffer[1, list(own)] = 1
    buffer = buffer.to(device)
    dist.all_reduce(buffer, group=group)
    values, seen = buffer.tolist()
    return {place: value for place, (value, there) in enumerate(zip(values, seen, strict=True)) if there}


def _norms(gradients: Sequence[Any], norm_type: float) -> list[float]:
    """Return the norm of each tensor alone, as ``torch.nn.utils.clip_grad_norm_`` computes it."""
    found = [0.0] * len(gradients)
    # torch's own has no kernel for sparse ones
    values = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    for places in grouped_by_device_and_dtype(values):
        norms = torch.stack(list(foreach_norm([values[place] for place in places], norm_type))).tolist()
        for place, norm in zip(places, norms, strict=True):
            found[place] = norm
    return found


def combined(norms: Mapping[int, float], parameters: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of all gradients from that of each, by place; devices and dtypes decide how torch adds."""
    present = sorted(norms)
    if not present:
        return torch.tensor(0.0)
    owners = [parameters[index].detach() for index in present]
    # One list per device and dtype, one list after the other: torch's own grouping gives the order of the sum.
    order = [present[place] for places in grouped_by_device_and_dtype(owners) for place in places]
    dtype = functools.reduce(torch.promote_types, [parameter.dtype.to_real() for parameter in owners])
    values = torch.tensor([norms[index] for index in order], dtype=torch.float64)
    total: Tensor = torch.linalg.vector_norm(values.to(owners[0].device, dtype), norm_type)
    return total


@torch.no_grad()
def scale(parameters: Sequence[Tensor], max_norm: float, total: Tensor) -> None:
    """Clip what gradients there are, as ``torch.nn.utils.clip_grads_with_norm_`` does, sparse ones included."""
    dense = [p for p in parameters if p.grad is not None and not p.grad.is_sparse]
    torch.nn.utils.clip_grads_with_norm_(dense, max_norm, total)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad.mul_(factor.to(parameter.device))


# ------------------------------------------------------------------------------------------------ torch's own clipping


def count_owners(wrapper: Any) -> None:
    """Let ``clip_grad_norm_`` be right for parameters of a ShardedDataParallel while ``wrapper`` lives; collective."""
    CLIP_GRAD_NORM.keep_for(wrapper, _norm)


@torch.no_grad()
def _norm(parameters: Sequence[Tensor], norm_type: float, torchs: Callable[..., Tensor]) -> Tensor | None:
    told = next((text for p in parameters if (text := getattr(p, "_fsshard_clip_with", None))), None)
    if told is not None:
        raise GradientError(f"torch.nn.utils.clip_grad_norm_ would compute the norm of this rank's part only; {told}")
    reductions = list(dict.fromkeys(r for p in parameters if (r := reduction_of(p)) is not None))
    if not reductions:
        return None
    given = {id(parameter) for parameter in parameters if parameter.grad is not None}
    counted: list[Tensor] = []
    norms: dict[int, float] = {}
    for reduction in reductions:
        # What is owned everywhere is the same everywhere: the first rank speaks for it.
        rank = reduction.group.rank()
        mine = [
            i
            for i, (p, owner) in enumerate(zip(reduction.parameters, reduction.owners, strict=True))
            if id(p) in given and rank == max(owner, 0)
        ]
        found = owned_norms(reduction.parameters, mine, norm_type, reduction.group, parameters[0].device)
        norms.update({len(counted) + i: value for i, value in found.items()})
        counted += reduction.parameters
    known = {id(parameter) for parameter in counted}
    rest = [p for p in parameters if id(p) in given and id(p) not in known]  # of other modules
    norms.update(enumerate(_norms([p.grad for p in rest], norm_type), len(counted)))
    return combined(norms, [*counted, *rest], norm_type).to(parameters[0].device)
