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
        settings = {field.name: getattr(entry, field.name) for field in dataclasses.fields(Entry)}
        settings["group"] = None
        settings["cut"] = None
        # Memory of its own, which torch aligns to 64 bytes: matrix products round by the address.
        flat = torch.empty(entry.stored_shape.numel(), dtype=entry.parameter.dtype, device=entry.local().device)
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
        smaller_side = min(shape[0], shape[1:].numel()) if shape else 1
        work[name] = shape.numel() * smaller_side
    loads = [0] * ranks
    owners = {}
    for name in sorted(work, key=lambda name: -work[name]):
        rank = loads.index(min(loads))
        owners[name] = rank
        loads[rank] += work[name]
    return owners


def _laid(entry: Entry, flat: Tensor) -> Tensor:
    """Return the stored tensor of all elements with the strides that it has in a bare model."""
    whole = shaped(entry, flat)
    if entry.cut is None and entry.local().stride() != whole.stride():
        # FSDP1 on one rank keeps strides itself.
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
        self.mine: dict[str, WholeEntry] = {}
        for entry in self._entries:
            if self.owner[entry.name] == group.rank():
                self.mine[entry.name] = WholeEntry.of(entry)
        device = backend.settings.device
        self._buckets = [_Bucket(entries, self.owner, group, device) for entries in _divided(self._entries)]
        self._receive_weights()
        self._marks = self._mark()

    @torch.no_grad()
    def begin(self) -> None:
        """Give owners whole gradients, and whole weights if a shard was written since the last step. Collective."""
        # By load(), an average that is swapped in, or an initialisation.
        is_changed = self._marks != self._mark()
        is_changed_somewhere = False
        exchanges = (bucket.to_owners(_gradients(bucket), is_changed) for bucket in self._buckets)
        for wholes, is_changed_on_any in _overlapped(exchanges):
            is_changed_somewhere |= is_changed_on_any
            for entry, whole in wholes.items():
                if whole is not None:
                    whole = _laid(entry, whole)
                self.mine[entry.name].gradient = whole
        # All ranks have heard of it.
        if is_changed_somewhere:
            self._receive_weights()

    @torch.no_grad()
    def finish(self, failed: bool) -> None:
        """Send rows of the new weights to whom they belong. Collective, also where this rank's step has raised.

        Raises:
            OptimizerError: another rank's step has raised.
        """
        elements = {}
        for name, entry in self.mine.items():
            # There is room then for what is sent.
            entry.gradient = None
            elements[name] = entry.elements
        failed_ranks = set()
        for ranks in _overlapped(bucket.to_shards(elements, failed) for bucket in self._buckets):
            failed_ranks |= ranks
        self._marks = self._mark()
        if failed_ranks and not failed:
            raise OptimizerError(
                f"the optimizer's step raised on rank {min(failed_ranks)}, which owns some parameters (whole=True); "
                "its error says why. Some weights are updated and others are not: load a checkpoint"
            )

    def _receive_weights(self) -> None:
        exchanges = (bucket.to_owners(_shards(bucket), False) for bucket in self._buckets)
        for wholes, _ in _overlapped(exchanges):
            for entry, whole in wholes.items():
                assert whole is not None, "every rank has sent its part"
                self.mine[entry.name].whole.copy_(shaped(entry, whole))

    def _mark(self) -> list[int]:
        """Return what changes when a shard is written: how often that was, and for ``p.data`` a sum of its bits."""
        shards = [entry.local() for entry in self._entries]
        marks = [version_of(shard) for shard in shards]
        sums = torch.stack([_sum_of_bits(shard) for shard in shards])
        if _has_values(sums):
            marks += sums.tolist()
        return marks


def _gradients(bucket: _Bucket) -> dict[str, Tensor | None]:
    return {entry.name: entry.grad() for entry in bucket.entries}


