"""Optimizers over whole parameters where ranks hold shards: each parameter has an owner, which steps it whole.

A step sends the shards of gradients to the owners, and rows of the new weights back. Owners keep a whole copy of what
they own, and its state. :mod:`fsshard.sharded.optimizer_step` shows these to the user's class.
"""

from __future__ import annotations

import dataclasses
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

BUCKET_BYTES = 2**25
"""Most bytes of whole parameters whose shards are sent together. There are buffers of two at a time, each with as many
bytes divided by the ranks."""
CHUNK = 65521
"""Numbers of a shard that are summed at a time."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Bytes of a number -> the integers that have its bits; two for a long one, since sums in 64 bits lose its sign."""


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
        known = {field.name: getattr(entry, field.name) for field in dataclasses.fields(Entry)}
        # Memory of its own, which torch aligns to 64 bytes: matrix products round by the address.
        flat = torch.empty(entry.stored_shape.numel(), dtype=entry.parameter.dtype, device=entry.local().device)
        whole = _laid(entry, flat)
        elements = whole if entry.cut is None else flat
        return cls(**{**known, "group": None, "cut": None}, elements=elements, whole=whole)

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
    work = {name: shape.numel() * min(shape[0], shape[1:].numel()) if shape else 1 for name, shape in shapes.items()}
    loads, owner = [0] * ranks, {}
    for name in sorted(work, key=lambda name: -work[name]):
        owner[name] = loads.index(min(loads))
        loads[owner[name]] += work[name]
    return owner


def _laid(entry: Entry, flat: Tensor) -> Tensor:
    """Return the stored tensor of all elements with the strides that it has in a bare model."""
    whole = shaped(entry, flat)
    if entry.cut is None and entry.local().stride() != whole.stride():  # FSDP1 on one rank, which keeps them itself
        whole = torch.empty_like(entry.local()).copy_(whole)
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
        self.owner = deal({entry.name: entry.shape for entry in self._entries}, group.size())
        self.mine = {e.name: WholeEntry.of(e) for e in self._entries if self.owner[e.name] == group.rank()}
        self._buckets = [
            _Bucket(entries, self.owner, group, backend.settings.device) for entries in _divided(self._entries)
        ]
        self._receive_weights()
        self._marks = self._mark()

    def begin(self) -> None:
        """Give owners whole gradients, and whole weights if a shard was written since the last step. Collective."""
        changed = self._marks != self._mark()  # by load(), an average that is swapped in, an initialisation
        changed_somewhere = False
        for wholes, told in _overlapped(bucket.to_owners(_gradients(bucket), changed) for bucket in self._buckets):
            changed_somewhere |= told
            for entry, whole in wholes.items():
                self.mine[entry.name].gradient = None if whole is None else _laid(entry, whole)
        if changed_somewhere:  # all ranks have heard of it
            self._receive_weights()

    def finish(self, failed: bool) -> None:
        """Send rows of the new weights to whom they belong. Collective, also where this rank's step has raised.

        Raises:
            OptimizerError: another rank's step has raised.
        """
        for entry in self.mine.values():
            entry.gradient = None  # there is room for what is sent
        elements = {name: entry.elements for name, entry in self.mine.items()}
        blamed = set[int]().union(*_overlapped(bucket.to_shards(elements, failed) for bucket in self._buckets))
        self._marks = self._mark()
        if blamed and not failed:
            raise OptimizerError(
                f"the optimizer's step raised on rank {min(blamed)}, which owns some of the parameters (whole=True); "
                "its error says why. Some weights are updated and others are not: load a checkpoint"
            )

    def _receive_weights(self) -> None:
        shards = ({entry.name: entry.local() for entry in bucket.entries} for bucket in self._buckets)
        sent = (bucket.to_owners(parts, False) for bucket, parts in zip(self._buckets, shards, strict=True))
        for wholes, _ in _overlapped(sent):
            for entry, whole in wholes.items():
                assert whole is not None, "every rank has sent its part"
                self.mine[entry.name].whole.copy_(shaped(entry, whole))

    def _mark(self) -> list[int]:
        """Return what changes when a shard is written: how often that was, and for ``p.data`` a sum of its bits."""
        shards = [entry.local() for entry in self._entries]
        sums = torch.stack([_sum_of_bits(shard) for shard in shards])
        return [*map(version_of, shards), *(sums.tolist() if _has_values(sums) else ())]


def _gradients(bucket: _Bucket) -> dict[str, Tensor | None]:
    return {entry.name: entry.grad() for entry in bucket.entries}


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
    chunks = shard.reshape(-1).view(BITS[shard.element_size()]).split(CHUNK)  # a bounded part at a time in 64 bits
    # Cubes, since sums of the places alone are often equal: 1 + 2 = 3. Odd ones, whose products keep the sign bit.
    weights = (2 * torch.arange(len(chunks[0]), device=shard.device) + 1) ** 3
    sums = [(bits * weights[: len(bits)]).sum() * (place + 1) for place, bits in enumerate(chunks)]
    return torch.stack(sums).sum()


