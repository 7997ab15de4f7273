"""Faster collectives for FSDP2 over gloo, through hooks that FSDP2 offers.

gloo's reduce-scatter is an all-reduce whose other parts are thrown away (torch 2.13), twice the bytes of what it is
asked for, and both it and the all-gather take longer than the same work by other primitives. Here a unit is gathered by
one broadcast per rank; :mod:`fsshard.comm.unit_reduction` reduces it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.comm.lending import lend, let_go
from fsshard.torch_private.fsdp2_collectives import AllGather


class _Broadcasts(dist.Work):
    """One per rank, waited for together."""

    def __init__(self, works: list[Any], lent: list[Tensor]) -> None:
        super().__init__()
        self._works = works
        self._lent = lent

    def wait(self, timeout: Any = None) -> bool:
        while self._works:
            self._works[0].wait()
            # Not before: who waits again after an error must not find numbers that never arrived.
            del self._works[0]
        let_go(self._lent)
        return True


class Gather(AllGather):
    """An all-gather as broadcasts, every rank's part from its rank."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer for the whole unit."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work:
        """Fill ``output_tensor`` with every rank's ``input_tensor``; asynchronous whatever ``async_op`` says."""
        # FSDP2 waits for any Work that it is given where it needs the numbers, so that the gather that it starts ahead
        # in backward overlaps the computation; and then lets go of the gathered buffer at once.
        parts = output_tensor.chunk(group.size())
        mine = parts[group.rank()]
        if mine.data_ptr() != input_tensor.data_ptr():
            mine.copy_(input_tensor)
        lent = []
        # All parts are of one size.
        if mine.numel():
            lent = lend(*parts)
        works = []
        for rank, part in enumerate(lent):
            works.append(dist.broadcast(part, group=group, group_src=rank, async_op=True))
        return _Broadcasts(works, lent)