def _shards(bucket: _Bucket) -> dict[str, Tensor]:
    return {entry.name: entry.local() for entry in bucket.entries}


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
    bits = shard.reshape(-1).view(BITS[shard.element_size()])
    # A bounded part at a time is there in 64 bits.
    chunks = bits.split(CHUNK)
    # Cubes, since sums of the places alone are often equal: 1 + 2 = 3. Odd ones, whose products keep the sign bit.
    weights = (2 * torch.arange(len(chunks[0]), device=shard.device) + 1) ** 3
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
        self.entries = entries
        self._group = group
        self._device = device
        self._dtype = entries[0].parameter.dtype
        self._of_owner: list[list[Entry]] = [[] for _ in range(group.size())]
        for entry in entries:
            self._of_owner[owner[entry.name]].append(entry)
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
            message = [self._header(entries, parts, flag)]
            message += [self._flat(entry, parts[entry.name]) for entry in entries]
            outgoing.append(message)
        sizes = []
        for rank in range(self._group.size()):
            lengths = [1 + len(self._mine)]
            for entry in self._mine:
                start, stop = entry.part(rank)
                lengths.append(stop - start)
            sizes.append(lengths)
        exchanged = self._exchange(outgoing, sizes)
        own = [flag, *(parts[entry.name] is not None for entry in self._mine)]
        return lambda: self._joined(exchanged(), own)

    def _header(self, entries: Iterable[Entry], parts: Mapping[str, Tensor | None], flag: bool) -> Tensor:
        """Return the flag, and for each entry whether this rank has a part of it."""
        return self._flags([flag, *(parts[entry.name] is not None for entry in entries)])

    def _joined(
        self, received: Sequence[tuple[Tensor, ...]], own: Sequence[bool]
    ) -> tuple[dict[Entry, Tensor | None], bool]:
        headers = torch.stack([header for header, *_ in received])
        # By number of the flag, whether it is set on any rank.
        on_any = own
        if _has_values(headers):
            on_any = headers.bool().any(dim=0).tolist()
        wholes: dict[Entry, Tensor | None] = {}
        for number, entry in enumerate(self._mine, start=1):
            wholes[entry] = None
            if not on_any[number]:
                continue
            device = entry.local().device
            whole = torch.empty(entry.stored_shape.numel(), dtype=self._dtype, device=device)
            for rank, pieces in enumerate(received):
                start, stop = entry.part(rank)
                whole[start:stop].copy_(pieces[number])
            wholes[entry] = whole
        return wholes, bool(on_any[0])

    def to_shards(self, wholes: Mapping[str, Tensor], flag: bool) -> Callable[[], set[int]]:
        """Send what owners have; end with it written into shards, and the ranks whose flag is set. Collective."""
        outgoing = []
        for rank in range(self._group.size()):
            message = [self._flags([flag])]
            for entry in self._mine:
                start, stop = entry.part(rank)
                message.append(wholes[entry.name].reshape(-1)[start:stop])
            outgoing.append(message)
        sizes = [[1, *(entry.local().numel() for entry in entries)] for entries in self._of_owner]
        exchanged = self._exchange(outgoing, sizes)
        return lambda: self._written(exchanged())

    def _written(self, received: Sequence[tuple[Tensor, ...]]) -> set[int]:
        for entries, (_, *pieces) in zip(self._of_owner, received, strict=True):
            for entry, piece in zip(entries, pieces, strict=True):
                shard = entry.local()
                shard.copy_(piece.view(shard.shape))
        flags = torch.cat([header for header, *_ in received])
        if not _has_values(flags):
            return set()
        return {rank for rank, is_set in enumerate(flags.tolist()) if is_set}

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
        pieces = []
        lengths_sent = []
        for message in outgoing:
            pieces += [piece.to(self._device) for piece in message]
            lengths_sent.append(sum(piece.numel() for piece in message))
        sent = torch.cat(pieces)
        lengths = [sum(of_rank) for of_rank in sizes]
        received = sent.new_empty(sum(lengths))
        work = dist.all_to_all_single(received, sent, lengths, lengths_sent, group=self._group, async_op=True)

        def end() -> list[tuple[Tensor, ...]]:
            # Of one rank on some backends it is done already.
            if work is not None:
                work.wait()
            parts = zip(received.split(lengths), sizes, strict=True)
            return [part.split(list(of_rank)) for part, of_rank in parts]

        return end