def _has_values(tensor: Tensor) -> bool:
    """Return whether there are numbers in it: not in an estimate."""
    return type(tensor) is Tensor


def _divided(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Divide parameters into buckets of one dtype, of at most BUCKET_BYTES if there are several in it."""
    by_dtype: dict[torch.dtype, list[Entry]] = {}
    for entry in entries:
        by_dtype.setdefault(entry.parameter.dtype, []).append(entry)
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
        self.entries, self._group, self._device = entries, group, device
        self._dtype = entries[0].parameter.dtype
        self._of_owner = [[entry for entry in entries if owner[entry.name] == rank] for rank in range(group.size())]
        self._mine = self._of_owner[group.rank()]

    def to_owners(
        self, parts: Mapping[str, Tensor | None], flag: bool
    ) -> Callable[[], tuple[dict[Entry, Tensor | None], bool]]:
        """Send parts; end with whole flat tensors of what this rank owns, None where no rank has a part. Collective.

        Args:
            parts: this rank's, by name.
            flag: which is returned as True everywhere if it is on any rank.
        """
        outgoing = []
        for entries in self._of_owner:
            given = [parts[entry.name] for entry in entries]
            header = self._flags([flag, *(part is not None for part in given)])
            outgoing.append([header, *(self._flat(e, part) for e, part in zip(entries, given, strict=True))])
        sizes = [[stop - start for start, stop in (e.part(r) for e in self._mine)] for r in range(self._group.size())]
        exchanged = self._exchange(outgoing, [[1 + len(self._mine), *each] for each in sizes])
        own = [flag, *(parts[entry.name] is not None for entry in self._mine)]
        return lambda: self._joined(exchanged(), own)

    def _joined(
        self, received: Sequence[tuple[Tensor, ...]], own: Sequence[bool]
    ) -> tuple[dict[Entry, Tensor | None], bool]:
        headers = torch.stack([header for header, *_ in received])
        flags = headers.tolist() if _has_values(headers) else [own]
        wholes: dict[Entry, Tensor | None] = {}
        for number, entry in enumerate(self._mine, 1):
            wholes[entry] = None
            if any(told[number] for told in flags):
                device = entry.local().device
                whole = wholes[entry] = torch.empty(entry.stored_shape.numel(), dtype=self._dtype, device=device)
                for rank, pieces in enumerate(received):
                    whole[slice(*entry.part(rank))].copy_(pieces[number])
        return wholes, any(told[0] for told in flags)

    def to_shards(self, wholes: Mapping[str, Tensor], flag: bool) -> Callable[[], set[int]]:
        """Send what owners have; end with it written into shards, and the ranks whose flag is set. Collective."""
        outgoing = [
            [self._flags([flag]), *(wholes[e.name].reshape(-1)[slice(*e.part(rank))] for e in self._mine)]
            for rank in range(self._group.size())
        ]
        sizes = [[1, *(entry.local().numel() for entry in entries)] for entries in self._of_owner]
        exchanged = self._exchange(outgoing, sizes)
        return lambda: self._written(exchanged())

    def _written(self, received: Sequence[tuple[Tensor, ...]]) -> set[int]:
        for entries, (_, *pieces) in zip(self._of_owner, received, strict=True):
            for entry, piece in zip(entries, pieces, strict=True):
                shard = entry.local()
                shard.copy_(piece.view(shard.shape))
        flags = torch.cat([header for header, *_ in received])
        return {rank for rank, told in enumerate(flags.tolist() if _has_values(flags) else ()) if told}

    def _flags(self, flags: Sequence[bool]) -> Tensor:
        return torch.tensor([float(flag) for flag in flags], dtype=self._dtype, device=self._device)

    def _flat(self, entry: Entry, part: Tensor | None) -> Tensor:
        if part is None:
            return torch.zeros(entry.local().numel(), dtype=self._dtype, device=self._device)
        return part.detach().reshape(-1).to(self._device, self._dtype)

    def _exchange(
        self, outgoing: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]]
    ) -> Callable[[], list[tuple[Tensor, ...]]]:
        """Send ``outgoing[rank]`` to each rank; end with what came from each, cut into tensors of these sizes."""
        sent = torch.cat([piece.to(self._device) for pieces in outgoing for piece in pieces])
        received, lengths = sent.new_empty(sum(map(sum, sizes))), [sum(each) for each in sizes]
        own = [sum(piece.numel() for piece in pieces) for pieces in outgoing]
        work = dist.all_to_all_single(received, sent, lengths, own, group=self._group, async_op=True)

        def end() -> list[tuple[Tensor, ...]]:
            if work is not None:  # of one rank on some backends: it is done
                work.wait()
            return [part.split(list(each)) for part, each in zip(received.split(lengths), sizes, strict=True)]

        return end
