"""The norm of gradients that are spread over their owners, bit-identical to torch's over all of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from fsshard.torch_private.clip_grad import grouped_by_device_and_dtype
from fsshard.torch_private.tensors import foreach_norm

__all__ = ["ABSENT", "combined", "norms", "scale"]

ABSENT = -1.0  # no norm of a tensor is negative


def norms(gradients: Sequence[Tensor], norm_type: float) -> list[float]:
    """The norm of each tensor alone, as ``torch.nn.utils.clip_grad_norm_`` computes it."""
    found: dict[int, float] = {}
    dense = [index for index, gradient in enumerate(gradients) if not gradient.is_sparse]
    for index, gradient in enumerate(gradients):
        if gradient.is_sparse:  # torch's own has no kernel for these
            found[index] = float(torch.linalg.vector_norm(gradient.coalesce().values(), norm_type))
    for places in grouped_by_device_and_dtype([gradients[index] for index in dense]):
        chosen = [dense[place] for place in places]
        each = foreach_norm([gradients[i] for i in chosen], norm_type)
        found.update(zip(chosen, torch.stack(list(each)).tolist(), strict=True))
    return [found[index] for index in range(len(gradients))]


def combined(values: Tensor, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of all from the norms of each.

    Args:
        values: float64, one per parameter in the order of the groups, exact since each was computed in its own dtype;
            ``ABSENT`` where there is no gradient.
        parameters: their device and dtype decide the order in which torch adds, and what it adds in.
        norm_type: as in torch.
    """
    present = [index for index, value in enumerate(values.tolist()) if value != ABSENT]
    if not present:
        return torch.tensor(0.0)
    owners = [parameters[index].detach() for index in present]
    # One list per device and dtype, one list after the other: torch's own grouping gives the order of the sum.
    order = [present[place] for places in grouped_by_device_and_dtype(owners) for place in places]
    dtype = functools.reduce(torch.promote_types, [parameter.dtype.to_real() for parameter in owners])
    total: Tensor = torch.linalg.vector_norm(values[order].to(owners[0].device, dtype), norm_type)
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
