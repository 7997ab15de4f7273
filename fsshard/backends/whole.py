"""Whole tensors from the parts that ranks hold, by where the elements of each parameter lie, whatever the engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.backends.batched_collectives import collective_batches, gathered
from fsshard.backends.settings import Settings
from fsshard.planning.entries import Entry

__all__ = ["gather", "gather_all", "stream"]


def gather(entry: Entry, local: Tensor, device: torch.device) -> Tensor:
    """The whole stored tensor from every rank's part of it: a new tensor on every rank. Collective.

    Args:
        entry: the parameter.
        local: this rank's part of it, or of a tensor of its shape.
        device: where parts are sent from, and the whole is made, if ranks hold different ones.
    """
    group = entry.group
    if not entry.is_cut or group is None:
        return local.detach().clone().reshape(entry.stored_shape)
    ranges = [entry.part(rank) for rank in range(group.size())]
    width = max(stop - start for start, stop in ranges)
    padded = local.new_zeros(width, device=device)
    padded[: local.numel()] = local.detach().reshape(-1)
    places = padded.new_empty(group.size() * width)
    dist.all_gather_single(places, padded, group=group)
    total = entry.stored_shape.numel()
    if all(start == min(rank * width, total) for rank, (start, _) in enumerate(ranges)):  # padding at the end only
        return _shaped(entry, places[:total])
    pieces = [places[rank * width :][: stop - start] for rank, (start, stop) in enumerate(ranges)]
    return _shaped(entry, torch.cat(pieces))


def gather_all(parts: Iterable[tuple[Entry, Tensor]], device: torch.device) -> Iterator[Tensor]:
    """:func:`gather` of many, small ones together. Collective, so run it to its end on every rank."""
    for batch in collective_batches(parts):
        group = batch[0][0].group
        if len(batch) == 1 or group is None or not batch[0][0].is_cut:
            yield from (gather(entry, local, device) for entry, local in batch)
            continue
        ranges = [[entry.part(rank) for entry, _ in batch] for rank in range(group.size())]
        sizes = [[stop - start for start, stop in row] for row in ranges]
        flat = gathered([part for _, part in batch], sizes, group, device)
        for (entry, _), whole in zip(batch, flat, strict=True):
            yield _shaped(entry, whole)


def stream(entry: Entry, settings: Settings, *, rank0_only: bool, device: torch.device) -> Tensor | None:
    """The whole stored parameter as a new tensor on ``device``; None where it is not kept. Collective.

    With ``rank0_only`` parts are received where they stay: nothing else is allocated.
    """
    group = entry.group
    if not entry.is_cut or group is None:
        kept = not (rank0_only and settings.rank)
        return entry.local().to(device, copy=True).reshape(entry.stored_shape) if kept else None
    if not rank0_only:
        return gather(entry, entry.local(), settings.device).to(device)
    rank0 = dist.get_process_group_ranks(settings.group)[0]
    if rank0 not in dist.get_process_group_ranks(group):
        return None  # another copy of the same parameters (HYBRID_SHARD)
    mine = entry.local().reshape(-1)
    if dist.get_rank() == rank0:
        return _receive(entry, group, mine, settings.device, device)
    if mine.numel():
        sent = mine.to(settings.device)  # the shard itself, unless cpu_offload keeps it in host memory
        _exchange([dist.P2POp(dist.isend, sent, rank0, group)])
    return None


def _receive(entry: Entry, group: dist.ProcessGroup, mine: Tensor, here: torch.device, device: torch.device) -> Tensor:
    """Every rank's part of ``entry``, put together on ``device``; they arrive on ``here``."""
    whole = torch.empty(entry.stored_shape.numel(), dtype=mine.dtype, device=device)
    waited: list[tuple[Tensor, Tensor]] = []  # (where a part arrives, where it belongs)
    operations = []
    for rank, peer in enumerate(dist.get_process_group_ranks(group)):
        start, stop = entry.part(rank)
        place = whole[start:stop]
        if rank == group.rank():
            place.copy_(mine)
        elif stop > start:
            arrives = place if device == here else torch.empty_like(place, device=here)
            waited.append((arrives, place))
            operations.append(dist.P2POp(dist.irecv, arrives, peer, group))
    _exchange(operations)
    for arrives, place in waited:
        if arrives is not place:
            place.copy_(arrives)
    return _shaped(entry, whole)


def _shaped(entry: Entry, flat: Tensor) -> Tensor:
    """The stored tensor of all elements, in the order in which the engine lays them."""
    if entry.cut is None or entry.cut.strides is None:
        return flat.reshape(entry.stored_shape)
    return flat.contiguous().as_strided(entry.stored_shape, entry.cut.strides)


def _exchange(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
