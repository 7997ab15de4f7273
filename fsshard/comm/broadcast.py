"""Sends tensors of rank 0 to all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.torch_private.c10d import broadcast_coalesced

__all__ = ["broadcast_tensors"]

BROADCAST_BYTES = 250 * 2**20


@torch.no_grad()
def broadcast_tensors(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Rank 0's values to every rank of the group, coalesced by dtype. Collective."""
    real = [torch.view_as_real(t.detach()) if t.is_complex() else t.detach() for t in tensors if t.numel()]
    if real:
        broadcast_coalesced(group, real, BROADCAST_BYTES, 0)
