"""One order of adding over ranks: an aligned binary tree, the same in every engine and for every bucket.

``N`` ranks are split at the largest power of two below ``N``, and each part again: ``(0 + 1) + (2 + 3)`` of four,
``((0 + 1) + (2 + 3)) + (4 + 5)`` of six. Each rank's gradient is multiplied by ``1 / N`` before it is added, as DDP
does. Where replicas are sharded within, the means over shards are averaged again in the same way. A sum of two has one
order, so that two ranks compute what torch computes, bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.comm.lending import lend, let_go

PIECE_BYTES = 32 * 2**20
"""Bytes that a rank sends at once in a reduce-scatter, which needs as much memory for what arrives."""


def split(size: int) -> int:
    """Return how many of ``size`` > 1 neighbours are added up on the left: the largest power of two below it."""
    bits = (size - 1).bit_length()
    return 1 << bits - 1


def siblings(rank: int, size: int) -> list[range]:
    """Return the blocks of ranks whose sums are added to that of ``rank``, one after the other, up to the whole."""
    low = 0
    high = size
    blocks = []
    while high - low > 1:
        left_size = split(high - low)
        middle = low + left_size
        if rank < middle:
            blocks.append(range(middle, high))
            high = middle
        else:
            blocks.append(range(low, middle))
            low = middle
    blocks.reverse()
    return blocks


def add_up(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of ranks in order, or of a block of them; it is written into the first one."""
    if len(parts) == 1:
        return parts[0]
    middle = split(len(parts))
    left = add_up(parts[:middle])
    right = add_up(parts[middle:])
    return left.add_(right)


def add_scaled(output: Tensor, arrived: Tensor, size: int, scale: float) -> None:
    """Add up the ``size`` parts of ``arrived``, which is overwritten, each times ``scale``, into ``output``."""
    if scale != 1.0:
        arrived.mul_(scale)
    parts = arrived.view(size, -1).unbind()
    middle = split(size)
    left = add_up(parts[:middle])
    right = add_up(parts[middle:])
    torch.add(left, right, out=output.view(-1))


class AllReduce:
    """A sum over ranks that has begun: an all-to-all, sums of what arrives, and then every rank's part to all.

    Each rank sends as many bytes as in a ring. It needs as much memory again as ``flat`` has; on a device, where ranks
    cannot share that evenly, one rank's part more. All ranks begin their sums, and go on with them, in the same order.

    Args:
        flat: a contiguous tensor of one dimension, in which the sum will be.
        group: the ranks.
        scale: what each rank's numbers are multiplied by first: ``1 / group.size()`` for a mean.
    """

    def __init__(self, flat: Tensor, group: dist.ProcessGroup, scale: float = 1.0) -> None:
        self._flat = flat
        self._group = group
        self._scale = scale
        self._gathered = flat
        self._arrived: Tensor | None = None
        self._lent: list[Tensor] = []
        ranks = group.size()
        if ranks <= 2:
            # A sum of two has one order.
            if scale != 1.0:
                flat.mul_(scale)
            self._work: dist.Work = dist.all_reduce(flat, group=group, async_op=True)
            return
        numel = flat.numel()
        chunk = -(-numel // ranks)
        sizes = []
        for rank in range(ranks):
            # Behind the last whole chunk there is a shorter one, or none.
            begin = rank * chunk
            left = max(0, numel - begin)
            sizes.append(min(chunk, left))
        self._chunk = chunk
        self._sizes = sizes
        own_size = sizes[group.rank()]
        arriving_sizes = [own_size] * ranks
        self._arrived = flat.new_empty(ranks * own_size)
        self._lent = lend(self._arrived, flat)
        destination, source = self._lent
        self._work = dist.all_to_all_single(destination, source, arriving_sizes, sizes, group=group, async_op=True)

    def add(self) -> list[dist.Work]:
        """Add up what has arrived, and begin to send the sums: wait for each, and then call :meth:`end`."""
        arrived = self._arrived
        self._arrived = None
        if arrived is None:
            return [self._work]
        self._work.wait()
        let_go(self._lent)
        # A simulation's tensors are on the CPU whatever device it is for: its group of fake ranks tells.
        is_simulated = dist.get_backend(self._group) == "fake"
        if self._flat.is_cpu and not is_simulated:
            return self._broadcast(arrived)
        return [self._gather(arrived)]

    def _broadcast(self, arrived: Tensor) -> list[dist.Work]:
        # gloo's all-gather has a copy of its own of all parts, and takes 1.6 times the CPU time of these (torch 2.13).
        parts = self._flat.split(self._sizes)
        own = parts[self._group.rank()]
        self._add_into(own, arrived)
        self._lent = lend(*parts)
        works = []
        for rank, part in enumerate(self._lent):
            if part.numel():
                work = dist.broadcast(part, group=self._group, group_src=rank, async_op=True)
                works.append(work)
        return works

    def _gather(self, arrived: Tensor) -> dist.Work:
        ranks = self._group.size()
        padded = self._chunk * ranks
        # The sum takes the place of the first part.
        total = arrived[: self._chunk]
        if padded != self._flat.numel():
            # Ranks have chunks of other lengths, and each sends one of full length.
            total = self._flat.new_zeros(self._chunk)
            self._gathered = self._flat.new_empty(padded)
        own_size = self._sizes[self._group.rank()]
        self._add_into(total[:own_size], arrived)
        work: dist.Work = dist.all_gather_single(self._gathered, total, group=self._group, async_op=True)
        return work

    def _add_into(self, total: Tensor, arrived: Tensor) -> None:
        if total.numel():
            add_scaled(total, arrived, self._group.size(), self._scale)

    def end(self) -> Tensor:
        """Put the sums, which have arrived, into ``flat``, and return it."""
        let_go(self._lent)
        flat = self._flat
        if self._gathered is not flat:
            flat.copy_(self._gathered[: flat.numel()])
        return flat

    def wait(self) -> Tensor:
        """Return ``flat`` with the sums."""
        for work in self.add():
            work.wait()
        return self.end()


def all_reduce(flat: Tensor, group: dist.ProcessGroup, scale: float = 1.0) -> Tensor:
    """Put the sum of ``scale * flat`` over the ranks into ``flat``, and return it. Collective."""
    return AllReduce(flat, group, scale).wait()


def reduce_scatter(output: Tensor, given: Tensor, group: dist.ProcessGroup, scale: float = 1.0) -> None:
    """Put this rank's part of the sum of ``scale * given`` over the ranks into ``output``. Collective.

    Args:
        output: contiguous, of ``given.numel() / group.size()`` numbers.
        given: contiguous; its parts, one after the other, are those of the ranks.
        group: the ranks, at least two.
        scale: ``1 / group.size()`` for a mean.
    """
    ranks = group.size()
    rows = given.view(ranks, -1)
    total = output.view(-1)
    column_bytes = ranks * given.itemsize
    columns = PIECE_BYTES // column_bytes
    step = max(1, columns)
    for begin in range(0, len(total), step):
        end = begin + step
        piece = rows[:, begin:end].contiguous()
        arrived = torch.empty_like(piece)
        lent = lend(arrived, piece)
        destination, source = lent
        dist.all_to_all_single(destination, source, group=group)
        let_go(lent)
        part = total[begin:end]
        add_scaled(part, arrived, ranks, scale)
