"""Cut a part of a parameter so that torch's CPU kernels round each element as they do in the whole."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

GRID = 64
"""A multiple of what any CPU kernel handles per iteration (AVX-512: 2 x 8 complex64)."""

GRAIN = 32768
"""``at::internal::GRAIN_SIZE``: a thread of an elementwise kernel has at least as many elements, or all of them."""


class Block(NamedTuple):
    """Elements [start, stop) of the local part, as [offset, offset + stop - start) of a tensor of ``size`` elements.

    ``size`` 0 means in place.
    """

    start: int
    stop: int
    offset: int
    size: int


@functools.lru_cache(maxsize=1024)
def blocks_of(start: int, stop: int, total: int, threads: int = 1) -> list[Block]:
    """Cut the part [start, stop) of ``total`` elements so that each is rounded as in the whole.

    torch's CPU kernels for complex products and quotients round differently in their vectorised body and in the scalar
    tail of a tensor (torch 2.13, AVX2 and AVX-512); torch's fused kernels round real numbers so, too. So a part is cut
    at multiples of :data:`GRID` elements of the *whole* tensor: the middle is stepped in place, and the block at either
    end in a copy as long as the block of the whole is. Each element then sits in the body or the tail as it does in the
    whole. Where torch may use several threads, each gets a stretch of a large tensor, which has a tail of its own.
    """
    blocks: list[Block] = []
    # The elements of one thread (ATen/ParallelOpenMP.h, invoke_parallel).
    stretch = max(1, _quotient_up(total, _shares(total, threads)))
    for origin in range(0, total, stretch):
        end = min(origin + stretch, total)
        first = max(start, origin)
        last = min(stop, end)
        if first >= last:
            continue
        for block in _blocks_within(first - origin, last - origin, end - origin):
            blocks += _evenly(block, first - start, threads)
    return blocks


def _quotient_up(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _shares(elements: int, threads: int) -> int:
    """Return how many threads share an elementwise kernel."""
    return max(1, min(threads, _quotient_up(elements, GRAIN)))


def _evenly(block: Block, by: int, threads: int) -> list[Block]:
    """Return the block moved ``by`` elements, and cut where threads would not share it at multiples of GRID."""
    start = block.start + by
    stop = block.stop + by
    shares = _shares(stop - start, threads)
    rounds = (stop - start) // (shares * GRID)
    even = max(rounds * shares * GRID, (shares - 1) * GRAIN)
    if shares == 1 or even == stop - start:
        return [block._replace(start=start, stop=stop)]
    rest = Block(start + even, stop, 0, 0)
    return [Block(start, start + even, 0, 0), *_evenly(rest, 0, threads)]


def _blocks_within(start: int, stop: int, total: int) -> Iterator[Block]:
    """Cut the part [start, stop) of one thread's ``total`` elements at multiples of GRID."""
    edges = {start, stop}
    for edge in (_quotient_up(start, GRID) * GRID, stop // GRID * GRID):
        if start < edge < stop:
            edges.add(edge)
    for first, last in itertools.pairwise(sorted(edges)):
        origin = first // GRID * GRID
        size = 0
        if first != origin or (last % GRID and last != total):
            size = min(origin + GRID, total) - origin
        yield Block(first - start, last - start, first - origin, size)
