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

Groups = tuple[dist.ProcessGroup, ...]
Part = tuple[Backend, Sequence[Entry]]
# Numbers that are in float64 at once on a CPU.
CHUNK = 2**17


def bounded(vector: Tensor) -> Sequence[Tensor]:
    """Cut a vector into parts, of which one at a time is there in float64."""
    # On a CPU small enough for its cache, and for an allocation that does not ask the system for memory each time.
    size = 2**20
    if vector.is_cpu:
        size = CHUNK
    return vector.split(size)  # type: ignore[no-any-return]


def clip_by_norm(backends: Sequence[Backend], max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
    """Scale all gradients, which are final, so that their norm is at most ``max_norm``; the norm before. Collective."""
    everything: list[Part] = [(backend, backend.all) for backend in backends]
    norm = _norm_over(everything, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise FsshardError(f"the gradients' norm of order {norm_type} is {norm.item()}; nothing was clipped")
    ratio = max_norm / (norm + 1e-6)
    scale = torch.clamp(ratio, max=1.0)
    for _, entries in everything:
        for entry in entries:
            gradient = entry.grad()
            if gradient is not None:
                own_scale = scale.to(gradient.device, gradient.dtype)
                gradient.mul_(own_scale)
    return norm


def norm_of(backend: Backend, entries: Iterable[Entry], norm_type: float) -> Tensor:
    """Return the norm of the final gradients of ``entries``: 0-dim, the same on every rank. Collective.

    What other mesh dimensions divide is added up over them, too; what they hold alike counts once.
    """
    return _norm_over([(backend, list(entries))], norm_type)


def _norm_over(parts: Sequence[Part], norm_type: float) -> Tensor:
    """Return :func:`norm_of` over entries of several models."""
    dtypes = set()
    numels = []
    powers: list[Tensor] = []
    for backend, entries in parts:
        for entry in entries:
            dtypes.add(entry.dtype)
            shape = torch.Size(entry.stored_shape)
            numels.append(shape.numel())
        powers += _powers(backend, entries, norm_type)
    is_double = not dtypes.isdisjoint((torch.float64, torch.complex128))
    dtype = torch.float32
    if is_double:
        dtype = torch.float64
    first_backend, _ = parts[0]
    device = first_backend.settings.device
    if not powers:
        return torch.zeros((), dtype=dtype, device=device)
    if math.isinf(norm_type):
        largest = torch.stack(powers).max()
        return largest.to(dtype)
    power = torch.stack(powers).sum()
    # A GPU is not waited for: there the order shows about once in 10^8 norms.
    may_ask = device.type == "cpu" and has_numbers(power)
    if norm_type == 2 and not is_double and may_ask:
        chunks = sum(numels) // CHUNK
        summands = CHUNK + chunks + 2 * len(numels)
        if not is_settled(float(power), summands):
            return _exact_norm(parts)
    norm = power.pow(1.0 / norm_type)
    return norm.to(dtype)


def _exact_norm(parts: Sequence[Part]) -> Tensor:
    """Return the 2-norm of float32 gradients, rounded once. Collective."""
    power = Fraction(0)
    for backend, entries in parts:
        for groups, members in _by_groups(entries):
            chunks = _chunks(backend, members)
            power += exact_power(chunks, groups)
    return rounded_root(power)


def _powers(backend: Backend, entries: Sequence[Entry], p: float) -> Iterator[Tensor]:
    """Yield sums of powers, or largest moduli, over all ranks: 0-dim float64. Collective."""
    operation = dist.ReduceOp.SUM
    if math.isinf(p):
        operation = dist.ReduceOp.MAX
    for groups, members in _by_groups(entries):
        value = _local(backend, members, p)
        for group in groups:
            dist.all_reduce(value, op=operation, group=group)
        yield value


def _by_groups(entries: Iterable[Entry]) -> Iterable[tuple[Groups, list[Entry]]]:
    """Return entries by the groups of ranks that divide them."""
    by_groups: dict[Groups, list[Entry]] = {}
    for entry in entries:
        groups = entry.divided_over
        if entry.group is not None:
            groups = (entry.group, *groups)
        by_groups.setdefault(groups, []).append(entry)
    return by_groups.items()


def _owned_gradients(backend: Backend, entries: Iterable[Entry]) -> Iterator[tuple[Entry, Tensor]]:
    """Yield the gradients that this rank speaks for; of a sparse one the rows that it has."""
    for entry in entries:
        # What another rank owns counts there.
        if not owned(backend, entry):
            continue
        gradient = entry.grad()
        if gradient is None:
            continue
        if gradient.is_sparse:
            coalesced = gradient.coalesce()
            gradient = coalesced.values()
        yield entry, gradient


def _chunks(backend: Backend, entries: Iterable[Entry]) -> Iterator[Tensor]:
    """Yield this rank's gradients, a complex number as two reals."""
    for _, gradient in _owned_gradients(backend, entries):
        numbers = gradient.reshape(-1)
        yield from bounded(numbers)


def _local(backend: Backend, entries: Iterable[Entry], p: float) -> Tensor:
    """Return the sum of powers, or the largest modulus, of this rank's parts: 0-dim float64."""
    device = backend.settings.device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for entry, gradient in _owned_gradients(backend, entries):
        values = _moduli(entry, gradient, p)
        if math.isinf(p):
            if values.numel():
                largest = values.max().double()
                total = torch.maximum(total, largest.to(device))
            continue
        for chunk in bounded(values):
            power = _sum_of_powers(chunk.double(), p)
            total += power.to(device)
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
        moduli = gradient.abs()
        return moduli.reshape(-1)
    pairs = gradient
    if gradient.dim() == 1:
        # FSDP1 has the pairs one after the other.
        pairs = gradient.view(-1, 2)
    real, imaginary = viewable(pairs.double()).unbind(-1)
    squares = real**2 + imaginary**2
    return squares.sqrt().reshape(-1)
