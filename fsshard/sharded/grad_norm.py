"""The norm of a sharded model's gradients, and clipping by it: over the original numbers, the same on every engine.

Powers are summed in float64 and the result is rounded to float32, so that the order in which shards are summed does not
show. The norm of a model with float64 weights stays float64, and its last bits show that order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.backends.base import Backend
from fsshard.backends.whole import owned
from fsshard.complex_params.pairs import viewable
from fsshard.errors import FsshardError
from fsshard.planning.entries import Entry

__all__ = ["clip_by_norm", "norm_of"]

NORM_CHUNK = 2**20


def clip_by_norm(backend: Backend, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
    """Scale all gradients, which are final, so that their norm is at most ``max_norm``; the norm before. Collective."""
    graded = [(e, g) for e in backend.entries.values() if (g := e.grad()) is not None]
    norm = norm_of(backend, backend.entries.values(), norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise FsshardError(f"the gradients' norm of order {norm_type} is {norm.item()}; nothing was clipped")
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for _, gradient in graded:
        gradient.mul_(scale.to(gradient.device, gradient.dtype))
    return norm


def norm_of(backend: Backend, entries: Iterable[Entry], norm_type: float) -> Tensor:
    """The norm of the final gradients of ``entries``: 0-dim, the same on every rank. Collective.

    What other mesh dimensions divide is added up over them, too; what they hold alike counts once.
    """
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Entry]] = {}
    dtype = torch.float32
    for entry in entries:
        groups = (*(() if entry.group is None else (entry.group,)), *entry.divided_over)
        by_groups.setdefault(groups, []).append(entry)
        if entry.dtype in (torch.float64, torch.complex128):
            dtype = torch.float64
    powers = [_reduced(backend, chosen, norm_type, groups) for groups, chosen in by_groups.items()]
    if not powers:
        return torch.zeros((), dtype=dtype, device=backend.settings.device)
    if math.isinf(norm_type):
        return torch.stack(powers).max().to(dtype)
    return torch.stack(powers).sum().pow(1.0 / norm_type).to(dtype)


def _reduced(backend: Backend, entries: Iterable[Entry], p: float, groups: Iterable[dist.ProcessGroup]) -> Tensor:
    """The sum of powers, or the largest modulus, over ``groups``: 0-dim float64."""
    op = dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM
    value = _local(backend, entries, p)
    for group in groups:
        dist.all_reduce(value, op=op, group=group)
    return value


def _local(backend: Backend, entries: Iterable[Entry], p: float) -> Tensor:
    """The sum of powers, or the largest modulus, of this rank's parts: 0-dim float64."""
    graded = [(e, _numbers(g)) for e in entries if owned(backend, e) and (g := e.grad()) is not None]
    device = backend.settings.device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for entry, gradient in graded:
        if not math.isinf(p):
            total += _power_sum(_moduli(entry, gradient, p), p).to(device)
        elif gradient.numel():
            total = torch.maximum(total, _moduli(entry, gradient, p).max().double().to(device))
    return total


def _numbers(gradient: Tensor) -> Tensor:
    """The gradient, or of a sparse one what is not zero: an embedding's with ``sparse=True``."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _moduli(entry: Entry, gradient: Tensor, p: float) -> Tensor:
    """|g| (or g itself for p = 2 of pairs, whose squares add up the same) of this rank's part, flat."""
    if not entry.kind.is_complex or p == 2:
        return gradient.abs().reshape(-1) if p != 2 else gradient.reshape(-1)
    pairs = gradient if gradient.dim() > 1 else gradient.view(gradient.numel() // 2, 2)
    real = pairs.double()
    return torch.sqrt(viewable(real)[..., 0] ** 2 + real[..., 1] ** 2).reshape(-1)


def _power_sum(values: Tensor, p: float) -> Tensor:
    """Sum of |x|^p in float64, a bounded chunk at a time."""
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for chunk in values.split(NORM_CHUNK):
        wide = chunk.double()
        total += (wide * wide if p == 2 else wide if p == 1 else wide.pow(p)).sum()
    return total
