"""The norm of a sharded model's gradients, and clipping by it: over the original numbers, the same on every engine.

Powers are summed in float64 and the result is rounded to float32, so that the order in which shards are summed does not
show.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.backends.base import Backend
from fsshard.complex_params.pairs import viewable
from fsshard.errors import FsshardError
from fsshard.planning.entries import Entry

__all__ = ["clip_by_norm", "norm_of"]

NORM_CHUNK = 2**20


def clip_by_norm(backend: Backend, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
    """Scale all gradients, which are final, so that their norm is at most ``max_norm``; the norm before. Collective."""
    graded = [(e, g) for e in backend.entries.values() if (g := backend.local_grad(e)) is not None]
    norm = norm_of(backend, backend.entries.values(), norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise FsshardError(f"the gradients' norm of order {norm_type} is {norm.item()}; nothing was clipped")
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for _, gradient in graded:
        gradient.mul_(scale.to(gradient.device, gradient.dtype))
    return norm


def norm_of(backend: Backend, entries: Iterable[Entry], norm_type: float) -> Tensor:
    """The norm of the final gradients of ``entries``: 0-dim float32, the same on every rank. Collective."""
    graded = [(e, _numbers(g)) for e in entries if backend.owned(e) and (g := backend.local_grad(e)) is not None]
    device = backend.settings.device
    if math.isinf(norm_type):
        parts = [_moduli(e, g, norm_type).max().double() for e, g in graded if g.numel()]
        top = torch.stack([part.to(device) for part in parts]).max() if parts else torch.zeros((), device=device)
        return backend.reduce_norm(top.double(), dist.ReduceOp.MAX).float()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for entry, gradient in graded:
        total += _power_sum(_moduli(entry, gradient, norm_type), norm_type).to(device)
    return backend.reduce_norm(total, dist.ReduceOp.SUM).pow(1.0 / norm_type).float()


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
