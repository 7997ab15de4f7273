"""Reduces the gradients of one of FSDP2's units in the order of :mod:`fsshard.comm.tree`, through a hook of FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.comm import tree
from fsshard.comm.watchdog import taking_part
from fsshard.torch_private.fsdp2_collectives import ReduceScatter


class Reduce(ReduceScatter):
    """A reduce-scatter to the mean as an all-to-all and sums; FSDP2 itself must not divide.

    Args:
        replicas: under hybrid sharding, the ranks that hold the same part as this one.
        narrow: the dtype in which gradients are sent and added over ranks; None: the policy's ``reduce_dtype``.
    """

    def __init__(self, replicas: dist.ProcessGroup | None = None, narrow: torch.dtype | None = None) -> None:
        super().__init__()
        self._replicas = replicas
        self._narrow = narrow

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer for a unit's gradients: FSDP2 rounds as it copies into it."""
        # By the policy's own reduce_dtype FSDP2 would add the micro-batches of no_sync in it as well (torch 2.13).
        return torch.empty(*size, dtype=self._narrow or dtype, device=device)

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Put this rank's part of the mean of ``input_tensor`` into ``output_tensor``, whatever ``op`` says."""
        with taking_part(group, "FSDP2's gradient reduction, in backward"):
            scale = 1.0 / group.size()
            tree.reduce_scatter(output_tensor, input_tensor, group, scale)
        if self._replicas is not None:
            copies = self._replicas.size()
            output_tensor.mul_(1.0 / copies)
            # Of two replicas FSDP2's own all-reduce makes the same sum.
            if copies > 2:
                _add_over(output_tensor, self._replicas)
        return None


def _add_over(part: Tensor, replicas: dist.ProcessGroup) -> None:
    """Add up over more than two replicas, so that FSDP2's own all-reduce, which follows, has only to copy.

    Each rank keeps a piece of the sum. Everywhere else it has -0.0, which changes no number that it is added to, not
    even the sign of a zero.
    """
    ranks = replicas.size()
    chunk = -(-part.numel() // ranks)
    padded = torch.nn.functional.pad(part, (0, chunk * ranks - part.numel()))
    mine = part.new_empty(chunk)
    tree.reduce_scatter(mine, padded, replicas)
    padded.fill_(-0.0)
    padded[chunk * replicas.rank() :][:chunk].copy_(mine)
    part.copy_(padded[: part.numel()])
