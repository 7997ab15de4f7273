"""Where slabs begin and end: how many points of each split dimension every rank has."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

__all__ = ["Layout", "confusable", "even_parts", "layout_text", "whole_sizes"]

Layout = tuple[tuple[int, ...], ...]
"""The number of points that each rank of a split dimension has, in rank order."""


def even_parts(size: int, parts: int) -> tuple[int, ...]:
    """The lengths that ``torch.tensor_split`` gives: the first ``size % parts`` have one more."""
    return tuple(size // parts + (part < size % parts) for part in range(parts))


def whole_sizes(layout: Layout) -> tuple[int, ...]:
    """Return how many points each split dimension has on all ranks together."""
    return tuple(map(sum, layout))


def confusable(layouts: Iterable[Layout]) -> bool:
    """Return whether some rank has slabs of one size in two of them; the same on ranks with the same ``layouts``."""
    return any(
        all(any(map(int.__eq__, mine, theirs)) for mine, theirs in zip(one, other, strict=True))
        for one, other in itertools.combinations(layouts, 2)
    )


def layout_text(layout: Sequence[Sequence[int]]) -> str:
    """A layout for people: ``"5 + 4 + 4 + 4 rows"``."""
    return " by ".join(" + ".join(map(str, sizes)) for sizes in layout) + " rows"
