"""Moves parts of a field between the ranks of one split dimension, and back in the backward pass.

What is sent lies in one buffer per exchange, rank after rank. Complex numbers are sent as pairs of reals, since not
every transport knows them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.comm import watchdog
from fsshard.comm.watchdog import taking_part
from fsshard.errors import ConfigurationError
from fsshard.torch_private.c10d import device_types

WHAT = "an exchange of slabs (shard_domain)"
CALL = "the forward of a split model, or a loss of its domain"


class Parts(NamedTuple):
    """The division of a tensor's dimension among ranks."""

    # A dimension of the tensor.
    dim: int
    # The parts' lengths, in rank order.
    sizes: tuple[int, ...]


class Axis:
    """A spatial dimension that is split, and the ranks that have its parts.

    Attributes:
        dim: which spatial dimension, counted from 0.
        ranks: their global ranks.
        device: where ranks tell each other numbers: the CPU, where their group has a backend for it.
        limit: seconds to wait there for a rank that does something else; None: as long as the group does.
        bytes_sent: what this rank has sent to others along it, in exchanges and gathers; sums are not counted.
    """

    def __init__(
        self,
        dim: int,
        group: dist.ProcessGroup,
        device: str = "cpu",
        limit: float | None = None,
    ) -> None:
        self.dim = dim
        self.limit = limit
        self.bytes_sent = 0
        self._group: dist.ProcessGroup | None = group
        self.ranks = tuple(dist.get_process_group_ranks(group))
        has_cpu = any(kind.type == "cpu" for kind in device_types(group))
        self.device = "cpu" if has_cpu else device
        watchdog.join()

    @property
    def attached(self) -> bool:
        """Return whether it has its ranks: not after it came out of a file."""
        return self._group is not None

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks along it."""
        if self._group is None:
            raise ConfigurationError(
                "this model's domain came out of a file, and belongs to no process group; call "
                "fsshard.parallel.shard_domain(model, mesh['domain']) on it again"
            )
        return self._group

    @property
    def size(self) -> int:
        """Return how many ranks share the dimension."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This rank's number among them."""
        return self.group.rank()

    def __getstate__(self) -> dict[str, Any]:
        # A process group cannot be written down.
        return {**self.__dict__, "_group": None}

    def own_part(self, tensor: Tensor, parts: Parts) -> Tensor:
        """Return this rank's part of a dimension that is whole: a view. Local."""
        rank = self.rank
        return tensor.narrow(parts.dim, sum(parts.sizes[:rank]), parts.sizes[rank])

    def exchange(self, pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Send ``pieces[i]`` to rank i, and return what came from each, of these shapes. Collective."""
        # All pieces lie in one buffer, rank after rank, in the order of all_to_all_single.
        lengths = [piece.numel() for piece in pieces]
        received_lengths = list(map(math.prod, shapes))
        dtype_of = pieces[0]
        sent = dtype_of.new_empty(sum(lengths))
        received = dtype_of.new_empty(sum(received_lengths))
        for piece, place in zip(pieces, sent.split(lengths), strict=True):
            place.view(piece.shape).copy_(piece)
        reals = 2 if sent.is_complex() else 1
        with taking_part(self.group, WHAT):
            dist.all_to_all_single(
                _real(received),
                _real(sent),
                [reals * length for length in received_lengths],
                [reals * length for length in lengths],
                group=self.group,
            )
        self.bytes_sent += (len(sent) - lengths[self.rank]) * sent.element_size()
        parts = received.split(received_lengths)
        return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]

    def rows(self, row: Tensor) -> Tensor:
        """Return ``row`` of every rank, one below the other, on the CPU; not counted. Collective."""
        row = row.to(self.device)
        rows = [torch.empty_like(row) for _ in self.ranks]
        with taking_part(self.group, WHAT):
            work = dist.all_gather(rows, row.contiguous(), group=self.group, async_op=True)
            watchdog.wait(work, self.group, CALL, self.limit, on_cpu=self.device == "cpu")
        return torch.stack(rows).cpu()


def _real(flat: Tensor) -> Tensor:
    if flat.is_complex():
        return torch.view_as_real(flat).view(-1)
    return flat


def _applied(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Return ``function.apply(...)``, which torch does not type."""
    result: Tensor = function.apply(*arguments)
    return result


def redealt(field: Tensor, axis: Axis, dealt: Parts, joined: Parts) -> Tensor:
    """All-to-all: a dimension that each rank has whole is dealt out, one that is in parts comes together.

    Args:
        field: has ``joined.sizes[rank]`` points of ``joined.dim``, and all of ``dealt.dim``.
        axis: the ranks.
        dealt: how ``dealt.dim`` is divided afterwards.
        joined: how ``joined.dim`` is divided now.

    Returns:
        Contiguous, with ``dealt.sizes[rank]`` points of ``dealt.dim`` and all of ``joined.dim``.
    """
    if axis.size == 1:
        return field.contiguous()
    return _applied(_Redealt, field, axis, dealt, joined)


class _Redealt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, field: Tensor, axis: Axis, dealt: Parts, joined: Parts) -> Tensor:
        ctx.settings = axis, joined, dealt
        shape = list(field.shape)
        shape[dealt.dim] = dealt.sizes[axis.rank]
        pieces = field.split(dealt.sizes, dealt.dim)
        return torch.cat(axis.exchange(pieces, _shapes(shape, joined)), joined.dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _applied(_Redealt, gradients[0], *ctx.settings), None, None, None


def _shapes(own: Sequence[int], parts: Parts) -> list[list[int]]:
    before = own[: parts.dim]
    after = own[parts.dim + 1 :]
    return [[*before, size, *after] for size in parts.sizes]


def gathered(slab: Tensor, axis: Axis, parts: Parts) -> Tensor:
    """Return the whole of a dimension, on every rank. A slab's gradient is the sum of what the ranks have for it."""
    if axis.size == 1:
        return slab
    return _applied(DomainGather, slab, axis, parts)


class DomainGather(torch.autograd.Function):
    """See :func:`gathered`. Its name is looked for in graphs, see :mod:`fsshard.parallel.domain.entering`."""

    @staticmethod
    def forward(ctx: Any, slab: Tensor, axis: Axis, parts: Parts) -> Tensor:
        """The parts, one after the other."""
        ctx.settings = axis, parts
        # Every rank is sent the same slab.
        slabs = axis.exchange([slab] * axis.size, _shapes(slab.shape, parts))
        return torch.cat(slabs, parts.dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """This rank's part of the sum of all ranks' gradients."""
        return _applied(_PartOfSum, gradients[0], *ctx.settings), None, None


class _PartOfSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, axis: Axis, parts: Parts) -> Tensor:
        ctx.settings = axis, parts
        pieces = whole.split(parts.sizes, parts.dim)
        shape = pieces[axis.rank].shape
        first, *others = axis.exchange(pieces, [shape] * axis.size)
        total = first.clone()
        # In rank order, so that repeats have the same bits.
        for other in others:
            total += other
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _applied(DomainGather, gradients[0], *ctx.settings), None, None


def summed(value: Tensor, axes: Sequence[Axis]) -> Tensor:
    """Return the sum over all ranks that share a field, on each of them; its adjoint sums the ranks' gradients."""
    several = tuple(axis for axis in axes if axis.size > 1)
    if not several:
        return value
    return _applied(_Summed, value, several)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axes: tuple[Axis, ...]) -> Tensor:
        ctx.axes = axes
        total = value.resolve_conj().clone(memory_format=torch.contiguous_format)
        for axis in axes:
            with taking_part(axis.group, "a sum over slabs (shard_domain)"):
                dist.all_reduce(_real(total.view(-1)), group=axis.group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _applied(_Summed, gradients[0], ctx.axes), None
