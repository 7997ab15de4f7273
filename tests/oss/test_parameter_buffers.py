"""Flat buffers: parameters are views of them, aligned, in their own layout, and leave them with their values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fsshard.oss.parameter_buffers import ParameterBucket, as_bytes, lay_out

CPU = torch.device("cpu")


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape).to(dtype))


def test_parameters_keep_their_values_and_share_one_buffer_per_dtype() -> None:
    odd, even, half = numbers(3), numbers(2, 4), numbers(5, dtype=torch.bfloat16)
    before = [p.detach().clone() for p in (odd, even, half)]
    bucket = ParameterBucket([odd, even, half], CPU, owner=1)
    assert [b.numel() for b in bucket.buffers.values()] == [11, 5] and bucket.owner == 1
    for buffer in bucket.buffers.values():
        buffer.mul_(2)  # what is received arrives in the parameters
    assert all(torch.equal(p, 2 * b) for p, b in zip((odd, even, half), before, strict=True))


def test_each_begins_at_a_multiple_of_its_own_alignment() -> None:
    """A complex view of four floats behind three would raise: "storage_offset divisible by 2"."""
    odd, even = numbers(3), numbers(4)
    ParameterBucket([odd, even], CPU, owner=0)
    assert even.storage_offset() % 4 == 0
    torch.view_as_complex(even.detach().view(2, 2))


def test_another_order_of_dimensions_is_kept() -> None:
    image = nn.Parameter(torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
    before = image.detach().clone()
    ParameterBucket([image], CPU, owner=0)
    assert image.is_contiguous(memory_format=torch.channels_last) and torch.equal(image, before)


def test_bytes_are_the_same_memory() -> None:
    value = torch.tensor([1.0, 2.0])
    as_bytes(value).zero_()
    assert value.tolist() == [0.0, 0.0] and as_bytes(value).dtype == torch.uint8


def test_what_is_frozen_since_leaves_the_buckets() -> None:
    first, second, other = numbers(2), numbers(3), numbers(4)
    owners: dict[Tensor, int] = {first: 0, second: 0, other: 1}
    before = lay_out([first, second, other], owners, {})
    assert sorted(before[CPU]) == [0, 1]
    second.requires_grad_(False)
    after = lay_out([first, second, other], owners, before)
    assert after[CPU][0].parameters == [first] and second.tolist() == [0, 1, 2]
    after[CPU][0].buffer.fill_(9)
    assert second.tolist() == [0, 1, 2] and first.tolist() == [9, 9]
