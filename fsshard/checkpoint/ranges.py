"""Turns shards that are not contiguous ranges of the flattened tensor into ranges, the only form that is stored.

An engine may divide a parameter in the order in which it lies in memory (``Entry.in_order``): of one in
``channels_last``, or transposed, a rank then holds elements from all over. These tensors are put together one by one,
and each rank keeps as many elements as before, now successive ones. Likewise what other mesh dimensions than data have
divided (``Entry.divided_over``): put together one by one, of which each rank keeps an equal share.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fsshard.backends.base import Backend
from fsshard.backends.whole import gather
from fsshard.checkpoint.collect import Collected, Part, in_users_order, is_scattered
from fsshard.checkpoint.format.dtypes import BY_NAME, dtype_name
from fsshard.checkpoint.format.pieces import Range
from fsshard.comm.rendezvous import Rendezvous
from fsshard.planning.entries import Entry

__all__ = ["divides_otherwise", "put_in_ranges"]


def divides_otherwise(backend: Backend) -> bool:
    """Whether there is anything to do; the same on every rank."""
    return any(is_scattered(backend, entry) for entry in backend.all)


@torch.no_grad()
def put_in_ranges(found: Collected, backend: Backend, rendezvous: Rendezvous) -> None:
    """Replace the parts of ``found`` that are marked as scattered. Collective."""
    mine = {name: part for name, part in found.parts.items() if part.scattered}
    told = {name: [p.scattered, dtype_name(p.dtype), list(p.shape)] for name, p in mine.items()}
    # A rank that holds no element of a parameter has no state for it, and takes part all the same.
    known: dict[str, Any] = {name: item for table in rendezvous.gather(told) for name, item in table.items()}
    for name, (parameter, dtype, shape) in sorted(known.items()):
        entry = backend.entries[parameter]
        if name not in mine and backend.facts.divides != "elements":
            continue  # nor have the ranks that hold other parts of it: the same rank of data owns all
        empty = Part(BY_NAME[dtype], tuple(shape), (0, 0), torch.empty(0, dtype=BY_NAME[dtype]))
        part = _in_range(entry, mine.get(name, empty), backend)
        if name in mine or part.values.numel():
            found.parts[name] = part


def _in_range(entry: Entry, part: Part, backend: Backend) -> Part:
    """This rank's share of the whole tensor: of one divided by data alone as many elements as before. Collective."""
    values = part.values.to(backend.settings.device)
    stored = torch.view_as_real(values).reshape(-1) if part.dtype.is_complex else values
    whole = in_users_order(entry, gather(entry, stored, backend.settings.device))
    if not entry.divided_over:
        return dataclasses.replace(part, values=whole[slice(*part.range)].clone(), scattered="")
    pairs = (2,) if entry.kind.is_complex and not part.dtype.is_complex else ()
    whole = entry.put_together(whole.view(*entry.shape, *pairs)).reshape(-1)
    share = _share(entry, whole.numel(), backend)
    return dataclasses.replace(part, range=share, values=whole[slice(*share)].clone(), scattered="")


def _share(entry: Entry, numel: int, backend: Backend) -> Range:
    """The elements that this rank keeps: of those that all ranks of data hold, a share along the other dimensions."""
    if backend.facts.divides == "elements":
        rank, ranks = backend.settings.overall_rank, backend.settings.all_ranks
    else:
        rank, ranks = 0, 1
        for group in entry.divided_over:
            rank, ranks = rank * group.size() + group.rank(), ranks * group.size()
    return numel * rank // ranks, numel * (rank + 1) // ranks
