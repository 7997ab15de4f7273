"""The pieces of a tensor by a rule: a few numbers, however many ranks wrote it.

A table of pieces has an entry for each tensor and rank, which for a thousand of both is a gigabyte. But engines divide
by rules: FSDP2 gives each rank as many rows, FSDP1 a stretch of the buffer in which parameters lie one after the other,
and under DDP all have all.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

# The elements [start, stop) of a flattened tensor.
Range = tuple[int, int]

# The files of a checkpoint next to its index.
RANK_FILE = re.compile(r"rank-(\d+)-of-\d+\.safetensors")


class Piece(NamedTuple):
    """Elements ``[start, stop)`` of a flattened tensor; they are the whole of the tensor ``key`` in ``file``."""

    file: str
    key: str
    start: int
    stop: int


def piece_key(name: str, elements: int, part: Range) -> str:
    """Name a part of a tensor of so many elements in a file: as the tensor, with its start if not all."""
    start, stop = part
    if (start, stop) == (0, elements):
        return name
    return f"{name}@{start}"


def rank_file(rank: int, ranks: int) -> str:
    """Name the file that a rank writes."""
    return f"rank-{rank:05d}-of-{ranks:05d}.safetensors"


def rank_of(file: str) -> int:
    """Return the rank that writes a file."""
    return int(RANK_FILE.fullmatch(file)[1])  # type: ignore[index]


class Layout(NamedTuple):
    """The elements of a tensor that each rank holds.

    Ranks are counted through ``inner`` copies of each shard first, then through the shards, then through more copies:
    rank ``(outer * shards + shard) * inner + k``. Shard ``s`` has elements ``[s * stride - offset, (s + 1) * stride -
    offset)``, as far as there are such.
    """

    shards: int
    inner: int
    stride: int
    offset: int

    def place(self, rank: int) -> tuple[int, int]:
        """Return a rank's shard, and which of the copies of that shard it is."""
        outer, within = divmod(rank, self.shards * self.inner)
        shard, k = divmod(within, self.inner)
        copy = outer * self.inner + k
        return shard, copy

    def rank(self, shard: int, copy: int) -> int:
        """Return the rank that has a copy of a shard."""
        outer, k = divmod(copy, self.inner)
        block = outer * self.shards + shard
        return block * self.inner + k

    def held(self, shard: int, numel: int) -> Range:
        """Return the elements of a shard, of a tensor of so many."""
        start = shard * self.stride - self.offset
        stop = start + self.stride
        first = _within(start, numel)
        last = _within(stop, numel)
        return first, last

    def shard_of(self, element: int) -> int:
        """Return the shard that has an element."""
        return (element + self.offset) // self.stride


def _within(place: int, most: int) -> int:
    """Return the number from 0 to ``most`` that is nearest to a place."""
    return min(max(place, 0), most)


def whole_everywhere(numel: int) -> Layout:
    """Return the layout of what every rank has."""
    return Layout(1, 1, max(numel, 1), 0)


class Spread(NamedTuple):
    """The share of the copies in writing: tensors lie end to end, and each copy writes as long a stretch.

    Attributes:
        before: bytes of the tensors in front of this one.
        total: bytes of all of them.
    """

    before: int
    total: int


