"""Cutting a part of a parameter so that kernels round as they do on the whole."""

from __future__ import annotations

import pytest
import torch

from fsshard.stepping import GRID, blocks_of


@pytest.mark.parametrize("total", [1, 5, 63, 64, 65, 127, 128, 200, 1000])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_blocks_cover_the_part_once(total: int, parts: int) -> None:
    width = -(-total // parts)
    for start in range(0, total, width):
        stop = min(start + width, total)
        position = 0
        for block in blocks_of(start, stop, total):
            assert block.start == position
            position = block.stop
            if block.size:
                assert block.offset + block.stop - block.start <= block.size <= GRID
            else:
                assert (start + block.start) % GRID == 0
        assert position == stop - start


def operations() -> dict[str, object]:
    return {
        "product": lambda a, b: a * b,
        "quotient": lambda a, b: a / b,
        "second moment": lambda a, b: a.clone().addcmul_(b, b.conj(), value=0.1),
    }


def in_blocks(operation: object, a: torch.Tensor, b: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    part_a, part_b = a[start:stop].clone(), b[start:stop].clone()
    result = torch.zeros_like(part_a)
    for block in blocks_of(start, stop, len(a)):
        piece = slice(block.start, block.stop)
        if not block.size:
            result[piece] = operation(part_a[piece], part_b[piece])  # type: ignore[operator]
            continue
        wide_a, wide_b = a.new_ones(block.size), b.new_ones(block.size)
        inside = slice(block.offset, block.offset + block.stop - block.start)
        wide_a[inside], wide_b[inside] = part_a[piece], part_b[piece]
        result[piece] = operation(wide_a, wide_b)[inside]  # type: ignore[operator]
    return result


@pytest.mark.parametrize("name", ["product", "quotient", "second moment"])
def test_complex_kernels_round_as_on_the_whole(name: str) -> None:
    """torch's complex kernels give other last bits on a part (shown), and the same ones on blocks."""
    generator = torch.Generator().manual_seed(0)
    plainly_different = 0
    for total in (33, 103, 500):
        a, b = (torch.randn(total, dtype=torch.complex64, generator=generator) for _ in range(2))
        whole = operations()[name](a, b)  # type: ignore[operator]
        for cut in range(1, total, 7):
            for start, stop in ((0, cut), (cut, total)):
                assert torch.equal(in_blocks(operations()[name], a, b, start, stop), whole[start:stop])
                plain = operations()[name](a[start:stop].clone(), b[start:stop].clone())  # type: ignore[operator]
                plainly_different += not torch.equal(plain, whole[start:stop])
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        assert plainly_different, "torch rounds alike now: the blocks are no longer needed"
