"""The pieces of a tensor by a rule: a few numbers, however many ranks wrote it.

A table of pieces has an entry for each tensor and rank, which for a thousand of both is a gigabyte. But engines divide
by rules: FSDP2 gives each rank as many rows, FSDP1 a stretch of the buffer in which parameters lie one after the other,
and under DDP all have all.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

Range = tuple[int, int]  # [start, stop) of the elements of a flattened tensor

RANK_FILE = re.compile(r"rank-(\d+)-of-\d+\.safetensors")  # the files of a checkpoint next to its index


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
        return shard, outer * self.inner + k

    def rank(self, shard: int, copy: int) -> int:
        """Return the rank that has a copy of a shard."""
        outer, k = divmod(copy, self.inner)
        return (outer * self.shards + shard) * self.inner + k

    def held(self, shard: int, numel: int) -> Range:
        """Return the elements of a shard, of a tensor of so many."""
        start = shard * self.stride - self.offset
        stop = start + self.stride
        return min(max(start, 0), numel), min(max(stop, 0), numel)

    def shard_of(self, element: int) -> int:
        """Return the shard that has an element."""
        return (element + self.offset) // self.stride


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
        return start + self._cut(size, copy), start + self._cut(size, copy + 1)

    def _cut(self, size: int, copy: int) -> int:
        """Return how many of a shard's elements are written by the copies in front of one."""
        if copy == 0:
            return 0
        if copy == self.copies:
            return size
        nbytes = self.numel * self.itemsize
        begin = copy * self.spread.total // self.copies - self.spread.before
        # Rounded up. The shard is cut where the whole tensor would be: all shards by the same two numbers.
        return -(-size * min(max(begin, 0), nbytes) // nbytes) if nbytes else 0

    def of_rank(self, rank: int) -> Piece | None:
        """Return the piece that a rank has written, if there is one."""
        start, stop = self.written(rank)
        if start == stop:
            return None
        return Piece(rank_file(rank, self.ranks), piece_key(self.name, self.numel, (start, stop)), start, stop)

    def within(self, wanted: Range) -> Iterator[Piece]:
        """Yield the pieces, in order, of the shards that have elements of a range."""
        start, stop = wanted
        if start >= stop:
            return
        for shard in range(self.layout.shard_of(start), self.layout.shard_of(stop - 1) + 1):
            first, last = self.layout.held(shard, self.numel)
            cuts = range(1, self.copies + 1)
            # Of many copies few have written some of a tensor.
            copy = bisect_right(cuts, max(start - first, 0), key=partial(self._cut, last - first))
            while copy < self.copies and first + self._cut(last - first, copy) < min(stop, last):
                piece = self.of_rank(self.layout.rank(shard, copy))
                copy += 1
                if piece is not None:
                    yield piece

    def all(self) -> Iterator[Piece]:
        """Yield all pieces in order."""
        return self.within((0, self.numel))

    def is_sound(self) -> bool:
        """Return whether the ranks' elements are all there are: numbers that a file says may be any."""
        layout = self.layout
        counts = (self.numel, self.ranks, layout.shards, layout.inner, layout.stride)
        if min(counts[1:]) < 1 or min(self.numel, layout.offset, *self.spread) < 0:
            return False
        reaches = layout.shards * layout.stride - layout.offset
        return self.ranks % (layout.shards * layout.inner) == 0 and reaches >= self.numel


Pieces = Sequence[Piece] | Division


def pieces_of(pieces: Pieces) -> Iterator[Piece]:
    """Yield all pieces of a tensor in order."""
    return pieces.all() if isinstance(pieces, Division) else iter(pieces)


def pieces_in(pieces: Pieces, file: str) -> list[Piece]:
    """Return the pieces that are in one file."""
    if isinstance(pieces, Division):
        match = RANK_FILE.fullmatch(file)
        piece = pieces.of_rank(int(match[1])) if match else None
        return [piece] if piece is not None and piece.file == file else []
    return [piece for piece in pieces if piece.file == file]


def cover(pieces: Pieces, wanted: Range) -> Iterator[tuple[Piece, int, int]]:
    """Yield the pieces (sorted, disjoint) that have elements within ``wanted``, and from where to where these go."""
    start, stop = wanted
    for piece in pieces.within(wanted) if isinstance(pieces, Division) else pieces:
        low = max(piece.start, start)
        high = min(piece.stop, stop)
        if high > low:
            yield piece, low, high
