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
    size = CHUNK if vector.is_cpu else 2**20
    return vector.split(size)  # type: ignore[no-any-return]


def clip_by_norm(backends: Sequence[Backend], max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
    """Scale all gradients, which are final, so that their norm is at most ``max_norm``; the norm before. Collective."""
    norm = _norm_over([(backend, backend.all) for backend in backends], norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise FsshardError(f"the gradients' norm of order {norm_type} is {norm.item()}; nothing was clipped")
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for backend in backends:
        for entry in backend.all:
            gradient = entry.grad()
            if gradient is not None:
                gradient.mul_(scale.to(gradient.device, gradient.dtype))
    return norm


def norm_of(backend: Backend, entries: Iterable[Entry], norm_type: float) -> Tensor:
    """Return the norm of the final gradients of ``entries``: 0-dim, the same on every rank. Collective.

    What other mesh dimensions divide is added up over them, too; what they hold alike counts once.
    """
    return _norm_over([(backend, list(entries))], norm_type)


def _norm_over(parts: Sequence[tuple[Backend, Sequence[Entry]]], norm_type: float) -> Tensor:
    """Return :func:`norm_of` over entries of several models."""
    dtypes: set[torch.dtype] = set()
    numels: list[int] = []
    powers: list[Tensor] = []
    for backend, entries in parts:
        dtypes.update(entry.dtype for entry in entries)
        numels += [torch.Size(entry.stored_shape).numel() for entry in entries]
        powers += _powers(backend, entries, norm_type)
    is_double = not dtypes.isdisjoint((torch.float64, torch.complex128))
    dtype = torch.float64 if is_double else torch.float32
    device = parts[0][0].settings.device
    if not powers:
        return torch.zeros((), dtype=dtype, device=device)
    if math.isinf(norm_type):
        return torch.stack(powers).max().to(dtype)
    power = torch.stack(powers).sum()
    # A GPU is not waited for: there the order shows about once in 10^8 norms.
    if norm_type == 2 and not is_double and device.type == "cpu" and has_numbers(power):
        summands = CHUNK + sum(numels) // CHUNK + 2 * len(numels)
        if not is_settled(float(power), summands):
            return _exact_norm(parts)
    return power.pow(1.0 / norm_type).to(dtype)


def _exact_norm(parts: Sequence[tuple[Backend, Sequence[Entry]]]) -> Tensor:
    """Return the 2-norm of float32 gradients, rounded once. Collective."""
    power = Fraction(0)
    for backend, entries in parts:
        for groups, members in _by_groups(entries):
            power += exact_power(_chunks(backend, members), groups)
    return rounded_root(power)


def _powers(backend: Backend, entries: Sequence[Entry], p: float) -> Iterator[Tensor]:
    """Yield sums of powers, or largest moduli, over all ranks: 0-dim float64. Collective."""
    operation = dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM
    for groups, members in _by_groups(entries):
        value = _local(backend, members, p)
        for group in groups:
            dist.all_reduce(value, op=operation, group=group)
        yield value


def _by_groups(entries: Iterable[Entry]) -> list[tuple[tuple[dist.ProcessGroup, ...], list[Entry]]]:
    """Return entries by the groups of ranks that divide them."""
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Entry]] = {}
    for entry in entries:
        groups = entry.divided_over
        if entry.group is not None:
            groups = (entry.group, *groups)
        by_groups.setdefault(groups, []).append(entry)
    return list(by_groups.items())


def _owned_gradients(backend: Backend, entries: Iterable[Entry]) -> Iterator[tuple[Entry, Tensor]]:
    """Yield the gradients that this rank speaks for; of a sparse one the rows that it has."""
    for entry in entries:
        gradient = entry.grad() if owned(backend, entry) else None
        if gradient is None:
            continue
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        yield entry, gradient


def _chunks(backend: Backend, entries: Iterable[Entry]) -> Iterator[Tensor]:
    """Yield this rank's gradients, a complex number as two reals."""
    for _, gradient in _owned_gradients(backend, entries):
        yield from bounded(gradient.reshape(-1))


def _local(backend: Backend, entries: Iterable[Entry], p: float) -> Tensor:
    """Return the sum of powers, or the largest modulus, of this rank's parts: 0-dim float64."""
    device = backend.settings.device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for entry, gradient in _owned_gradients(backend, entries):
        values = _moduli(entry, gradient, p)
        if math.isinf(p):
            if values.numel():
                total = torch.maximum(total, values.max().double().to(device))
            continue
        for chunk in bounded(values):
            total += _sum_of_powers(chunk.double(), p).to(device)
    return total


def _sum_of_powers(values: Tensor, p: float) -> Tensor:
    if p == 2:
        return values.dot(values)
    if p == 1:
        return values.sum()
    return values.pow(p).sum()


def _moduli(entry: Entry, gradient: Tensor, p: float) -> Tensor:
    """Return |g|, or g itself for p = 2, where the squares of pairs add up to the same, of this rank's part, flat."""
    if p == 2:
        return gradient.reshape(-1)
    if not entry.kind.is_complex:
        return gradient.abs().reshape(-1)
    pairs = gradient if gradient.dim() > 1 else gradient.view(gradient.numel() // 2, 2)
    parts = pairs.double()
    return torch.sqrt(viewable(parts)[..., 0] ** 2 + parts[..., 1] ** 2).reshape(-1)
