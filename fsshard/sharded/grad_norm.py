"""The norm of a sharded model's gradients, and clipping by it: over the original numbers, the same on every engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.backends.base import Backend
from fsshard.backends.whole import owned
from fsshard.comm.agreement import has_numbers
from fsshard.complex_params.pairs import viewable
from fsshard.errors import FsshardError
from fsshard.planning.entries import Entry
from fsshard.sharded.exact_norm import exact_power, is_settled, rounded_root

CHUNK = 2**17
"""Numbers that are in float64 at once on a CPU."""


def bounded(vector: Tensor) -> Sequence[Tensor]:
    """Cut a vector into parts, of which one at a time is there in float64."""
    # On a CPU small enough for its cache, and for an allocation that does not ask the system for memory each time.
    return vector.split(CHUNK if vector.is_cpu else 2**20)  # type: ignore[no-any-return]


def clip_by_norm(backends: Sequence[Backend], max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
    """Scale all gradients, which are final, so that their norm is at most ``max_norm``; the norm before. Collective."""
    norm = _norm_over([(backend, [*backend.entries.values()]) for backend in backends], norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise FsshardError(f"the gradients' norm of order {norm_type} is {norm.item()}; nothing was clipped")
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for entry in (entry for backend in backends for entry in backend.all):
        if (gradient := entry.grad()) is not None:
            gradient.mul_(scale.to(gradient.device, gradient.dtype))
    return norm


def norm_of(backend: Backend, entries: Iterable[Entry], norm_type: float) -> Tensor:
    """Return the norm of the final gradients of ``entries``: 0-dim, the same on every rank. Collective.

    What other mesh dimensions divide is added up over them, too; what they hold alike counts once.
    """
    return _norm_over([(backend, [*entries])], norm_type)


def _norm_over(parts: Sequence[tuple[Backend, Sequence[Entry]]], norm_type: float) -> Tensor:
    """Return :func:`norm_of` over entries of several models."""
    double = any(entry.dtype in (torch.float64, torch.complex128) for _, entries in parts for entry in entries)
    dtype = torch.float64 if double else torch.float32
    powers = [power for backend, entries in parts for power in _powers(backend, entries, norm_type)]
    device = parts[0][0].settings.device
    if not powers:
        return torch.zeros((), dtype=dtype, device=device)
    if math.isinf(norm_type):
        return torch.stack(powers).max().to(dtype)
    power = torch.stack(powers).sum()
    # A GPU is not waited for: there the order shows about once in 10^8 norms.
    if norm_type == 2 and not double and device.type == "cpu" and has_numbers(power):
        numels = [torch.Size(entry.stored_shape).numel() for _, entries in parts for entry in entries]
        if not is_settled(float(power), CHUNK + sum(numels) // CHUNK + 2 * len(numels)):
            return _exact_norm(parts)
    return power.pow(1.0 / norm_type).to(dtype)


def _exact_norm(parts: Sequence[tuple[Backend, Sequence[Entry]]]) -> Tensor:
    """Return the 2-norm of float32 gradients, rounded once. Collective."""
    power = Fraction(0)
    for backend, entries in parts:
        for groups, chosen in _by_groups(entries):
            power += exact_power(_chunks(backend, chosen), groups)
    return rounded_root(power)


def _powers(backend: Backend, entries: Sequence[Entry], p: float) -> Iterator[Tensor]:
    """Yield sums of powers, or largest moduli, over all ranks: 0-dim float64. Collective."""
    for groups, chosen in _by_groups(entries):
        value = _local(backend, chosen, p)
        for group in groups:
            dist.all_reduce(value, op=dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM, group=group)
        yield value


def _by_groups(entries: Iterable[Entry]) -> list[tuple[tuple[dist.ProcessGroup, ...], list[Entry]]]:
    """Return entries by the groups of ranks that divide them."""
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Entry]] = {}
    for entry in entries:
        groups = (*(() if entry.group is None else (entry.group,)), *entry.divided_over)
        by_groups.setdefault(groups, []).append(entry)
    return list(by_groups.items())


def _chunks(backend: Backend, entries: Iterable[Entry]) -> Iterator[Tensor]:
    """Yield this rank's gradients, a complex number as two reals."""
    for entry in entries:
        gradient = entry.grad() if owned(backend, entry) else None
        if gradient is not None:
            yield from bounded(_moduli(entry, gradient.coalesce().values() if gradient.is_sparse else gradient, 2))


def _local(backend: Backend, entries: Iterable[Entry], p: float) -> Tensor:
    """Return the sum of powers, or the largest modulus, of this rank's parts: 0-dim float64."""
    device = backend.settings.device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for entry in entries:
        gradient = entry.grad() if owned(backend, entry) else None
        if gradient is None:
            continue
        values = _moduli(entry, gradient.coalesce().values() if gradient.is_sparse else gradient, p)
        if math.isinf(p):
            total = torch.maximum(total, values.max().double().to(device)) if values.numel() else total
            continue
        for wide in (chunk.double() for chunk in bounded(values)):
            total += (wide.dot(wide) if p == 2 else wide.sum() if p == 1 else wide.pow(p).sum()).to(device)
    return total


def _moduli(entry: Entry, gradient: Tensor, p: float) -> Tensor:
    """Return |g|, or g itself for p = 2, where the squares of pairs add up to the same, of this rank's part, flat."""
    if not entry.kind.is_complex or p == 2:
        return gradient.abs().reshape(-1) if p != 2 else gradient.reshape(-1)
    pairs = gradient if gradient.dim() > 1 else gradient.view(gradient.numel() // 2, 2)
    real = pairs.double()
    return torch.sqrt(viewable(real)[..., 0] ** 2 + real[..., 1] ** 2).reshape(-1)
