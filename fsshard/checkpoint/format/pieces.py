"""Decides which rank writes which elements of which tensor, from who holds what.

Engines differ only in this: a rank holds a range of each flattened tensor. The same range on several ranks is a copy
(all of DDP, the replicas of HYBRID_SHARD, FairScale's parameters), and the ranks that hold it share the writing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

__all__ = [
    "INDEX_FILE",
    "RANK_FILE",
    "Held",
    "Piece",
    "Range",
    "cover",
    "divide",
    "first_holders",
    "piece_key",
    "piece_shape",
    "rank_file",
    "rank_of",
    "steps",
]

INDEX_FILE = "index.json"
RANK_FILE = re.compile(r"rank-(\d+)-of-\d+\.safetensors")
"""The files of a checkpoint beside its index."""

STEP_BYTES = 1 << 19
"""What is held of a tensor at once where it is read in steps; the write that follows finds it in the cache."""

Range = tuple[int, int]
"""[start, stop) of the elements of a flattened tensor."""

Held = Sequence["Range | None"]
"""Per rank the range that it holds of one tensor, or None."""


class Piece(NamedTuple):
    """Elements ``[start, stop)`` of a flattened tensor; they are the whole of the tensor ``key`` in ``file``."""

    file: str
    key: str
    start: int
    stop: int


def first_holders(held: Mapping[str, Held], ranks: int) -> list[dict[str, Range]]:
    """Return per rank ``{tensor: range}`` of what it holds and no rank before it: each element once."""
    found: list[dict[str, Range]] = [{} for _ in range(ranks)]
    for name, ranges in held.items():
        first = {part: rank for rank, part in reversed([*enumerate(ranges)]) if part is not None and part[1] > part[0]}
        for part, rank in first.items():
            found[rank][name] = part
    return found


def divide(held: Mapping[str, Held], item_bytes: Mapping[str, int]) -> list[dict[str, Range]]:
    """Per rank ``{tensor: range}`` to write, each element once and the bytes spread evenly over those that have them.

    Args:
        held: tensor -> per rank the range held; ranges of one tensor are equal or disjoint.
        item_bytes: tensor -> bytes of one element.
    """
    ranks = max((len(ranges) for ranges in held.values()), default=0)
    written: list[dict[str, Range]] = [{} for _ in range(ranks)]
    shared: dict[tuple[int, ...], list[tuple[str, Range]]] = {}
    for name, ranges in held.items():
        holders: dict[Range, list[int]] = {}
        for rank, found in enumerate(ranges):
            if found is not None and found[1] > found[0]:
                holders.setdefault(found, []).append(rank)
        for found, those in holders.items():
            if len(those) == 1:
                written[those[0]][name] = found
            else:
                shared.setdefault(tuple(those), []).append((name, found))
    for group, parts in shared.items():
        _share(group, parts, item_bytes, written)
    return written


def _share(
    holders: tuple[int, ...],
    parts: Sequence[tuple[str, Range]],
    item_bytes: Mapping[str, int],
    written: list[dict[str, Range]],
) -> None:
    """Lay ``parts`` end to end and give each holder an equal stretch, so that few tensors are cut."""
    total = sum((stop - start) * item_bytes[name] for name, (start, stop) in parts)
    before = 0
    for name, (start, stop) in parts:
        size = item_bytes[name]
        # The k-th holder's stretch begins at byte k * total / len(holders), here in elements of this part.
        cuts = [-(-(k * total // len(holders) - before) // size) for k in range(len(holders) + 1)]
        bounds = [start + min(max(cut, 0), stop - start) for cut in cuts]
        for rank, low, high in zip(holders, bounds, bounds[1:], strict=False):
            if high > low:
                written[rank][name] = (low, high)
        before += (stop - start) * size


def cover(pieces: Sequence[Piece], wanted: Range) -> Iterator[tuple[Piece, int, int]]:
    """Yield the pieces (sorted, disjoint) that have elements within ``wanted``, and from where to where these go."""
    for piece in pieces:
        low, high = max(piece.start, wanted[0]), min(piece.stop, wanted[1])
        if high > low:
            yield piece, low, high


def piece_shape(shape: Sequence[int], part: Range) -> tuple[int, ...]:
    """Return the shape of a piece in its file: that of the tensor, of whole rows of it, or flat."""
    total, rows = 1, 1
    for length in shape:
        total *= length
    for length in shape[1:]:
        rows *= length
    start, stop = part
    if (start, stop) == (0, total):
        return tuple(shape)
    if len(shape) > 1 and start % rows == 0 and stop % rows == 0:
        return ((stop - start) // rows, *shape[1:])
    return (stop - start,)


def piece_key(name: str, elements: int, part: Range) -> str:
    """Name a part of a tensor of so many elements in a file: as the tensor, with its start if not all."""
    return name if part == (0, elements) else f"{name}@{part[0]}"


def rank_file(rank: int, ranks: int) -> str:
    """Name the file that a rank writes."""
    return f"rank-{rank:05d}-of-{ranks:05d}.safetensors"


def rank_of(file: str) -> int:
    """Return the rank that writes a file."""
    return int(RANK_FILE.fullmatch(file)[1])  # type: ignore[index]


def steps(numel: int, itemsize: int) -> Iterator[Range]:
    """Yield successive ranges of a flattened tensor, each of at most :data:`STEP_BYTES`."""
    step = max(1, STEP_BYTES // itemsize)
    return ((start, min(start + step, numel)) for start in range(0, numel, step))
