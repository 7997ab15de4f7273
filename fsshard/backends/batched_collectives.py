"""Sends parts of many parameters in one collective, since a small tensor costs far more in calls than in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from fsshard.planning.entries import Entry

__all__ = ["BATCH_BYTES", "collective_batches", "from_owners", "gathered"]

BATCH_BYTES = 2**20
"""Of whole tensors that are sent together. What takes longer than this by itself gains nothing from company."""


def collective_batches(parts: Iterable[tuple[Entry, Tensor]]) -> Iterator[list[tuple[Entry, Tensor]]]:
    """Successive parts of one dtype whose whole tensors have at most ``BATCH_BYTES`` together; larger ones alone.

    The same on every rank, since it looks at whole tensors only. Sparse tensors are alone.
    """
    batch: list[tuple[Entry, Tensor]] = []
    held = 0
    for entry, part in parts:
        nbytes = entry.stored_shape.numel() * part.element_size() if part.layout is torch.strided else BATCH_BYTES + 1
        if batch and (part.dtype != batch[0][1].dtype or held + nbytes > BATCH_BYTES):
            yield batch
            batch, held = [], 0
        batch.append((entry, part))
        held += nbytes
    if batch:
        yield batch


def gathered(
    parts: Sequence[Tensor], sizes: Sequence[Sequence[int]], group: dist.ProcessGroup, device: torch.device
) -> list[Tensor]:
    """Whole flat tensors from every rank's parts of them. Collective.

    Args:
        parts: this rank's, all of one dtype.
        sizes: by rank of the group, the number of elements of each of its parts.
        group: who holds the parts.
        device: where they are sent from.
    """
    mine = torch.cat([part.detach().reshape(-1) for part in parts]).to(device)
    assert mine.numel() == sum(sizes[group.rank()])
    width = max(map(sum, sizes))
    sent = mine if mine.numel() == width else torch.cat([mine, mine.new_zeros(width - mine.numel())])
    received = sent.new_empty(group.size() * width)
    dist.all_gather_single(received, sent, group=group)
    rows = (received[rank * width :][: sum(row)].split(list(row)) for rank, row in enumerate(sizes))
    return [torch.cat(pieces) for pieces in zip(*rows, strict=True)]


def from_owners(
    tensors: Sequence[Tensor], owners: Sequence[int | None], group: dist.ProcessGroup | None
) -> list[Tensor]:
    """Copies of the owners' tensors, or of this rank's where there is no owner. Collective, once per owner.

    Args:
        tensors: this rank's: of one dtype, of the owners' shapes.
        owners: the rank of the group that each comes from.
        group: who takes part; None where nobody owns anything.
    """
    if len(tensors) == 1:
        found = [tensors[0].detach().clone()]
        if owners[0] is not None:
            dist.broadcast(found[0], group=group, group_src=owners[0])
        return found
    found = list(tensors)
    for owner in sorted({rank for rank in owners if rank is not None}):
        places = [place for place, rank in enumerate(owners) if rank == owner]
        flat = torch.cat([tensors[place].detach().reshape(-1) for place in places])
        dist.broadcast(flat, group=group, group_src=owner)
        for place, piece in zip(places, flat.split([tensors[p].numel() for p in places]), strict=True):
            found[place] = piece.clone().reshape(tensors[place].shape)
    return [tensor.detach().clone() if owner is None else tensor for tensor, owner in zip(found, owners, strict=True)]
