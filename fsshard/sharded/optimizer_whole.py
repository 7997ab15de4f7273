"""Optimizers over whole parameters where ranks hold shards: each parameter has an owner, which steps it whole.

A step sends the shards of gradients to the owners, and rows of the new weights back. Owners keep a whole copy of what
they own, and its state. :mod:`fsshard.sharded.optimizer_step` shows these to the user's class.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fsshard.backends.base import Backend
from fsshard.backends.whole import shaped
from fsshard.comm.agreement import batches
from fsshard.errors import OptimizerError
from fsshard.planning.entries import Entry
from fsshard.torch_private.tensors import version_of

T = TypeVar("T")

Joined = tuple[dict[Entry, Tensor | None], bool]
"""Whole tensors of what this rank owns, None where no rank has a part; and whether the flag is set on any rank."""
Received = list[tuple[Tensor, ...]]
"""From each rank, its header and the tensors behind it."""
BUCKET_BYTES = 2**25
"""Most bytes of whole parameters whose shards are sent together. There are buffers of two at a time, each with as many
bytes divided by the ranks."""
CHUNK = 65521
"""Numbers of a shard that are summed at a time."""
BITS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    # Two of them, since sums in 64 bits would lose its sign.
    8: torch.int32,
}
"""Bytes of a number -> the integers that have its bits."""


@dataclass(eq=False, kw_only=True)
class WholeEntry(Entry):
    """A divided parameter as its owner steps it.

    Attributes:
        elements: the copy of all elements, in the order in which the engine lays them; of any shape.
        whole: the same memory in the stored shape.
        gradient: the whole one during a step; None where no rank has one.
    """

    elements: Tensor
    whole: Tensor
    gradient: Tensor | None = None

    @classmethod
    def of(cls, entry: Entry) -> WholeEntry:
        """Return the entry with memory for the whole, still without values."""
        settings = {}
        for field in dataclasses.fields(Entry):
            settings[field.name] = getattr(entry, field.name)
        # Its owner has all of it, as if nothing divided it.
        settings["group"] = None
        settings["cut"] = None
        numel = entry.stored_shape.numel()
        # Memory of its own, which torch aligns to 64 bytes: matrix products round by the address.
        device = entry.local().device
        flat = torch.empty(numel, dtype=entry.parameter.dtype, device=device)
        whole = _laid(entry, flat)
        elements = whole if entry.cut is None else flat
        return cls(**settings, elements=elements, whole=whole)

    def local(self) -> Tensor:
        return self.whole

    def grad(self) -> Tensor | None:
        return self.gradient


def deal(shapes: Mapping[str, torch.Size], ranks: int) -> dict[str, int]:
    """Return the owner of each parameter: the longest work first, to the rank that has least so far.

    Args:
        shapes: name -> shape that the user sees, in an order that all ranks have.
        ranks: among how many.
    """
    # Products of a matrix with itself take elements times its smaller side.
    work = {}
    for name, shape in shapes.items():
        smaller_side = 1
        if shape:
            other_side = shape[1:].numel()
            smaller_side = min(shape[0], other_side)
        work[name] = shape.numel() * smaller_side
    loads = [0] * ranks
    owners = {}
    for name in sorted(work, key=work.__getitem__, reverse=True):
        rank = loads.index(min(loads))
        owners[name] = rank
        loads[rank] += work[name]
    return owners


def _laid(entry: Entry, flat: Tensor) -> Tensor:
    """Return the stored tensor of all elements with the strides that it has in a bare model."""
    whole = shaped(entry, flat)
    local = entry.local()
    if entry.cut is None and local.stride() != whole.stride():
        # FSDP1 on one rank keeps strides itself.
        whole = torch.empty_like(local).copy_(whole)
    return whole


class Owners:
    """The parameters of one optimizer, each with the rank that steps it. Made by a collective.

    Attributes:
        owner: name of a parameter -> the rank, of those that divide it, that owns it.
        mine: what this rank owns, by name.
    """

    def __init__(self, backend: Backend, names: Sequence[str]) -> None:
        self._entries = [backend.entries[name] for name in names]
        group = self._entries[0].group
        assert group is not None, "an engine that divides parameters has a group"
        shapes = {entry.name: entry.shape for entry in self._entries}
        self.owner = deal(shapes, group.size())
        self.mine = {}
        for entry in self._entries:
            if self.owner[entry.name] == group.rank():
                self.mine[entry.name] = WholeEntry.of(entry)
        self._buckets = []
        for entries in _divided(self._entries):
            bucket = _Bucket(entries, self.owner, group, backend.settings.device)
            self._buckets.append(bucket)
        self._receive_weights()
        self._marks = self._mark()

    @torch.no_grad()
    def begin(self) -> None:
        """Give owners whole gradients, and whole weights if a shard was written since the last step. Collective."""
        # By load(), an average that is swapped in, or an initialisation.
        is_changed = self._marks != self._mark()
        is_changed_somewhere = False
        exchanges = (bucket.to_owners(Entry.grad, is_changed) for bucket in self._buckets)
        for wholes, is_changed_on_any in _overlapped(exchanges):
            is_changed_somewhere |= is_changed_on_any
            for entry, whole in wholes.items():
                if whole is not None:
                    whole = _laid(entry, whole)
                self.mine[entry.name].gradient = whole
        # All ranks come to the same answer, and so to this collective or past it.
        if is_changed_somewhere:
            self._receive_weights()

    @torch.no_grad()
    def finish(self, failed: bool) -> None:
        """Send rows of the new weights to whom they belong. Collective, also where this rank's step has raised.

        Raises:
            OptimizerError: another rank's step has raised.
        """
        for entry in self.mine.values():
            # Its memory is free then for what is sent.
            entry.gradient = None
        failed_ranks = set()
        exchanges = (bucket.to_shards(self.mine, failed) for bucket in self._buckets)
        for ranks in _overlapped(exchanges):
            failed_ranks |= ranks
        self._marks = self._mark()
        # A rank whose own step has raised says why itself.
        if failed_ranks and not failed:
            first = min(failed_ranks)
            raise OptimizerError(
                f"the optimizer's step raised on rank {first}, which owns some parameters (whole=True); "
                "its error says why. Some weights are updated and others are not: load a checkpoint"
            )

    def _receive_weights(self) -> None:
        exchanges = (bucket.to_owners(Entry.local, False) for bucket in self._buckets)
        for wholes, _ in _overlapped(exchanges):
            for entry, received in wholes.items():
                assert received is not None, "every rank has sent its part"
                whole = self.mine[entry.name].whole
                stored = shaped(entry, received)
                whole.copy_(stored)

    def _mark(self) -> list[int]:
        """Return what changes when a shard is written: how often that was, and for ``p.data`` a sum of its bits."""
        marks = []
        sums = []
        for entry in self._entries:
            shard = entry.local()
            marks.append(version_of(shard))
            sums.append(_sum_of_bits(shard))
        # One copy to the host for all of them.
        sums_of_all = torch.stack(sums)
        if _has_values(sums_of_all):
            marks += sums_of_all.tolist()
        return marks


def _overlapped(exchanges: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Yield what each exchange ends with, once the next has begun: a bucket is packed while another is on its way."""
    waiting: Callable[[], T] | None = None
    for begun in exchanges:
        if waiting is not None:
            yield waiting()
        waiting = begun
    if waiting is not None:
        yield waiting()