class Division(NamedTuple):
    """The pieces of a tensor: what each rank has written of it. Also a sequence of those that have elements.

    Attributes:
        name: of the tensor, from which its keys in files are made.
        numel: its elements.
        itemsize: bytes of one.
        ranks: that wrote the checkpoint.
        layout: what each of them held.
        spread: how copies share the work.
    """

    name: str
    numel: int
    itemsize: int
    ranks: int
    layout: Layout
    spread: Spread

    @property
    def copies(self) -> int:
        """Return how many ranks hold each shard."""
        return self.ranks // self.layout.shards

    def written(self, rank: int) -> Range:
        """Return the elements that a rank writes."""
        shard, copy = self.layout.place(rank)
        start, stop = self.layout.held(shard, self.numel)
        size = stop - start
        first = self._cut(size, copy)
        last = self._cut(size, copy + 1)
        return start + first, start + last

    def _cut(self, size: int, copy: int) -> int:
        """Return how many of a shard's elements are written by the copies in front of one."""
        if copy == 0:
            return 0
        if copy == self.copies:
            return size
        nbytes = self.numel * self.itemsize
        if nbytes == 0:
            return 0
        # The shard is cut where the whole tensor would be: all shards by the same two numbers.
        begin = copy * self.spread.total // self.copies
        inside = _within(begin - self.spread.before, nbytes)
        rounded_up = -(-size * inside // nbytes)
        return rounded_up

    def of_rank(self, rank: int) -> Piece | None:
        """Return the piece that a rank has written, if there is one."""
        start, stop = self.written(rank)
        if start == stop:
            return None
        file = rank_file(rank, self.ranks)
        key = piece_key(self.name, self.numel, (start, stop))
        return Piece(file, key, start, stop)

    def within(self, wanted: Range) -> Iterator[Piece]:
        """Yield the pieces, in order, of the shards that have elements of a range."""
        start, stop = wanted
        if start >= stop:
            return
        first_shard = self.layout.shard_of(start)
        last_shard = self.layout.shard_of(stop - 1)
        for shard in range(first_shard, last_shard + 1):
            begin, end = self.layout.held(shard, self.numel)
            for copy in self._copies_within(end - begin, start - begin, stop - begin):
                rank = self.layout.rank(shard, copy)
                piece = self.of_rank(rank)
                if piece is not None:
                    yield piece

    def _copies_within(self, size: int, start: int, stop: int) -> range:
        """Return the copies that write elements from ``start`` to ``stop`` of a shard of so many: few of many."""
        copies = range(self.copies)
        cut_behind = partial(self._cut_behind, size)
        low = max(start, 0)
        high = min(stop, size)
        first = bisect_right(copies, low, key=cut_behind)
        last = bisect_left(copies, high, key=cut_behind)
        behind = min(last + 1, self.copies)
        return range(first, behind)

    def _cut_behind(self, size: int, copy: int) -> int:
        return self._cut(size, copy + 1)

    def all(self) -> Iterator[Piece]:
        """Yield all pieces in order."""
        return self.within((0, self.numel))

    def is_sound(self) -> bool:
        """Return whether the ranks' elements are all there are: numbers that a file says may be any."""
        layout = self.layout
        if min(self.ranks, layout.shards, layout.inner, layout.stride) < 1:
            return False
        if min(self.numel, layout.offset, *self.spread) < 0:
            return False
        block = layout.shards * layout.inner
        if self.ranks % block:
            return False
        reach = layout.shards * layout.stride - layout.offset
        return reach >= self.numel


Pieces = Sequence[Piece] | Division


def pieces_of(pieces: Pieces) -> Iterator[Piece]:
    """Yield all pieces of a tensor in order."""
    if isinstance(pieces, Division):
        return pieces.all()
    return iter(pieces)


def pieces_in(pieces: Pieces, file: str) -> list[Piece]:
    """Return the pieces that are in one file."""
    if isinstance(pieces, Division):
        match = RANK_FILE.fullmatch(file)
        if match is None:
            return []
        rank = int(match[1])
        piece = pieces.of_rank(rank)
        if piece is None or piece.file != file:
            return []
        return [piece]
    return [piece for piece in pieces if piece.file == file]


def cover(pieces: Pieces, wanted: Range) -> Iterator[tuple[Piece, int, int]]:
    """Yield the pieces (sorted, disjoint) that have elements within ``wanted``, and from where to where these go."""
    start, stop = wanted
    if isinstance(pieces, Division):
        candidates: Iterable[Piece] = pieces.within(wanted)
    else:
        candidates = pieces
    for piece in candidates:
        low = max(piece.start, start)
        high = min(piece.stop, stop)
        if high > low:
            yield piece, low, high
