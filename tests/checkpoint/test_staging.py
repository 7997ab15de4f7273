from __future__ import annotations

import mmap
from unittest import mock

import pytest
import torch
from torch import Tensor

from fsshard.checkpoint import staging
from fsshard.checkpoint.staging import Staging


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    staging._spare.clear()


def tensors() -> list[Tensor]:
    return [
        torch.randn(3, 5),
        torch.randn(7, dtype=torch.complex64),
        torch.randn(4, 6).bfloat16().T,
        torch.tensor(2),
        torch.empty(0, 3),
        torch.rand(9) > 0.5,
        torch.randn(2, 2, dtype=torch.complex64).conj(),
    ]


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_copies_are_equal_and_apart() -> None:
    given = tensors()
    copies = Staging().copy(given)
    for one, copy in zip(given, copies, strict=True):
        assert (copy.dtype, copy.shape) == (one.dtype, one.shape) and torch.equal(copy, one)
        assert copy.is_contiguous() and not copy.is_conj()
    before = [copy.clone() for copy in copies]
    for one in given:
        one.zero_()
    assert all(torch.equal(copy, kept) for copy, kept in zip(copies, before, strict=True))
    assert len({address(copy) for copy in copies}) == 1  # one mapping
    assert all(copy.data_ptr() % staging.ALIGNMENT == 0 for copy in copies)


def test_the_memory_serves_again() -> None:
    room = Staging()
    first = address(room.copy(tensors())[0])
    with mock.patch.object(mmap, "mmap", side_effect=AssertionError("another mapping")):
        room.give_back()
        given = tensors()
        again = Staging().copy(given)
    assert address(again[0]) == first and all(torch.equal(a, b) for a, b in zip(again, given, strict=True))


def test_memory_for_other_tensors_is_let_go() -> None:
    room = Staging()
    room.copy([torch.zeros(8)])
    room.give_back()
    (copy, empty) = room.copy([torch.ones(1000), torch.empty(0, 2)])
    assert copy.sum() == 1000 and empty.shape == (0, 2) and not staging._spare