def _sum_of_bits(shard: Tensor) -> Tensor:
    """Weighted by the place, so that other signs and another order are another sum."""
    integers = BITS[shard.element_size()]
    bits = shard.reshape(-1).view(integers)
    # A bounded part at a time is there in 64 bits.
    chunks = bits.split(CHUNK)
    longest = len(chunks[0])
    places = torch.arange(longest, device=shard.device)
    # Odd numbers, whose products keep the sign bit.
    odd = 2 * places + 1
    # Cubes, since sums of the places alone are often equal: 1 + 2 = 3.
    weights = odd**3
    sums = []
    for place, chunk in enumerate(chunks, start=1):
        weighted = chunk * weights[: len(chunk)]
        sums.append(weighted.sum() * place)
    return torch.stack(sums).sum()


def _has_values(tensor: Tensor) -> bool:
    """Return whether there are numbers in it: not in an estimate."""
    return type(tensor) is Tensor


def _divided(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Divide parameters into buckets of one dtype, of at most BUCKET_BYTES if there are several in it."""
    by_dtype = defaultdict(list)
    for entry in entries:
        by_dtype[entry.parameter.dtype].append(entry)
    for alike in by_dtype.values():
        yield from batches(alike, _nbytes, BUCKET_BYTES)


def _nbytes(entry: Entry) -> int:
    return entry.stored_shape.numel() * entry.parameter.element_size()


class _Bucket:
    """Parameters of one dtype whose shards are sent in one collective.

    Each message begins with numbers that stand for yes and no, so that ranks agree without a collective more. Both ways
    begin when they are called, and end when what they return is called.
    """

    def __init__(
        self, entries: list[Entry], owner: Mapping[str, int], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._group = group
        self._device = device
        self._dtype = entries[0].parameter.dtype
        # By rank, what it owns.
        self._of_owner: list[list[Entry]] = [[] for _ in range(group.size())]
        for entry in entries:
            rank = owner[entry.name]
            self._of_owner[rank].append(entry)
        self._mine = self._of_owner[group.rank()]

    def to_owners(self, part_of: Callable[[Entry], Tensor | None], flag: bool) -> Callable[[], Joined]:
        """Send parts; end with whole flat tensors of what this rank owns, None where no rank has a part. Collective.

        Args:
            part_of: looks up what this rank has of an entry; None if nothing.
            flag: returned as True everywhere if it is on any rank.
        """
        outgoing = []
        headers = []
        for entries in self._of_owner:
            # The flag, and for each entry whether this rank has a part of it.
            header = [flag]
            flat_parts = []
            for entry in entries:
                part = part_of(entry)
                header.append(part is not None)
                flat_parts.append(self._flat(entry, part))
            headers.append(header)
            message = [self._flags(header), *flat_parts]
            outgoing.append(message)
        sizes = []
        header_length = 1 + len(self._mine)
        for rank in range(self._group.size()):
            lengths = [header_length]
            for entry in self._mine:
                start, stop = entry.part(rank)
                lengths.append(stop - start)
            sizes.append(lengths)
        received = self._exchange(outgoing, sizes)
        own_header = headers[self._group.rank()]
        return lambda: self._joined(received(), own_header)

    def _joined(self, received: Received, own_header: Sequence[bool]) -> Joined:
        headers = torch.stack([pieces[0] for pieces in received])
        # For each flag, whether it is set on any rank; an estimate knows this rank's alone.
        on_any = own_header
        if _has_values(headers):
            is_set = headers.bool().any(dim=0)
            on_any = is_set.tolist()
        wholes: dict[Entry, Tensor | None] = {}
        for number, entry in enumerate(self._mine, start=1):
            wholes[entry] = None
            if not on_any[number]:
                continue
            numel = entry.stored_shape.numel()
            device = entry.local().device
            whole = torch.empty(numel, dtype=self._dtype, device=device)
            for rank, pieces in enumerate(received):
                start, stop = entry.part(rank)
                whole[start:stop] = pieces[number]
            wholes[entry] = whole
        return wholes, bool(on_any[0])

    def to_shards(self, owned: Mapping[str, WholeEntry], flag: bool) -> Callable[[], set[int]]:
        """Send rows of what this rank owns; end with shards written, and the ranks whose flag is set. Collective."""
        outgoing = []
        for rank in range(self._group.size()):
            message = [self._flags([flag])]
            for entry in self._mine:
                start, stop = entry.part(rank)
                flat = owned[entry.name].elements.reshape(-1)
                rows = flat[start:stop]
                message.append(rows)
            outgoing.append(message)
        sizes = []
        for entries in self._of_owner:
            numels = [entry.local().numel() for entry in entries]
            sizes.append([1, *numels])
        received = self._exchange(outgoing, sizes)
        return lambda: self._written(received())

    def _written(self, received: Received) -> set[int]:
        headers = []
        for entries, of_rank in zip(self._of_owner, received, strict=True):
            header, *pieces = of_rank
            headers.append(header)
            for entry, piece in zip(entries, pieces, strict=True):
                shard = entry.local()
                shard.copy_(piece.view(shard.shape))
        flags = torch.cat(headers)
        if not _has_values(flags):
            return set()
        ranks = flags.nonzero().flatten()
        return set(ranks.tolist())

    def _flags(self, flags: Sequence[bool]) -> Tensor:
        return torch.tensor(flags, dtype=self._dtype, device=self._device)

    def _flat(self, entry: Entry, part: Tensor | None) -> Tensor:
        if part is None:
            # Its place in the message must not be empty: all ranks cut messages by the same sizes.
            numel = entry.local().numel()
            return torch.zeros(numel, dtype=self._dtype, device=self._device)
        flat = part.detach().reshape(-1)
        return flat.to(self._device, self._dtype)

    def _exchange(self, outgoing: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]]) -> Callable[[], Received]:
        """Send ``outgoing[rank]`` to each rank; end with what came from each, cut into tensors of these sizes."""
        pieces = []
        lengths_sent = []
        for message in outgoing:
            length = 0
            for piece in message:
                length += piece.numel()
                pieces.append(piece.to(self._device))
            lengths_sent.append(length)
        sent = torch.cat(pieces)
        lengths = list(map(sum, sizes))
        received = sent.new_empty(sum(lengths))
        work = dist.all_to_all_single(received, sent, lengths, lengths_sent, group=self._group, async_op=True)

        def end() -> Received:
            # Some backends are done with a group of one rank at once, and return nothing to wait for.
            if work is not None:
                work.wait()
            of_ranks = []
            parts = received.split(lengths)
            for part, of_rank in zip(parts, sizes, strict=True):
                of_ranks.append(part.split(list(of_rank)))
            return of_ranks

        return end
