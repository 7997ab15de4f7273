"""The one order of adding over ranks, against sums written by hand; and the memory of fsshard/comm/lending.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fsshard.comm import tree
from tests.memory import LiveBytes
from tests.on_ranks import on_ranks
from tests.parity.test_any_ranks import tree as by_hand

BY_HAND = {
    2: "(0+1)",
    3: "((0+1)+2)",
    4: "((0+1)+(2+3))",
    5: "(((0+1)+(2+3))+4)",
    6: "(((0+1)+(2+3))+(4+5))",
    7: "(((0+1)+(2+3))+((4+5)+6))",
    8: "(((0+1)+(2+3))+((4+5)+(6+7)))",
}


class Term:
    """Notes how it was added up."""

    def __init__(self, text: str) -> None:
        self.text = text

    def add_(self, other: Term) -> Term:
        self.text = f"({self.text}+{other.text})"
        return self


@pytest.mark.parametrize("size", BY_HAND)
def test_the_order_is_the_written_one(size: int) -> None:
    terms = [Term(str(rank)) for rank in range(size)]
    assert tree.add_up(terms).text == BY_HAND[size]


@given(st.integers(1, 300), st.data())
def test_each_rank_reaches_the_whole_by_its_siblings(size: int, data: st.DataObject) -> None:
    """Each time by the other half of the aligned block that it has: a sum of two has one order."""
    rank = data.draw(st.integers(0, size - 1))
    block = {rank}
    width = 1
    for sibling in tree.siblings(rank, size):
        while len(block) == len(set(range(size)) & set(range(rank // width * width, rank // width * width + width))):
            width *= 2
        block |= set(sibling)
        start = rank // width * width
        assert sorted(block) == list(range(start, min(start + width, size)))
    assert block == set(range(size))


def numbers(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    """Numbers of many magnitudes, whose sum depends on the order."""
    generator = torch.Generator().manual_seed(rank)
    exponents = torch.randint(-8, 8, (length,), generator=generator)
    return (torch.randn(length, generator=generator) * 2.0**exponents).to(dtype)


def job_sums(length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    group = dist.group.WORLD
    assert group is not None
    size = dist.get_world_size()
    whole = tree.all_reduce(numbers(dist.get_rank(), length, dtype), group, 1 / size)
    padded = torch.nn.functional.pad(numbers(dist.get_rank(), length, dtype), (0, -length % size))
    part = padded.new_empty(len(padded) // size)
    tree.reduce_scatter(part, padded, group, 1 / size)
    torchs = numbers(dist.get_rank(), length, dtype) / size
    dist.all_reduce(torchs)
    return whole, part, torchs


@pytest.mark.parametrize(("ranks_started", "length"), [(2, 64), (3, 1001), (4, 7), (4, 1002), (4, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_of_the_tree(ranks: Any, ranks_started: int, length: int, dtype: torch.dtype) -> None:
    expected = by_hand([numbers(rank, length, dtype) * (1 / ranks_started) for rank in range(ranks_started)])
    answers = ranks.run(job_sums, ranks_started, length, dtype)
    for whole, _, _ in answers:
        assert torch.equal(whole, expected)
    parts = torch.cat([part for _, part, _ in answers])
    assert torch.equal(parts[:length], expected)
    if length > 1000:
        assert not torch.equal(answers[0][2], expected), "torch's own order is another: the test can see one"


@on_ranks(3)
def test_large_gradients_go_in_pieces() -> None:
    group = dist.group.WORLD
    assert group is not None
    given = numbers(dist.get_rank(), 1200, torch.float32)
    at_once, in_pieces = given.new_empty(400), given.new_empty(400)
    tree.reduce_scatter(at_once, given, group)
    most = tree.PIECE_BYTES
    tree.PIECE_BYTES = 3 * 4 * 7
    try:
        tree.reduce_scatter(in_pieces, given, group)
    finally:
        tree.PIECE_BYTES = most
    assert torch.equal(at_once, in_pieces)


def job_memory_of_a_sum(length: int) -> float:
    flat = torch.randn(length)
    group = dist.group.WORLD
    assert group is not None
    with LiveBytes() as live:
        tree.all_reduce(flat, group, 0.25)
    return live.peak / flat.nbytes


def test_a_sum_needs_as_much_memory_again(ranks: Any) -> None:
    """Whether or not ranks can share it evenly."""
    assert ranks.run(job_memory_of_a_sum, 4, 4096) == [1.0] * 4
    shares = ranks.run(job_memory_of_a_sum, 4, 4097)
    assert max(shares) <= 1.001, shares
