"""Faster collectives for FSDP2 over gloo, through hooks that FSDP2 offers.

gloo's reduce-scatter is an all-reduce whose other parts are thrown away (torch 2.13), twice the bytes of what it is
asked for, and both it and the all-gather take longer than the same work by other primitives. Here a unit is gathered by
one broadcast per rank, and reduced by an all-to-all whose parts are summed where they arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.comm.watchdog import taking_part
from fsshard.torch_private.fsdp2_collectives import AllGather, ReduceScatter


class _Broadcasts(dist.Work):
    """One per rank, waited for together."""

    def __init__(self, works: list[Any], lent: list[Tensor]) -> None:
        super().__init__()
        self._works, self._lent = works, lent

    def wait(self, timeout: Any = None) -> bool:
        while self._works:
            self._works[0].wait()
            del self._works[0]  # not before: who waits again after an error must not find numbers that never arrived
        _let_go(self._lent)
        return True


# gloo's threads hold on to the arguments of their last collective until after Work.wait has returned, for as long as
# they are not scheduled or wait for Python's lock (torch 2.13): a unit's buffers would live longer on some steps than
# on others. So gloo is given tensors of its own over them, which let go of the memory when it has arrived.
def _lend(*buffers: Tensor) -> list[Tensor]:
    """Return tensors over the memory of ``buffers``; detached, since a view would keep its base alive."""
    return [buffer.detach() for buffer in buffers]


def _let_go(lent: list[Tensor]) -> None:
    """Leave the memory to its other holders, whoever still has the tensors themselves."""
    while lent:
        tensor = lent.pop()
        tensor.data = tensor.new_empty(0)


class Gather(AllGather):
    """An all-gather as broadcasts, every rank's part from its rank."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer for the whole unit."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        """Fill ``output_tensor`` with every rank's ``input_tensor``; asynchronous whatever ``async_op`` says."""
        # FSDP2 waits for any Work that it is given where it needs the numbers, so that the gather that it starts ahead
        # in backward overlaps the computation; and then lets go of the gathered buffer at once.
        parts = output_tensor.chunk(group.size())
        mine = parts[group.rank()]
        if mine.data_ptr() != input_tensor.data_ptr():
            mine.copy_(input_tensor)
        lent = _lend(*(part for part in parts if part.numel()))  # as large all of them
        works = [dist.broadcast(part, group=group, group_src=rank, async_op=True) for rank, part in enumerate(lent)]
        return _Broadcasts(works, lent)


class Reduce(ReduceScatter):
    """A reduce-scatter as an all-to-all and sums."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer for a unit's gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Sum or average every rank's part of ``input_tensor`` into ``output_tensor``."""
        mean = op == dist.ReduceOp.AVG
        if not mean and op != dist.ReduceOp.SUM:
            work: Any = dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
            return work  # type: ignore[no-any-return]
        arrived, size = torch.empty_like(input_tensor), group.size()
        lent = _lend(arrived, input_tensor)
        with taking_part(group, "FSDP2's gradient reduction, in backward"):
            dist.all_to_all_single(lent[0], lent[1], group=group)
        _let_go(lent)
        # Each gradient is divided by the number of ranks and then added in the order of ranks, as DDP divides before it
        # adds. For two ranks that is DDP's own sum, bit by bit; for more the terms are DDP's and the order is this one,
        # where gloo's depends on where a number lies in its bucket. DDP's reducer multiplies too.
        scale = 1 / size if mean else 1.0
        if size & (size - 1):  # a product by a power of two is exact, and may be taken with the sum
            arrived.mul_(scale)
            scale = 1.0
        first, *others = arrived.view(size, -1)
        total = torch.mul(first, scale, out=output_tensor.view(-1))
        for part in others:
            total.add_(part, alpha=scale)
        return None
